"""Tokenizers and token datasets: from text, wherever it lies, to files of token ids that training reads."""

"""mfubench: measure, compare and explain how much of a GPU's arithmetic an LLM pre-training run really uses."""

__version__ = "0.1.0"

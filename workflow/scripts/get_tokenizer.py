"""Fetch a tokenizer, or train one, and check that it is the one that was asked for."""

import argparse
from pathlib import Path

from mfubench.data.config import tokenizer_from_json
from mfubench.data.tokenizer import get_tokenizer
from mfubench.endings import faults_told

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="TokenizerConfig as JSON")
    parser.add_argument("--output", required=True, type=Path, help="folder; its name is the tokenizer's")
    arguments = parser.parse_args()
    with faults_told():
        meta = get_tokenizer(tokenizer_from_json(arguments.config), arguments.output)
    print(f"tokenizer {meta.name}: {meta.vocab_size} ids, {meta.source}")

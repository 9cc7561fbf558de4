"""Fetch a tokenizer, or train one, and check that it is the one that was asked for."""

import argparse
import sys
from pathlib import Path

from mfubench.config import ConfigError
from mfubench.data.config import tokenizer_from_json
from mfubench.data.tokenizer import get_tokenizer

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="TokenizerConfig as JSON")
    parser.add_argument("--output", required=True, type=Path, help="folder; its name is the tokenizer's")
    arguments = parser.parse_args()
    try:
        meta = get_tokenizer(tokenizer_from_json(arguments.config), arguments.output)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    print(f"tokenizer {meta.name}: {meta.vocab_size} ids, {meta.source}")

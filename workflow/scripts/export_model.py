"""Export the last checkpoint of a training in Hugging Face's format: weights, config.json, tokenizer."""

import argparse
import shutil
from pathlib import Path

from mfubench.conversion.checkpoints import export_checkpoint
from mfubench.endings import faults_told

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True, type=Path, help="work folder of the training")
    parser.add_argument("--tokenizer", required=True, type=Path, help="folder of its tokenizer")
    parser.add_argument("--output", required=True, type=Path, help="folder to write; what is there is replaced")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.output, ignore_errors=True)
    with faults_told():
        checkpoint = export_checkpoint(arguments.work, arguments.output, tokenizer_dir=arguments.tokenizer)
    print(f"{arguments.output}: {checkpoint}")

"""Turn text into token files: train.bin, val.bin and meta.json, or numbered shards where the data is large."""

import argparse
from pathlib import Path

from mfubench.data.config import dataset_from_json
from mfubench.data.prepare import prepare_dataset
from mfubench.endings import faults_told

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="DatasetConfig as JSON")
    parser.add_argument("--tokenizer", required=True, type=Path, help="folder of the tokenizer")
    parser.add_argument("--output", required=True, type=Path, help="folder; its name is the dataset's")
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    with faults_told():
        prepare_dataset(
            dataset_from_json(arguments.config), arguments.tokenizer, arguments.output, num_workers=arguments.workers
        )

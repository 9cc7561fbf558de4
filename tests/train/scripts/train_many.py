"""One rank that trains several runs: `train_many.py WORK DATA`, configurations in WORK/configs.json.

Each run leaves WORK/NAME/run.json and, of every rank, WORK/NAME/weights-RANK.pt: the weights as the module computes.
"""

import json
import sys
from pathlib import Path

import torch

from mfubench.run_log import write_run_log
from mfubench.train import loop
from mfubench.train.arguments import Paths, read_config
from mfubench.train.failures import ranks_folder
from mfubench.train.process import end_process, start_process
from mfubench.train.training import finish
from mfubench.train.watchdog import Watchdog

work, data = Path(sys.argv[1]), Path(sys.argv[2])
configs = {key: read_config(text) for key, text in json.loads((work / "configs.json").read_text()).items()}
process = start_process(next(iter(configs.values())), timeout_s=300)


def finish_and_keep_weights(training):
    weights = {}
    for name, parameter in training.model.state_dict().items():
        weights[name] = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.clone()
    torch.save(weights, training.paths.work / f"weights-{process.rank}.pt")
    finish(training)


loop.finish = finish_and_keep_weights
for key, config in configs.items():
    paths = Paths(data, work / key, work / key / "run.json")
    ranks_folder(paths.work).mkdir(parents=True, exist_ok=True)
    process.barrier()
    watchdog = Watchdog(paths.work, process.rank, timeout_s=300)
    log = loop.train(config, paths, process, watchdog, resume="never", display=None)
    watchdog.close()
    if process.is_main:
        write_run_log(paths.output, log)
    torch._dynamo.reset()
end_process()

# The study, expanded once: a fault in it stops here, before the first job. And what it says of the machine.
import json
import os
import re
import shutil
import sys
from pathlib import Path
from shlex import quote

from snakemake.exceptions import WorkflowError
from snakemake.utils import update_config

ROOT = Path(workflow.basedir)
ROOT = (
    ROOT if (ROOT / "src").is_dir() else ROOT.parent
)  # included through workflow/Snakefile
if set("{}") & set(str(ROOT)):
    raise WorkflowError(
        f"the project's folder, {ROOT}, has braces in its name, which Snakemake takes for names of variables: "
        "rename it, or move the project"
    )
SOURCE = ROOT / "src" / "mfubench"
SCRIPTS = ROOT / "workflow" / "scripts"
sys.path.insert(0, str(ROOT / "src"))

from mfubench.config import ConfigError
from mfubench.experiments import (
    expand_study,
    leaves_checkpoint,
    resolve_extends,
    warn_of_cpu,
)
from mfubench.lease import processes_per_node, visible_cards
from mfubench.yaml_files import load_yaml, read_within

# Snakemake strips an inherited PYTHONPATH from conda jobs. A prefix takes the place of its own, which is the strict mode:
# without it a program that fails before `| tee` counts as one that succeeded.
shell.prefix(
    "set -euo pipefail; "
    f"export PYTHONPATH={quote(str(ROOT / 'src'))}${{{{PYTHONPATH:+:$PYTHONPATH}}}}; "
    f"export MFUBENCH_SCRIPTS={quote(str(SCRIPTS))}; "
)

# Of --config, within whose {…} Snakemake leaves every value as text.
given = {
    key: read_within(value) for key, value in workflow.config_settings.config.items()
}
update_config(config, given)
MACHINE_SECTION = (
    config.get("machine") if isinstance(config.get("machine"), dict) else {}
)
PROCESSES_PER_NODE = processes_per_node(MACHINE_SECTION.get("gpus", "auto"))
CONFIG_FILES = [os.path.relpath(file) for file in workflow.configfiles]
CONFIG_FILE = CONFIG_FILES[-1] if CONFIG_FILES else "config/config.yaml"
try:
    # Snakemake's own reading keeps the last of two equal keys: here they are refused.
    for file in workflow.configfiles:
        load_yaml(Path(file))
    config = resolve_extends(config, ROOT / "config" / "studies", CONFIG_FILE)
    STUDY = expand_study(config, CONFIG_FILE, PROCESSES_PER_NODE)
except ConfigError as error:
    raise WorkflowError(str(error)) from None

MACHINE = STUDY.config.machine
RESULTS = f"{STUDY.config.results_dir}/{STUDY.config.study}"
RESOURCES = STUDY.config.resources_dir
LOGS = f"{RESULTS}/logs"
MACHINE_FILE = f"{RESULTS}/machine.json"
HAS_GPUS = bool(visible_cards()) or isinstance(MACHINE.gpus, int)
# Ceilings are measured for the runs; in a study of memory limits alone, for what its searches try.
CEILINGS_RUNS = list(STUDY.runs.values()) or [
    search.run for search in STUDY.searches.values()
]
MEASURES_GPUS = HAS_GPUS and any(run.device != "cpu" for run in CEILINGS_RUNS)
os.environ.update(MACHINE.network)

if workflow.is_main_process:
    for name, reason in STUDY.skipped.items():
        print(f"left out: {name} {reason}", file=sys.stderr)
    if not HAS_GPUS and (warning := warn_of_cpu(STUDY)):
        print(warning, file=sys.stderr)

# Jobs of one node: how many GPUs there are, and one measurement at a time. A limit that nobody gives is no limit.
if workflow.is_main_process:
    workflow.global_resources.setdefault(
        "gpu", PROCESSES_PER_NODE * MACHINE.max_nodes if HAS_GPUS else 0
    )
    workflow.global_resources.setdefault("exclusive", 1)

# A measured rule claims every core, so that nothing else of this workflow runs beside it.
ALL_CORES = os.cpu_count() or 1

# Times that a training starts again by itself. Its job must not do so: the snakemake in there would spend what is left
# of the allocation on a second attempt.
TRAINING_RESTARTS = (
    MACHINE.slurm.training_restarts if MACHINE.slurm and workflow.is_main_process else 0
)


wildcard_constraints:
    case=r"[a-z0-9][a-z0-9.\-]*",

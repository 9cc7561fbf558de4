import json
import os
import re
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

ROOT = Path(workflow.basedir)
ROOT = (
    ROOT if (ROOT / "src").is_dir() else ROOT.parent
)  # included through workflow/Snakefile
SOURCE = ROOT / "src" / "mfubench"
SCRIPTS = ROOT / "workflow" / "scripts"
sys.path.insert(0, str(ROOT / "src"))

from mfubench.code_digest import code_digest, file_digest, text_digest
from mfubench.config import ConfigError
from mfubench.experiments import expand_study, resolve_extends
from mfubench.lease import processes_per_node, visible_cards
from mfubench.slurm import check_status_command, refuse_orphans

# Snakemake strips an inherited PYTHONPATH from conda jobs.
shell.prefix(f"export PYTHONPATH={ROOT / 'src'}${{{{PYTHONPATH:+:$PYTHONPATH}}}}; ")

# --- the study, expanded once; a fault in it stops here, before the first job -----------------------------------------


MACHINE_SECTION = (
    config.get("machine") if isinstance(config.get("machine"), dict) else {}
)
PROCESSES_PER_NODE = processes_per_node(MACHINE_SECTION.get("gpus", "auto"))
CONFIG_FILE = (
    os.path.relpath(workflow.configfiles[-1])
    if workflow.configfiles
    else "config/config.yaml"
)
try:
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
MEASURES_GPUS = HAS_GPUS and any(run.device != "cpu" for run in STUDY.runs.values())
os.environ.update(MACHINE.network)

if workflow.is_main_process and STUDY.skipped:
    for name, reason in STUDY.skipped.items():
        print(f"left out: {name} {reason}", file=sys.stderr)

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

# Stages follow one another by priority, and within a stage all first repeats come before all second ones, in the order
# of the file: repeats are interleaved, so that a drift of the machine meets every case alike. Only smoke gates.
PRIORITY = {
    "tokenizer": 10_000_000,
    "dataset": 9_000_000,
    "machine": 8_000_000,
    "ceilings": 7_500_000,
    "smoke": 7_000_000,
    "baseline": 6_000_000,
    "scaling": 5_000_000,
    "tiers": 4_000_000,
    "ablations": 3_000_000,
    "memory": 2_000_000,
    "training": 1_000_000,
}


def priority_of(stage):
    def priority(wildcards):
        run = STUDY.runs[f"{stage}/{wildcards.case}"]
        return (
            PRIORITY[stage]
            - 1_000 * run.repeat
            - STUDY.cases(stage).index(wildcards.case)
        )

    return priority


# --- what makes results stale: the values of a run and the meaning of the code behind it ---------------------------------

TRAINING_CODE = code_digest(
    [
        SOURCE / "config.py",
        SOURCE / "run_log.py",
        SOURCE / "model",
        SOURCE / "train",
        SOURCE / "data" / "reader.py",
        SOURCE / "kernel_families.py",
        SCRIPTS / "train_model.py",
    ]
)
TEXT = ("config.py", "corpus.py", "documents.py", "streams.py", "encoder.py")
TOKENIZER_CODE = code_digest(
    [SOURCE / "data" / name for name in (*TEXT, "tokenizer.py")]
)
DATASET_CODE = code_digest(
    [
        SOURCE / "data" / name
        for name in (*TEXT, "parts.py", "assembly.py", "prepare.py")
    ]
)
SEARCH_CODE = TRAINING_CODE + code_digest([SOURCE / "memory_search.py"])
CEILINGS_CODE = code_digest(
    [SOURCE / "ceilings", SOURCE / "model" / "attention_kernels.py"]
)
SHARED_ANALYSIS = (
    "run_log.py",
    "flops.py",
    "hardware.py",
    "memory_search.py",
    "presets.py",
    "ceilings/schema.py",
)
ANALYSIS_CODE = code_digest([SOURCE / module for module in SHARED_ANALYSIS])
FACTS = file_digest(
    ROOT / "config" / "hardware.yaml",
    *sorted((ROOT / "config" / "expectations").glob("*.yaml")),
)
TEMPLATES = file_digest(
    *sorted((SOURCE / "analysis" / "report" / "templates").iterdir())
)


FIGURES = (
    "throughput",
    "ladder",
    "effects",
    "scaling",
    "memory",
    "loss",
    "mfu_over_time",
)


def analysis_code(*modules):
    """Digest for an analysis rule: what all of them read, and the modules of its own."""
    return ANALYSIS_CODE + code_digest([SOURCE / module for module in modules])


def table_code():
    """Digest for the tables: the analysis without its figures and its report."""
    return ANALYSIS_CODE + code_digest((SOURCE / "analysis").glob("*.py"))


def plot_code(figure):
    """Digest for one figure: its own module, and what the figures share."""
    others = {f"{name}.py" for name in FIGURES if name != figure}
    shared = [
        path
        for path in (SOURCE / "analysis" / "figures").glob("*.py")
        if path.name not in others
    ]
    return ANALYSIS_CODE + code_digest([*(SOURCE / "analysis").glob("*.py"), *shared])


# --- files and values by name ------------------------------------------------------------------------------------------


def tokenizer_file(name):
    return f"{RESOURCES}/tokenizers/{name}/meta.json"


def dataset_file(name):
    return f"{RESOURCES}/datasets/{name}/meta.json"


def run_file(name):
    return f"{RESULTS}/runs/{name}.json"


def gate_file(case):
    return f"{RESULTS}/smoke/{case}.passed"


def stage_files(stage, gate=False):
    """Run logs of a stage; the smoke stage's gates instead where `gate` is set."""
    return [
        gate_file(case) if gate else run_file(f"{stage}/{case}")
        for case in STUDY.cases(stage)
    ]


def memory_limit_files():
    return [f"{RESULTS}/{name}.json" for name in STUDY.searches]


def all_results():
    """Everything that the analysis reads."""
    return [run_file(name) for name in STUDY.runs] + memory_limit_files()


def config_of(stage):
    """A function of wildcards alone (Snakemake tracks no other) that gives a run's configuration as JSON."""

    def run_config(wildcards):
        return STUDY.runs[f"{stage}/{wildcards.case}"].to_json()

    return run_config


def checked_gpus(run):
    """GPUs that a run takes. Snakemake would lower a request above its limit and say nothing: refuse instead."""
    if not HAS_GPUS or run.device == "cpu":
        return 0
    limit = workflow.global_resources.get("gpu")
    limit = getattr(limit, "value", limit)
    gpus = whole_nodes(run.world_size, run.nnodes)
    if limit is not None and gpus > limit:
        raise WorkflowError(
            f"{run.name} needs {gpus} GPUs, but the limit is gpu={limit} (--resources gpu=N)"
        )
    return gpus


def whole_nodes(gpus, nodes):
    """GPUs to ask for: on a cluster all of each node, since a job that measures has its nodes to itself."""
    return nodes * MACHINE.gpus if MACHINE.slurm else gpus


def measured_resources(stage):
    """What a measured run takes: GPUs, nodes, and no other measurement beside it."""

    def run(wildcards):
        return STUDY.runs[f"{stage}/{wildcards.case}"]

    def gpu(wildcards):
        return checked_gpus(run(wildcards))

    def nodes(wildcards):
        return run(wildcards).nnodes

    resources = {"gpu": gpu, "nodes": nodes, "exclusive": 1}
    if MACHINE.slurm:
        # `mpi`: the job is the bare batch script, which starts itself on each node; `tasks`: as many as there are nodes
        resources |= {"mpi": "", "tasks": nodes, "tasks_per_gpu": 0}
    return slurm_node(stage) | resources


def node_resources(stage):
    """What a job takes that has one whole node, but is no run."""
    gpus = whole_nodes(largest_world_size(), 1) if MEASURES_GPUS else 0
    return slurm_node(stage) | {"gpu": gpus, "nodes": 1}


def resources_of_search():
    return node_resources("memory") | {"gpu": gpus_of_search, "exclusive": 1}


def slurm_node(stage):
    """What SLURM is asked for by a job that has its nodes to itself; nothing elsewhere."""
    asked = MACHINE.slurm
    if asked is None:
        return {}
    signal = (
        f"--signal=TERM@{asked.stop_before_end_s}" if asked.stop_before_end_s else ""
    )
    cpus = asked.cpus_per_gpu * MACHINE.gpus if asked.cpus_per_gpu else -1
    return slurm_job(asked.partition_gpu, stage) | {
        "mem_mb": asked.mem_mb_per_gpu * MACHINE.gpus,
        "cpus_per_task": cpus,
        "slurm_extra": f"--exclusive {signal} {asked.extra}".strip(),
    }


def cpu_resources(kind):
    """What SLURM is asked for by a job on a CPU node; nothing elsewhere."""
    asked = MACHINE.slurm
    if asked is None:
        return {}
    cpus = asked.cpus if kind == "preparation" else 1
    return slurm_job(asked.partition_cpu, kind) | {
        "mem_mb": asked.mem_mb,
        "cpus_per_task": cpus,
        "nodes": 1,
    }


def slurm_job(partition, kind):
    asked = MACHINE.slurm
    account = {"slurm_account": asked.account} if asked.account else {}
    runtime = asked.runtime_min[kind]
    return {"slurm_partition": partition, "runtime": runtime} | account


def run_inputs(stage):
    """A run needs its data and, after the smoke stage, a model that passed its smoke test."""

    def inputs(wildcards):
        name = f"{stage}/{wildcards.case}"
        return dataset_and_gate(name, STUDY.runs[name])

    return inputs


def dataset_and_gate(name, run):
    """A smoke test that ran again does not make a run stale, so its gate is `ancient`, but only for a run that is up
    to date: Snakemake looks at no other reason of a job whose ancient input is being made, and would leave a stale
    run for a second call.
    """
    needed = [dataset_file(run.dataset)]
    gate = STUDY.smoke_case(run.model.name)
    if gate is not None and run.stage != "smoke":
        needed.append(ancient(gate_file(gate)) if is_current(name) else gate_file(gate))
    return needed


def stamp_file(name):
    return f"{RESULTS}/stamps/{name}"


def stamp_of(name):
    """What a result was made with: values, code, generation of the machine."""
    if name in STUDY.searches:
        made_with = STUDY.searches[name].to_json() + SEARCH_CODE
    else:
        made_with = STUDY.runs[name].to_json() + TRAINING_CODE
    return text_digest(f"{made_with} {MACHINE.generation}")


def is_current(name):
    """Was this result made with what stands in the study and the code now? (A missing stamp says no.)"""
    file = Path(stamp_file(name))
    return file.is_file() and file.read_text(encoding="utf-8") == stamp_of(name)


def run_options(stage):
    """Folders of a run and the cards it may take: where, not what, so none of it belongs to its configuration."""

    def options(wildcards):
        name = f"{stage}/{wildcards.case}"
        return options_of(name, STUDY.runs[name])

    return options


def work_of(name):
    """Where a run leaves what it needs to go on. Trainings and searches go on after a kill, but only with the same
    values and code: other ones start anew, in a folder of their own.
    """
    folder = f"{RESULTS}/work/{name}"
    if goes_on(name):
        return f"{folder}/{stamp_of(name)[:8]}"
    return folder


def goes_on(name):
    return name.startswith("training/") or name in STUDY.searches


def work_of_training(wildcards):
    return work_of(f"training/{wildcards.case}")


def tokenizer_of_training(wildcards):
    run = STUDY.runs[f"training/{wildcards.case}"]
    return tokenizer_file(STUDY.config.datasets[run.dataset].tokenizer)


def export_files():
    """Exported models of the trainings that leave a checkpoint."""
    runs = [STUDY.runs[f"training/{case}"] for case in STUDY.cases("training")]
    return [
        f"{RESULTS}/hf/{run.case}/config.json"
        for run in runs
        if run.checkpoint.at_end or run.checkpoint.interval
    ]


def options_of(name, run):
    folder = Path(dataset_file(run.dataset)).parent
    tokenizer = Path(
        tokenizer_file(STUDY.config.datasets[run.dataset].tokenizer)
    ).parent
    work, resume = work_of(name), "auto" if goes_on(name) else "never"
    return (
        f"--data {folder} --tokenizer {tokenizer} --work {work} --resume {resume} "
        f"--ceilings {RESULTS}/ceilings.json --stamp-file {stamp_file(name)} --stamp {stamp_of(name)} "
        f"{lease_options(run.world_size // run.nnodes if run.device != 'cpu' else 0)}"
    )


def lease_options(cards):
    """Cards to take, of which, and what to do when they are busy."""
    if not HAS_GPUS or cards == 0:
        return "--cards 0"
    devices = (
        f" --devices {','.join(map(str, MACHINE.devices))}" if MACHINE.devices else ""
    )
    return f"--cards {cards}{devices} --when-busy {MACHINE.when_busy} --wait-s {MACHINE.wait_s:g}"


def largest_world_size():
    """Cards of one node that the study's largest run takes."""
    return max((run.world_size // run.nnodes for run in STUDY.runs.values()), default=1)


# --- tokenizers, datasets, ceilings, memory searches ---------------------------------------------------------------------


def tokenizer_config(wildcards):
    return STUDY.config.tokenizers[wildcards.tokenizer].to_json()


def dataset_config(wildcards):
    return STUDY.config.datasets[wildcards.dataset].to_json()


def tokenizer_of_dataset(wildcards):
    return tokenizer_file(STUDY.config.datasets[wildcards.dataset].tokenizer)


def tokenizer_folder_of_dataset(wildcards):
    return str(Path(tokenizer_of_dataset(wildcards)).parent)


def ceilings_request(wildcards):
    """What to measure: shapes of the study's models, at the world sizes of its runs."""
    runs = list(STUDY.runs.values())
    models = {run.model.name: json.loads(run.model.model_dump_json()) for run in runs}
    return json.dumps(
        {
            "models": list(models.values()),
            "seq_len": max((run.seq_len for run in runs), default=1),
            "micro_batch_size": STUDY.config.ceilings.micro_batch_size,
            "dtypes": sorted({run.dtype for run in runs}),
            "seconds": STUDY.config.ceilings.seconds,
            "world_sizes": sorted({run.world_size // run.nnodes for run in runs}),
        },
        sort_keys=True,
    )


def search_config(wildcards):
    return STUDY.searches[f"memory/{wildcards.case}"].to_json()


def search_inputs(wildcards):
    name = f"memory/{wildcards.case}"
    return dataset_and_gate(name, STUDY.searches[name].run)


def search_options(wildcards):
    name = f"memory/{wildcards.case}"
    return options_of(name, STUDY.searches[name].run)


def gpus_of_search(wildcards):
    return checked_gpus(STUDY.searches[f"memory/{wildcards.case}"].run)


def write_declaration(path, study, log_path):
    """study.json: what the study consists of, for the analysis."""
    Path(path).write_text(study, encoding="utf-8")
    Path(log_path).write_text(
        f"{len(STUDY.runs)} runs, {len(STUDY.skipped)} left out\n", encoding="utf-8"
    )


# --- before the first job ---------------------------------------------------------------------------------------------------


def check_queue():
    """Refuse to submit what an earlier snakemake's jobs still work on, and to wait for states that never come."""
    settings = getattr(workflow, "executor_settings", None)
    if MACHINE.slurm is None and not hasattr(settings, "status_command"):
        return  # neither the study nor this call has to do with SLURM, whatever is installed here
    try:
        refuse_orphans(Path.cwd())
        check_status_command(getattr(settings, "status_command", None))
    except ConfigError as error:
        raise WorkflowError(str(error)) from None


# --- after a failure -----------------------------------------------------------------------------------------------------


def show_what_exists():
    """After a failure: what is there, what failed and why."""
    shell("mfubench report {RESULTS} --partial || true")


wildcard_constraints:
    case=r"[a-z0-9][a-z0-9.\-]*",
    tokenizer="|".join(map(re.escape, STUDY.config.tokenizers)) or "none",
    dataset="|".join(map(re.escape, STUDY.config.datasets)) or "none",

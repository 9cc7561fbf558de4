# What jobs are called with. Functions of wildcards alone: Snakemake tracks no other.


def config_of(stage):
    """A run's configuration as JSON."""

    def run_config(wildcards):
        return STUDY.runs[f"{stage}/{wildcards.case}"].to_json()

    return run_config


def run_options(stage):
    """Folders of a run and the cards it may take: where, not what, so none of it belongs to its configuration."""

    def options(wildcards):
        name = f"{stage}/{wildcards.case}"
        return options_of(name, STUDY.runs[name])

    return options


def options_of(name, run):
    folder = Path(dataset_file(run.dataset)).parent
    tokenizer = Path(
        tokenizer_file(STUDY.config.datasets[run.dataset].tokenizer)
    ).parent
    work, resume = work_of(name), "auto" if goes_on(name) else "never"
    start = ""
    if run.continues is not None:
        start = f"--start-from {work_of(run.continues)}/checkpoints "
    return start + (
        f"--data {folder} --tokenizer {tokenizer} --work {work} --resume {resume} "
        f"--ceilings {RESULTS}/ceilings.json --stamp-file {stamp_file(name)} --stamp {stamp_of(name)} "
        f"{lease_options(run.world_size // run.nnodes if run.device != 'cpu' else 0)}"
    )


def evaluated_length(wildcards):
    """Tokens of the longest sequences that the study evaluates on the dataset of a smoke run; 0: it evaluates none."""
    dataset = STUDY.runs[f"smoke/{wildcards.case}"].dataset
    return max(
        (
            run.seq_len
            for run in STUDY.runs.values()
            if run.evaluation.asked_for and run.dataset == dataset
        ),
        default=0,
    )


def lease_options(cards):
    """Cards to take, of which, and what to do when they are busy."""
    if not HAS_GPUS or cards == 0:
        return "--cards 0"
    devices = (
        f" --devices {','.join(map(str, MACHINE.devices))}" if MACHINE.devices else ""
    )
    return f"--cards {cards}{devices} --when-busy {MACHINE.when_busy} --wait-s {MACHINE.wait_s:g}"


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
    runs = CEILINGS_RUNS
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


def plan_config(wildcards):
    return STUDY.config.plans[wildcards.case].to_json()


def search_options(wildcards):
    name = f"memory/{wildcards.case}"
    return options_of(name, STUDY.searches[name].run)


def tokenizer_of_training(wildcards):
    run = STUDY.runs[f"training/{wildcards.case}"]
    return tokenizer_file(STUDY.config.datasets[run.dataset].tokenizer)

# Files by name.
DECLARATION_TEMPLATE = os.path.relpath(ROOT / "workflow" / "templates" / "study.json")


def tokenizer_file(name):
    return f"{RESOURCES}/tokenizers/{name}/meta.json"


def dataset_file(name):
    return f"{RESOURCES}/datasets/{name}/meta.json"


def run_file(name):
    return f"{RESULTS}/runs/{name}.json"


def trace_file(name):
    return f"{RESULTS}/traces/{name}.json.gz"


def trace_files():
    """Traces of the runs that keep one."""
    return [
        trace_file(name)
        for name, run in STUDY.runs.items()
        if run.measurement.profile == "timeline"
    ]


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


def plan_files():
    return [f"{RESULTS}/plans/{name}.json" for name in STUDY.config.plans]


def all_results():
    """Everything that the analysis reads."""
    return [run_file(name) for name in STUDY.runs] + memory_limit_files()


def table_file(name):
    return f"{RESULTS}/tables/{name}.csv"


def figure_file(name):
    return f"{RESULTS}/figures/{name}.png"


def analysis_files():
    """Everything that a finished study has except machine.json: losing that is no reason to measure again, and made
    anew it would be newer than every run.
    """
    return [
        *all_results(),
        *trace_files(),
        f"{RESULTS}/ceilings.json",
        f"{RESULTS}/study.json",
        *[table_file(name) for name in TABLES],
        *[figure_file(name) for name in FIGURES],
        *[f"{RESULTS}/{name}" for name in ("report.html", "report.md", "summary.json")],
        *[f"{RESULTS}/{name}" for name in ("audit.json", "audit.passed")],
    ]


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


def work_of_run(wildcards):
    return work_of(f"{wildcards.stage}/{wildcards.case}")


def work_of_training(wildcards):
    return work_of(f"training/{wildcards.case}")


def export_files():
    """Exported models of the trainings that leave a checkpoint."""
    runs = [STUDY.runs[f"training/{case}"] for case in STUDY.cases("training")]
    return [
        f"{RESULTS}/hf/{run.case}/config.json"
        for run in runs
        if leaves_checkpoint(run, STUDY.runs)
    ]

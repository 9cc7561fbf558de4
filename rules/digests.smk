# The meaning of the code and the facts behind each rule, as parameters: what changes there makes results stale.
from mfubench.code_digest import code_digest, file_digest, text_digest

TRAINING_CODE = code_digest(
    [
        SOURCE / "config.py",
        SOURCE / "run_log.py",
        SOURCE / "model",
        SOURCE / "train",
        SOURCE / "data" / "reader.py",
        SOURCE / "kernel_families.py",
        SOURCE / "profiling" / "chrome_trace.py",
        SOURCE / "profiling" / "trace_file.py",
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
PREDICTION = (
    "predict.py",
    "calibration.py",
    "measured_runs.py",
    "result_files.py",
    "step_model.py",
    "card_rates.py",
    "memory.py",
    "flops.py",
    "hardware.py",
)
PLANNER_CODE = code_digest(
    [*SOURCE.glob("planner*.py"), *(SOURCE / name for name in PREDICTION)]
)
CEILINGS_CODE = code_digest(
    [SOURCE / "ceilings", SOURCE / "model" / "attention_kernels.py"]
)
SHARED_ANALYSIS = (
    "run_log.py",
    "result_files.py",
    "host_load.py",
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


TABLES = ("runs", "expectations", "effects", "scaling", "memory", "profiles")
FIGURES = (
    "throughput",
    "ladder",
    "effects",
    "scaling",
    "memory",
    "loss",
    "mfu_over_time",
    "waterfall",
    "roofline",
)


def analysis_code(*modules):
    """Digest for an analysis rule: what all of them read, and the modules of its own."""
    return ANALYSIS_CODE + code_digest([SOURCE / module for module in modules])


# What takes a profiled step apart, beside the analysis.
PROFILE_CODE = code_digest(
    SOURCE / module for module in ("profiling", "step_model.py", "memory.py")
)


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

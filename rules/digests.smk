# The meaning of the code and the facts behind each rule, as parameters: what changes there makes results stale.
# tests/workflow/test_digests.py compares them with what the rules' scripts import.
from mfubench.code_digest import TRAINING, code_digest, file_digest, text_digest

TRAINING_CODE = code_digest(
    [*(SOURCE / name for name in TRAINING), SCRIPTS / "train_model.py"]
)
TEXT = (
    "config.py",
    "corpus.py",
    "local_files.py",
    "hub_dataset.py",
    "documents.py",
    "streams.py",
    "encoder.py",
)
TOKENIZER_CODE = code_digest(
    [SOURCE / "data" / name for name in (*TEXT, "tokenizer.py")]
)
DATASET_CODE = code_digest(
    [
        SOURCE / "data" / name
        for name in (*TEXT, "parts.py", "assembly.py", "prepare.py")
    ]
)
SEARCH_CODE = TRAINING_CODE + code_digest(
    [SOURCE / "memory_search.py", SOURCE / "host_load.py"]
)
PREDICTION = (
    "prediction",
    "result_files.py",
    "decisions.py",
    "flops.py",
    "hardware.py",
    "presets.py",
    "ceilings/schema.py",
    "tune/search.py",
)
PLANNER_CODE = code_digest(
    [
        SOURCE / "planner",
        *(SOURCE / name for name in PREDICTION),
        SOURCE / "analysis" / "figures" / "style.py",
    ]
)
EXPORT_CODE = code_digest([SOURCE / "conversion"])
SMOKE_CODE = code_digest([SOURCE / "smoke.py"])
CEILINGS_CODE = code_digest(
    [
        SOURCE / "ceilings",
        SOURCE / "model" / "attention.py",
        SOURCE / "model" / "attention_kernels.py",
        SOURCE / "train" / "exchange.py",
    ]
)
SHARED_ANALYSIS = (
    "run_log.py",
    "result_files.py",
    "host_load.py",
    "flops.py",
    "hardware.py",
    "memory_search.py",
    "presets.py",
    "words.py",
    "ceilings/schema.py",
)
ANALYSIS_CODE = code_digest([SOURCE / module for module in SHARED_ANALYSIS])
FACTS = file_digest(
    ROOT / "config" / "hardware.yaml",
    ROOT / "config" / "models.yaml",
    *sorted((ROOT / "config" / "expectations").glob("*.yaml")),
)
# What predictions start from, and the measured studies that they are calibrated on.
PREDICTION_FACTS = file_digest(
    ROOT / "config" / "prediction.yaml",
    *sorted((ROOT / "results" / "reference").rglob("*.json")),
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
    SOURCE / module
    for module in (
        "profiling",
        "prediction/resolved_settings.py",
        "prediction/step_bytes.py",
        "prediction/step_model.py",
        "prediction/memory.py",
        "decisions.py",
        "prediction/measured_runs.py",
    )
)


def audit_code():
    """Digest for the audit, which shares what a study and its runs' settings are with the analysis."""
    shared = ("analysis/settings.py", "analysis/study.py")
    return analysis_code("audit", "kernel_families.py", *shared)


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

"""Every module that a rule's script imports is in the rule's digest, or left out of it for a reason given here."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mfubench import code_digest

ROOT = Path(__file__).parents[2]
SOURCE, SCRIPTS = ROOT / "src" / "mfubench", ROOT / "workflow" / "scripts"

# Programs that a job starts beside its script: the launcher, and the rank that it starts.
STARTED = dict.fromkeys(
    ("train_model.py", "search_memory.py"), (SOURCE / "train" / "launch.py", SOURCE / "train" / "worker.py")
)
# Rules without a digest, and scripts that count in none.
UNTRACKED = {
    "record_machine": "a fact of the machine; machine.generation makes it anew",
    "keep_trace": "only a new run makes it stale: nothing else could make the trace again",
    "check_audit": "reads the verdict that audit.json holds",
}
WRAPPERS = {"lease_cards.py": "takes cards and runs a command, which has the script that counts"}

# --- what digests leave out ------------------------------------------------------------------------------------------

LEFT_OUT = {
    "cache.py": "where kernels are kept that were compiled",
    "complaints.py": "words of errors",
    "config.py": "is in the digest of the trainings, whose runs all others read; values are parameters of the rules",
    "endings.py": "how a program ends that met a fault",
    "data/meta.py": "the schema of meta.json, which its reader checks",
    "flops.py": "formulas for who judges a run: what a run records of them is the model's shape",
    "machine.py": "names of cards and packages, which machine.json holds a study to",
    "result_files.py": "finds and reads files",
    "run_log.py": "is in the digest of the trainings, whose runs all others read",
    "telemetry_record.py": "the form of what was sampled beside a measurement, checked where it is read",
    "yaml_files.py": "reads files",
}
BESIDE = {"telemetry/__init__.py": "what is sampled beside a measurement is none of its numbers"}
TRAINING = {
    **LEFT_OUT,
    **BESIDE,
    "banner.py": "what is shown when a run starts",
    "ceilings/schema.py": "the peak that is shown on a CPU while a run lasts",
    "hardware.py": "the peak that is shown while a run lasts",
    "slurm.py": "how a job reaches its nodes",
    "stop_signals.py": "how a run is asked to stop",
    "training_job.py": "what comes before a run: the machine, free cards, a process of its own",
}
PREDICTED = "where a search looks first; the limit that it finds is the same"
SEARCH = {
    **TRAINING,
    "prediction/calibration.py": PREDICTED,
    "job.py": "what comes before a run: the machine, free cards",
    "prediction/measured_runs.py": PREDICTED,
    "prediction/memory.py": PREDICTED,
}
TOKENIZER = {
    **LEFT_OUT,
    "data/hub.py": "fetches a file; what was asked for is in the parameters, and what came is checked",
}
DATASET = {
    **LEFT_OUT,
    "data/disk.py": "estimates whether the disk has room",
    "data/hub.py": "fetches a file; what was asked for is in the parameters, and what came is checked",
    "data/progress.py": "what is shown meanwhile",
}
SHARED = "of figures of runs, which share style.py"
PLANS = {
    **LEFT_OUT,
    "analysis/findings.py": SHARED,
    "analysis/measures.py": SHARED,
    "analysis/units.py": SHARED,
}
EXPORT = {
    **LEFT_OUT,
    "experiments/overrides.py": "merges the settings of an import",
    **dict.fromkeys(
        (
            *("model/attention_kernels.py", "model/decoder.py", "model/loss.py"),
            *("train/checkpoint_files.py", "train/checkpoint_folders.py", "train/setup.py"),
        ),
        "is in the digest of the trainings, whose checkpoint is exported",
    ),
}
CEILINGS = {
    **LEFT_OUT,
    **BESIDE,
    "decisions.py": "what runs do by themselves: an exchange is measured where it can be had at all",
    "hardware.py": "the same: which cards exchange by themselves",
    "model/attention_times.py": "which attention `auto` takes: ceilings measure each",
    "train/failures.py": "how a rank that failed is told",
    "train/process.py": "how ranks find each other",
}
TRIALS = "how a search makes its trials, of which the analysis has the results"
AUDIT = {**LEFT_OUT, "experiments/schema.py": "the form of a study file, which study.json holds expanded"}
ANALYSIS = {**AUDIT, "prediction/calibration.py": TRIALS, "job.py": TRIALS, "training_job.py": TRIALS}
FIGURE = {
    **ANALYSIS,
    **dict.fromkeys(
        (
            *("decisions.py", "prediction/measured_runs.py", "prediction/memory.py"),
            *("prediction/resolved_settings.py", "prediction/step_bytes.py", "prediction/step_model.py"),
            *("profiling/breakdown.py", "profiling/categories.py", "profiling/trace_file.py"),
        ),
        "of profiled steps, which the figure does not show",
    ),
}
PROFILED = {
    **ANALYSIS,
    "prediction/card_rates.py": "rates of cards that nobody measured: an analysis predicts nothing",
}
BY_SCRIPT = {  # figures aside
    "train_model.py": TRAINING,
    "search_memory.py": SEARCH,
    "get_tokenizer.py": TOKENIZER,
    "prepare_dataset.py": DATASET,
    "plan_models.py": PLANS,
    "export_model.py": EXPORT,
    "measure_ceilings.py": CEILINGS,
    "check_smoke.py": LEFT_OUT,
    "audit_study.py": AUDIT,
    **dict.fromkeys(("tabulate_runs.py", "write_report.py", "plot_waterfall.py", "plot_roofline.py"), PROFILED),
}

# --- what the rules say ----------------------------------------------------------------------------------------------


def read_rules() -> dict[str, tuple[list[str], str | None]]:
    """Scripts of each rule that runs any, and its expression for `code`; a rule that uses another has its scripts."""
    rules: dict[str, tuple[list[str], str | None]] = {}
    for path in sorted((ROOT / "rules").glob("*.smk")):
        heads = r"^(?:rule (?P<own>\w+)|use rule (?P<base>\w+) as (?P<name>\w+) with):\n(?P<body>(?:[ ].*\n|\n)*)"
        for found in re.finditer(heads, path.read_text(encoding="utf-8"), re.MULTILINE):
            body = found["body"]
            code = re.search(r"^ +code=(.+),$", body, re.MULTILINE)
            figure = re.search(r'^ +figure="(\w+)",$', body, re.MULTILINE)
            scripts = re.findall(r'"\$MFUBENCH_SCRIPTS"/([\w.{}]+\.py)', body) or [found["base"]]
            if figure is not None:
                scripts = [f"plot_{figure[1]}.py"]
            rules[found["own"] or found["name"]] = (scripts, code and code[1])
    for name, (scripts, code) in rules.items():
        rules[name] = (rules[scripts[0]][0] if scripts[0] in rules else scripts, code)
    return {name: (scripts, code) for name, (scripts, code) in rules.items() if scripts != [None]}


RULES = read_rules()
# Script and `code` of those with a digest
TRACKED = {
    name: (next(script for script in scripts if script not in WRAPPERS), code)
    for name, (scripts, code) in RULES.items()
    if code is not None
}


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What rules/digests.smk defines, its digests as the lists of files that they are of."""
    monkeypatch.setattr(code_digest, "code_digest", lambda paths: list(code_digest.python_files(paths)))
    monkeypatch.setattr(code_digest, "file_digest", lambda *paths: [Path(path) for path in paths])
    names: dict[str, Any] = {"ROOT": ROOT, "SOURCE": SOURCE, "SCRIPTS": SCRIPTS}
    exec((ROOT / "rules" / "digests.smk").read_text(encoding="utf-8"), names)
    return names


# --- what the scripts import -----------------------------------------------------------------------------------------


def file_of(module: str) -> Path | None:
    path = SOURCE.parent.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@cache
def imports(path: Path) -> frozenset[Path]:
    """Files of this package that a file imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(parse(path)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {file for module in modules if module.startswith("mfubench.") for file in files_of(module)}
    return frozenset(found)


def files_of(module: str) -> set[Path]:
    """The file that a module, or a name in one, is of, and those of the packages around it.

    Not of packages that hold nothing or only names of their modules: of these the module itself counts.
    """
    parts, found = module.split("."), set()
    for length in range(2, len(parts) + 1):
        if (file := file_of(".".join(parts[:length]))) is None:
            continue
        names = names_handed_on(file)
        if names is None:
            found.add(file)
        elif length < len(parts) and parts[length] in names:
            found |= files_of(f"{names[parts[length]]}.{parts[length]}")
    return found


@cache
def names_handed_on(file: Path) -> dict[str, str] | None:
    """Of a package that holds names of its modules and nothing else: the module of each; None for any other file."""
    if file.name != "__init__.py":
        return None
    body = [node for node in parse(file).body if not isinstance(node, ast.Expr)]  # the docstring
    handed_on = [node for node in body if isinstance(node, ast.ImportFrom) and node.module is not None]
    others = [node for node in body if node not in handed_on and "__all__" not in ast.unparse(node)]
    return None if others else {alias.name: node.module or "" for node in handed_on for alias in node.names}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def outside(script: str, covered: set[Path]) -> set[str]:
    """What a script imports, directly or by way of files that are covered, and is not covered itself."""
    todo = [SCRIPTS / script, *STARTED.get(script, ())]
    seen, found = set(todo), set()
    while todo:
        for file in imports(todo.pop()) - seen:
            seen.add(file)
            if file in covered:
                todo.append(file)
            else:
                found.add(file.relative_to(SOURCE).as_posix())
    return found


# --- compared --------------------------------------------------------------------------------------------------------


def test_every_script_belongs_to_a_rule() -> None:
    used = {script for scripts, _ in RULES.values() for script in scripts}
    by_hand = {"cancel_orphans.py"}
    assert used | by_hand == {path.name for path in SCRIPTS.glob("*.py")}
    assert {name for name, (_, code) in RULES.items() if code is None} == UNTRACKED.keys()


@pytest.mark.parametrize("rule", TRACKED)
def test_a_digest_holds_what_its_script_imports(rule: str, digests: dict[str, Any]) -> None:
    script, code = TRACKED[rule]
    missing = outside(script, set(eval(code, digests))) - BY_SCRIPT.get(script, FIGURE).keys()
    assert not missing, f"{script} imports what `code` of rule {rule} does not hold"


def test_reasons_are_given_for_what_is_imported_and_in_no_digest(digests: dict[str, Any]) -> None:
    left_out: dict[int, set[str]] = {}
    for script, code in TRACKED.values():
        left_out.setdefault(id(BY_SCRIPT.get(script, FIGURE)), set()).update(outside(script, set(eval(code, digests))))
    tables = {id(table): table for table in (*BY_SCRIPT.values(), FIGURE)}
    assert set().union(*(table.keys() - LEFT_OUT.keys() - left_out[key] for key, table in tables.items())) == set()
    assert LEFT_OUT.keys() - set().union(*left_out.values()) == set()


def test_facts_behind_predictions_are_behind_plans(digests: dict[str, Any]) -> None:
    body = (ROOT / "rules" / "plans.smk").read_text(encoding="utf-8")
    expression = re.search(r"^ +facts=(.+),$", body, re.MULTILINE)
    assert expression is not None
    facts = {path.relative_to(ROOT).as_posix() for path in eval(expression[1], digests)}
    assert {f"config/{name}.yaml" for name in ("hardware", "models", "prediction")} < facts
    assert any(name.startswith("results/reference/h100/") for name in facts)

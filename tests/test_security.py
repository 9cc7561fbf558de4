"""Configurations, logs and checkpoints of strangers are data: nothing in them runs or leaves its folder."""

from __future__ import annotations

import ast
import copy
import io
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from analysis.example_study import write_cpu_study
from train.train_runs import environment, run_arguments, run_here, tiny_config, write_dataset
from workflow.project import STUDY, copy_project

from mfubench.analysis.report.render import main as write_report
from mfubench.config import ConfigError
from mfubench.conversion.checkpoints import read_masters
from mfubench.experiments import expand_study, parse_overrides
from mfubench.run_log import read_run_log, write_run_log
from mfubench.train.checkpoint_files import IndexUnpickler

ROOT = Path(__file__).parents[1]
PROGRAMS = [*(ROOT / "src").rglob("*.py"), *(ROOT / "workflow" / "scripts").glob("*.py")]
HOSTILE = "<script>alert(1)</script>"


def calls(path: Path) -> list[tuple[str, dict[str, ast.expr]]]:
    """Every call of a file: the function as it is written, and its keyword arguments."""
    found = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return [(ast.unparse(node.func), {word.arg: word.value for word in node.keywords if word.arg}) for node in found]


def is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_program_runs_what_it_reads(path):
    for function, words in calls(path):
        assert function not in ("eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"), function
        assert not is_true(words.get("shell")) and not is_true(words.get("trust_remote_code")), function
        assert not re.match(r"(pickle|cPickle|dill|marshal|shelve|joblib)\.\w*(load|open)", function), function
        if function == "torch.load":
            assert is_true(words.get("weights_only")), "torch.load without weights_only"
        if function in ("np.load", "numpy.load"):
            assert not is_true(words.get("allow_pickle"))


def test_yaml_of_a_study_makes_no_objects(tmp_path):
    proof = tmp_path / "proof"
    hostile = f"!!python/object/apply:os.system ['touch {proof}']"
    with pytest.raises(ConfigError, match="the value is not YAML"):
        parse_overrides([f"seed={hostile}"])
    project = copy_project(tmp_path / "project")
    study = project.folder / "study.yaml"
    study.write_text(study.read_text() + f"description: {hostile}\n")
    output = project.snakemake("-n", check=False)
    assert not proof.exists()
    assert "not a valid" in output or "could not determine a constructor" in output or "YAML" in output


class Bomb:
    """Unpickled without limits it would write a file."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self):
        return (Path.write_text, (self.proof, "it ran"))


def test_a_checkpoint_of_a_stranger_runs_nothing(tmp_path, capfd):
    data, work, proof = write_dataset(tmp_path / "data"), tmp_path / "work", tmp_path / "proof"
    run_here(tiny_config(max_iters=2, checkpoint={"at_end": True}), data, work)
    checkpoint = work / "checkpoints" / "step-000002"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Bomb(proof)))
    with pytest.raises(ConfigError, match="which no index of tensors does"):
        read_masters(checkpoint)
    with pytest.raises(AssertionError, match="which no index of tensors does"):
        run_here(tiny_config(max_iters=3), data, work)
    assert not proof.exists()


class Got:
    """getattr(owner, name): how Python before 3.11.4, Debian 12's for one, pickles a member of an enumeration."""

    def __init__(self, owner, name: str):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return (getattr, (self.owner, self.name))


def test_an_index_has_memory_formats_by_getattr_and_nothing_else():
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

    def loaded(owner, name: str):
        return IndexUnpickler(io.BytesIO(pickle.dumps(Got(owner, name)))).load()

    for member in _MEM_FORMAT_ENCODING:
        assert loaded(_MEM_FORMAT_ENCODING, member.name) is member
    for owner, name in (
        (_MEM_FORMAT_ENCODING, "__class__"),
        (_MEM_FORMAT_ENCODING, "_missing_"),
        (Path, "home"),
        (TensorProperties, "__init__"),
    ):
        with pytest.raises(pickle.UnpicklingError, match="which no index of tensors does"):
            loaded(owner, name)


def test_tensors_of_a_stranger_run_nothing(tmp_path):
    import torch

    data, work, proof = write_dataset(tmp_path / "data"), tmp_path / "work", tmp_path / "proof"
    run_here(tiny_config(max_iters=2, checkpoint={"at_end": True}), data, work)
    checkpoint = work / "checkpoints" / "step-000002"
    shard = checkpoint / "__0_0.distcp"
    torch.save(Bomb(proof), tmp_path / "bomb")
    bomb = (tmp_path / "bomb").read_bytes()
    shard.write_bytes(bomb + b"\0" * max(0, shard.stat().st_size - len(bomb)))
    with pytest.raises(ConfigError, match="this checkpoint is damaged"):
        read_masters(checkpoint)
    assert not proof.exists()


def test_the_report_escapes_what_logs_say(tmp_path):
    study = write_cpu_study(tmp_path / "study")
    runs = sorted((study / "runs").rglob("*.json"))
    for path in runs:
        log = read_run_log(path)
        log.environment.host = log.environment.cpu = log.sample = HOSTILE
        log.used["attention"].reason = HOSTILE
        write_run_log(path, log)
    log = read_run_log(runs[0])
    log.status, log.reason = "diverged", HOSTILE
    write_run_log(runs[0], log)
    declared = json.loads((study / "study.json").read_text())
    declared["description"] = HOSTILE
    (study / "study.json").write_text(json.dumps(declared))
    failed = study / "work" / "baseline" / "failed"
    failed.mkdir(parents=True)
    (failed / "failure.json").write_text(json.dumps({"status": "failed", "reason": HOSTILE, "traceback": HOSTILE}))
    html = tmp_path / "report.html"
    arguments = ["--study-dir", str(study), "--html", str(html), "--markdown", str(tmp_path / "report.md"), "--partial"]
    write_report(arguments)
    text = html.read_text()
    assert HOSTILE not in text and "&lt;script&gt;alert(1)" in text


def study_with(**changes):
    return copy.deepcopy(yaml.safe_load(STUDY.read_text())) | changes


ESCAPES = ["../../outside", "/tmp/outside", "a/../../b", "x; touch proof", "$(touch proof)", "a b", "`id`", "", ".x"]


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("where", ["study", "results_dir", "resources_dir", "tokenizers", "datasets", "case", "search"])
def test_names_and_paths_stay_in_their_folder_and_out_of_shells(name, where):
    study = study_with()
    if where in ("tokenizers", "datasets"):
        ((_, only),) = study[where].items()
        study[where] = {name: only}
    elif where == "case":
        study["experiments"]["baseline"]["cases"] = {name: {}}
    elif where == "search":
        study["experiments"]["memory"]["search"] = {name: {"candidates": [2]}}
    else:
        study[where] = name
    if where.endswith("_dir") and name == ".x":
        return  # a folder may be called so
    with pytest.raises(ConfigError):
        expand_study(study, "study.yaml", 2)


def test_a_value_that_a_shell_would_act_on_stays_a_value(tmp_path):
    """Strings that may hold anything travel as one quoted word: here the path of a corpus."""
    project = copy_project(tmp_path / "project")
    study = study_with()
    hostile = "x'; touch proof; echo '$(touch proof)`touch proof`.txt"
    study["datasets"]["text"] = {"source": "local", "paths": [hostile], "tokenizer": "bpe-512"}
    (project.folder / "study.yaml").write_text(yaml.safe_dump(study))
    output = project.snakemake("datasets", check=False)
    assert "Error in rule prepare_dataset" in output and hostile.split(";")[0] in output
    assert not list(project.folder.rglob("proof"))


SECRETS = {"HF_TOKEN": "hf_abcdefghijklmnop", "WANDB_API_KEY": "0123456789abcdef0123", "AWS_SECRET_ACCESS_KEY": "wJalr"}


def test_secrets_stay_out_of_logs_json_and_report(tmp_path):
    """A run with two ranks, one that fails, and a report, with secrets in the environment."""
    data, study = write_dataset(tmp_path / "data"), write_cpu_study(tmp_path / "study")
    command = [sys.executable, "-m", "mfubench.train.launch"]
    printed = ""
    for case, config in (
        ("good", tiny_config(max_iters=2, world_size=2, micro_batch_size=4)),
        ("bad", tiny_config(model={"vocab_size": 50})),
    ):
        arguments = run_arguments(config, data, tmp_path / "work" / case)
        process = subprocess.run(
            [*command, *arguments], env=environment(**SECRETS), capture_output=True, text=True, timeout=300
        )
        assert process.returncode == (0 if case == "good" else 1), process.stderr
        printed += process.stdout + process.stderr
    script = ROOT / "workflow" / "scripts" / "write_report.py"
    outputs = ["--html", tmp_path / "report.html", "--markdown", tmp_path / "r.md", "--summary", tmp_path / "s.json"]
    environ = {**os.environ, **SECRETS, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, script, "--study-dir", study, *outputs], env=environ, check=True, timeout=300)
    assert (tmp_path / "work" / "bad" / "failure.json").exists()
    for path in tmp_path.rglob("*"):
        content = path.read_bytes().decode(errors="replace") if path.is_file() else ""
        assert not [name for name, secret in SECRETS.items() if secret in content], path
    assert not [name for name, secret in SECRETS.items() if secret in printed]

"""What goes wrong around the workflow, on real results: a sentence, no false artifact, and the next call mends it.

The tests of one project are a story, each leaves it whole for the next one; `snakemake` with all targets ends it.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from workflow.project import Project

pytestmark = [pytest.mark.faults, pytest.mark.slow]

INJECT = Path(__file__).parent / "inject"
RESULTS = "results/minimal"
LARGE, PLAIN = f"{RESULTS}/runs/baseline/large.json", f"{RESULTS}/runs/baseline/plain.json"
TRAINING = f"{RESULTS}/runs/training/pretrain.json"
# What is written -> the file at whose last instant the process is killed, the target asked for, what is removed before.
# In this order a call makes again what the kills before it have left to be made.
WRITES = {
    "tokenizer": ("bpe-512/tokenizer.json", "resources/tokenizers/bpe-512/meta.json", "resources/tokenizers/bpe-512"),
    "token file": ("text/train.bin", "resources/datasets/text/meta.json", "resources/datasets/text"),
    "machine.json": ("machine.json", f"{RESULTS}/machine.json", f"{RESULTS}/machine.json"),
    "ceilings": ("ceilings.json", f"{RESULTS}/ceilings.json", f"{RESULTS}/ceilings.json"),
    "run JSON": (PLAIN, PLAIN, PLAIN),
    "checkpoint": ("checkpoints/step-000004", TRAINING, f"{RESULTS}/work/training"),
    "memory search": ("memory/limit.json", f"{RESULTS}/memory/limit.json", f"{RESULTS}/memory/limit.json"),
    "table": ("tables/runs.csv", f"{RESULTS}/tables/runs.csv", f"{RESULTS}/tables/runs.csv"),
    "figure": ("figures/loss.png", f"{RESULTS}/figures/loss.png", f"{RESULTS}/figures/loss.png"),
    "report": ("report.html", f"{RESULTS}/report.html", f"{RESULTS}/report.html"),
    "audit": ("audit.json", f"{RESULTS}/audit.json", f"{RESULTS}/audit.json"),
}


@pytest.fixture(scope="module")
def story(finished, tmp_path_factory) -> Project:
    folder = tmp_path_factory.mktemp("faults") / "project"
    shutil.copytree(finished.folder, folder, symlinks=True)
    return Project(folder)


def remove(project: Project, path: str) -> None:
    target = project.folder / path
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink()


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.1)


def held(project: Project, target: str, go: Path) -> subprocess.Popen[str]:
    """snakemake, whose run of `target` waits for `go` just before its run JSON gets its name."""
    remove(project, target)
    variables = {"PYTHONPATH": str(INJECT), "HOLD_AT": target, "HOLD_UNTIL": str(go)}
    process = project.start_snakemake(target, **variables)
    wait_for(go.with_suffix(".held"), process)
    return process


@pytest.mark.parametrize("kind", WRITES)
def test_a_kill_during_a_write_leaves_nothing_half_written(kind, story):
    at, target, removed = WRITES[kind]
    remove(story, removed)
    (story.folder / target).unlink(missing_ok=True)
    output = story.snakemake(target, check=False, PYTHONPATH=str(INJECT), KILL_AT=at)
    assert "Error in rule" in output
    assert not (story.folder / target).exists()


def test_after_the_kills_one_call_makes_what_they_left(story):
    story.snakemake()
    assert all((story.folder / target).stat().st_size for _, target, _ in WRITES.values())
    assert "Nothing to be done" in story.snakemake("-n")
    assert len(json.loads((story.folder / TRAINING).read_text())["steps"]) == 4


def test_a_killed_snakemake_leaves_its_run_alone_and_none_is_made_twice(story, tmp_path):
    before = (story.folder / PLAIN).stat().st_mtime_ns
    go = tmp_path / "go"
    process = held(story, LARGE, go)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert "--unlock" in story.snakemake(LARGE, PLAIN, check=False)
    story.snakemake("--unlock", LARGE)
    refused = story.snakemake(LARGE, PLAIN, check=False)
    assert "another process is making this run (process" in refused
    assert not (story.folder / LARGE).exists()

    go.touch()  # the run that was left behind ends, and with it the lock
    deadline = time.monotonic() + 120
    while not (story.folder / LARGE).exists():
        assert time.monotonic() < deadline, "the run that was left behind did not end"
        time.sleep(0.1)
    story.snakemake(LARGE, PLAIN)
    assert json.loads((story.folder / LARGE).read_text())["status"] == "ok"
    assert not story.stale(LARGE, PLAIN)
    assert (story.folder / PLAIN).stat().st_mtime_ns == before


def test_ctrl_c_stops_a_training_with_a_checkpoint(story):
    """A terminal sends it to snakemake, the job and what writes its log at once."""
    short, long = "pretrain: {max_iters: 4,", "pretrain: {max_iters: 100000,"
    story.edit("study.yaml", short, long)
    work = story.folder / RESULTS / "work" / "training" / "pretrain"
    before = set(work.glob("*"))
    process = story.start_snakemake(TRAINING)
    deadline = time.monotonic() + 300
    while not (steps := [path for new in set(work.glob("*")) - before for path in new.glob("steps.jsonl")]):
        assert process.poll() is None and time.monotonic() < deadline, "the training did not begin"
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0 and not (story.folder / TRAINING).exists()
    assert "stopped on request" in output and "Traceback" not in output
    assert list(steps[0].parent.glob("checkpoints/step-*/.metadata")), output[-4000:]
    log = (story.folder / RESULTS / "logs" / "training" / "pretrain.log").read_text()
    assert "goes on from it when snakemake is called again" in log

    story.edit("study.yaml", long, short)
    story.snakemake(TRAINING)
    assert not story.stale(TRAINING)


def test_a_second_snakemake_in_the_folder_is_refused_and_the_first_ends_well(story, tmp_path):
    go = tmp_path / "go"
    process = held(story, LARGE, go)
    refused = story.snakemake(LARGE, check=False)
    assert "Directory cannot be locked" in refused and "rule run_baseline" not in refused

    remove(story, f"{RESULTS}/study.json")
    story.snakemake(f"{RESULTS}/study.json")  # it has nothing to do with that run, and takes the locks of all with it
    assert not (story.folder / ".snakemake" / "locks").exists()
    refused = story.snakemake(LARGE, check=False)
    assert "another process is making this run (process" in refused and "cannot be locked" not in refused
    go.touch()
    output, _ = process.communicate()
    assert process.returncode == 0, output[-4000:]
    assert not story.stale(LARGE)


def test_a_corrupt_run_json_is_named_and_made_again(story):
    (story.folder / PLAIN).write_text('{"schema_version": 1, "name": "baseli')
    output = story.snakemake(check=False)
    assert f"{PLAIN}: is not a run JSON of this version" in output and "remove it and start again" in output
    remove(story, PLAIN)
    assert story.stale(PLAIN) == [f"run_baseline {PLAIN}"]
    story.snakemake(PLAIN)
    assert json.loads((story.folder / PLAIN).read_text())["status"] == "ok"


def test_a_failed_smoke_test_closes_the_gate(story):
    """A program that fails before `| tee` fails its rule: here one whose output is touched by Snakemake."""
    smoke, gate = f"{RESULTS}/runs/smoke/llama2-tiny.json", f"{RESULTS}/smoke/llama2-tiny.passed"
    log = json.loads((story.folder / smoke).read_text())
    (story.folder / smoke).write_text(json.dumps(log | {"status": "diverged", "reason": "the loss is not finite"}))
    output = story.snakemake(gate, check=False)
    assert "Error in rule check_smoke" in output and "the loss is not finite" in output
    assert not (story.folder / gate).exists()
    remove(story, smoke)
    story.snakemake(gate)
    assert (story.folder / gate).exists()


def test_an_impossible_number_fails_the_study_and_leaves_report_and_audit(story):
    run, verdict = story.folder / PLAIN, f"{RESULTS}/audit.passed"
    kept = run.read_text()
    log = json.loads(kept)
    log["parameters"]["total"] *= 2
    run.write_text(json.dumps(log))
    output = story.snakemake(verdict, check=False)
    assert "Error in rule check_audit" in output and "impossible numbers in baseline/plain" in output
    assert not (story.folder / verdict).exists()
    assert json.loads((story.folder / RESULTS / "audit.json").read_text())["impossible"] is True
    assert (story.folder / RESULTS / "report.html").exists()
    run.write_text(kept)
    story.snakemake(verdict)
    assert (story.folder / verdict).exists()


def test_a_corrupt_machine_json_is_named_and_made_again(story):
    machine = story.folder / RESULTS / "machine.json"
    machine.write_text("{")
    remove(story, LARGE)
    output = story.snakemake(LARGE, check=False)
    assert "machine.json: is no JSON" in output and "remove it and start again" in output
    assert not (story.folder / LARGE).exists()
    machine.unlink()
    story.snakemake(LARGE)


def test_a_truncated_token_file_is_named_and_prepared_again(story):
    dataset = story.folder / "resources" / "datasets" / "text"
    os.truncate(dataset / "train.bin", 1000)
    remove(story, LARGE)
    output = story.snakemake(LARGE, check=False)
    assert "train.bin: has 1,000 bytes" in output and "Traceback" not in output
    assert not (story.folder / LARGE).exists()
    (dataset / "meta.json").unlink()
    story.snakemake(LARGE)
    assert (dataset / "train.bin").stat().st_size > 1000


@pytest.fixture
def read_only(story) -> Iterator[Path]:
    """The results as a disk that cannot be written to. Skips where none can be had."""
    results = story.folder / "results"
    if os.geteuid() != 0:
        folders = [folder for folder in (results, *results.rglob("*")) if folder.is_dir()]
        for folder in folders:
            folder.chmod(0o555)
        yield results
        for folder in folders:
            folder.chmod(0o755)
        return
    mount = ["mount", "--bind", results, results]
    bound = subprocess.run(mount, capture_output=True, text=True)
    if bound.returncode:
        pytest.skip(f"nothing can be mounted here: {bound.stderr.strip()}")
    subprocess.run(["mount", "-o", "remount,ro,bind", results], check=True)
    yield results
    subprocess.run(["umount", results], check=True)


def test_results_that_cannot_be_written_to_are_said(story, read_only, request):
    story.edit("study.yaml", "large: {micro_batch_size: 4}", "large: {micro_batch_size: 4}, more: {seed: 5}")
    before = (story.folder / PLAIN).read_bytes()
    output = story.snakemake(f"{RESULTS}/runs/baseline/more.json", check=False)
    assert "Read-only file system" in output or "Permission denied" in output
    assert (story.folder / PLAIN).read_bytes() == before


def test_with_room_to_write_the_same_call_completes(story):
    story.snakemake(f"{RESULTS}/runs/baseline/more.json")
    story.edit("study.yaml", ", more: {seed: 5}", "")


def test_what_can_finish_does_and_the_partial_report_shows_the_rest(story):
    text = "  text: {source: embedded"
    unsplit = "  unsplit: {source: embedded, tokenizer: bpe-512, max_bytes: 400000, val_fraction: 0}\n"
    broken = "broken: {dataset: unsplit, evaluation: {at_end: true}}, more: {seed: 6}"
    story.edit("study.yaml", text, unsplit + text)
    story.edit("study.yaml", "large: {micro_batch_size: 4}", f"large: {{micro_batch_size: 4}}, {broken}")
    output = story.snakemake(check=False)
    assert "Error in rule run_baseline" in output
    assert json.loads((story.folder / RESULTS / "runs/baseline/more.json").read_text())["status"] == "ok"
    assert not (story.folder / RESULTS / "runs/baseline/broken.json").exists()
    html = (story.folder / RESULTS / "partial" / "report.html").read_text()
    assert "baseline/broken" in html and "baseline/more" in html
    story.edit("study.yaml", f", {broken}", "")
    story.edit("study.yaml", unsplit, "")


def test_after_all_that_one_call_makes_the_study_whole(story):
    output = story.snakemake()
    assert "run_tiers" not in output and "run_scaling" not in output and "run_ablations" not in output
    assert "Nothing to be done" in story.snakemake("-n")
    assert not (story.folder / RESULTS / "partial").exists()
    assert json.loads((story.folder / RESULTS / "audit.json").read_text())

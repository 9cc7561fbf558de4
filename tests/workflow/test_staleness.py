"""Rerun only what is stale: each kind of change, from dry runs on real results."""

import json
import shutil
from pathlib import Path

import pytest
from data.texts import make_documents, write_jsonl
from workflow.project import PARTS, Project, copy_project

from mfubench.profiling.breakdown import break_down
from mfubench.profiling.trace_file import read_trace
from mfubench.run_log import read_run_log

AGGREGATES = {"declare_study", "tabulate_runs", "write_report", "audit_study", "check_audit"}


def rules_of(jobs):
    return {job.split()[0] for job in jobs}


def is_analysis(rule):
    return rule in AGGREGATES or rule.startswith("plot_")


def test_a_profiled_step_is_among_the_results(finished):
    trace = read_trace(finished.results / "traces" / "baseline" / "plain.json.gz")
    found = break_down(trace)
    assert found is not None and found.ranks[0].parts["matmul"] > 0
    assert "baseline/plain" in (finished.results / "tables" / "profiles.csv").read_text()
    assert "next optimisation of" in (finished.results / "report.html").read_text()


def test_a_lost_trace_is_taken_from_the_work_folder_again(project):
    (project.results / "traces" / "baseline" / "plain.json.gz").unlink()
    assert [job for job in project.stale() if not is_analysis(job.split()[0])] == [
        "keep_trace results/minimal/traces/baseline/plain.json.gz"
    ]


@pytest.mark.parametrize(
    ("lost", "rule"),
    [
        ("runs/baseline/large.json", "run_baseline"),
        ("memory/limit.json", "search_memory"),
        ("tables/scaling.csv", "tabulate_runs"),
        ("figures/ladder.png", "plot_ladder"),
        ("report.md", "write_report"),
        ("audit.json", "audit_study"),
    ],
)
def test_a_lost_artifact_is_made_again_by_the_default_call(project, lost, rule):
    (project.results / lost).unlink()
    jobs = project.stale()
    (made,) = [job for job in jobs if job.startswith(rule)]
    assert f"results/minimal/{lost}" in made
    assert all(is_analysis(job.split()[0]) for job in jobs if job != made)


def test_new_ceilings_are_no_reason_to_run_anything_else_again(project):
    (project.results / "ceilings.json").unlink()
    jobs = project.stale()
    assert [job for job in jobs if not is_analysis(job.split()[0])] == [
        "measure_ceilings results/minimal/ceilings.json"
    ]
    assert {"tabulate_runs", "write_report", "audit_study", "check_audit"} <= rules_of(jobs)


def test_a_study_knows_the_file_that_it_was_read_from(finished):
    assert json.loads((finished.results / "study.json").read_text())["config_files"] == ["study.yaml"]


def test_a_lost_machine_file_is_no_reason_to_measure_again(project):
    (project.results / "machine.json").unlink()
    assert project.stale() == []


def test_an_evaluation_starts_from_the_trainings_checkpoint_and_is_stale_with_it(project):
    log = read_run_log(project.results / "runs" / "training" / "evaluate.json")
    before = read_run_log(project.results / "runs" / "training" / "pretrain.json")
    assert log.status == "ok" and log.steps == [] and [resume.step for resume in log.resumes] == [4]
    assert log.evaluations[-1].loss == before.evaluations[-1].loss
    project.edit("study.yaml", "pretrain: {max_iters: 4,", "pretrain: {max_iters: 5,")
    runs = [job for job in project.stale() if job.startswith("run_")]
    assert runs == [f"run_training results/minimal/runs/training/{case}.json" for case in ("evaluate", "pretrain")]


def test_a_study_that_continues_an_unknown_run_stops_before_the_first_job(project):
    project.edit("study.yaml", "continues: training/pretrain", "continues: training/none")
    assert "training/evaluate: continues: found 'training/none'" in project.snakemake("-n", check=False)


def test_after_a_full_run_nothing_is_to_be_done(finished):
    assert "Nothing to be done" in finished.snakemake("-n")


def test_a_call_with_nothing_to_do_ends_by_naming_the_report_as_the_first_did(finished):
    named = next(line for line in finished.first_output.splitlines() if line.startswith("Report: "))
    assert named.split()[1] == "results/minimal/report.html"
    again = finished.snakemake()
    assert "Nothing to be done" in again and again.rstrip().splitlines()[-1] == named
    assert "Report: " not in finished.snakemake("-n")


def test_a_changed_value_reruns_its_run_and_the_aggregates(project):
    project.edit("study.yaml", "large: {micro_batch_size: 4}", "large: {micro_batch_size: 3}")
    jobs = project.stale()
    measured = [job for job in jobs if not is_analysis(job.split()[0])]
    assert measured == ["run_baseline results/minimal/runs/baseline/large.json"]
    assert rules_of(jobs) >= AGGREGATES


def test_one_call_after_a_change_leaves_nothing_stale(project):
    project.edit("study.yaml", "large: {micro_batch_size: 4}", "large: {micro_batch_size: 3}")
    project.snakemake()
    assert "Nothing to be done" in project.snakemake("-n")


def test_a_training_with_another_value_starts_anew(project):
    """Its earlier checkpoint is of another run."""
    project.edit("study.yaml", "pretrain: {max_iters: 4,", "pretrain: {seed: 7, max_iters: 4,")
    project.edit(
        "study.yaml",
        "      evaluate: {continues: training/pretrain,",
        "      evaluate: {seed: 7, continues: training/pretrain,",
    )
    project.snakemake("training")
    log = read_run_log(project.results / "runs" / "training" / "pretrain.json")
    assert log.config.seed == 7 and len(log.steps) == 4 and not log.resumes


@pytest.fixture
def own_text(tmp_path) -> Project:
    """A project whose dataset is a.jsonl, nothing of it made yet; b.jsonl holds the same documents in another order."""
    project = copy_project(tmp_path / "own-text")
    project.edit("study.yaml", "text: {source: embedded,", "text: {source: local, paths: [a.jsonl],")
    documents = make_documents(100, seed=1, words=100)
    write_jsonl(project.folder / "a.jsonl", documents)
    write_jsonl(project.folder / "b.jsonl", documents[::-1])
    return project


@pytest.mark.faults
@pytest.mark.slow
def test_a_training_is_done_anew_on_other_data(own_text):
    """Another file, another value, another text in the file: each by the same call, and none passes for another."""

    def train():
        own_text.snakemake("training")
        assert "Nothing to be done" in own_text.snakemake("-n", "training")
        runs = own_text.results / "runs" / "training"
        log, evaluated = (read_run_log(runs / f"{case}.json") for case in ("pretrain", "evaluate"))
        assert log.dataset == evaluated.dataset and log.resumes == []
        assert log.evaluations[-1].loss == evaluated.evaluations[-1].loss
        return log.dataset, [step.loss for step in log.steps]

    first, losses = train()
    own_text.edit("study.yaml", "a.jsonl", "b.jsonl")
    other, other_losses = train()
    assert other.train_tokens == first.train_tokens and other_losses != losses
    own_text.edit("study.yaml", "val_fraction: 0.1", "val_fraction: 0.2")
    fewer, fewer_losses = train()
    assert fewer.train_tokens < first.train_tokens and fewer_losses != other_losses
    shutil.copyfile(own_text.folder / "a.jsonl", own_text.folder / "b.jsonl")
    again, again_losses = train()
    assert again.train_tokens == fewer.train_tokens and again_losses != fewer_losses


@pytest.mark.faults
def test_changed_text_is_prepared_anew_and_text_that_is_gone_leaves_what_was_made_of_it(own_text):
    own_text.edit("study.yaml", "max_bytes: 400000}", "max_bytes: 400000, corpus: {source: local, paths: [b.jsonl]}}")
    own_text.edit("study.yaml", "paths: [a.jsonl]", "paths: [text]")
    a, b = own_text.folder / "text" / "a file.jsonl", own_text.folder / "b.jsonl"
    a.parent.mkdir()
    (own_text.folder / "a.jsonl").rename(a)
    own_text.snakemake("datasets")
    a.touch()
    b.touch()
    assert rules_of(own_text.stale("datasets")) == set()

    shutil.copyfile(b, a.with_name("more.jsonl"))
    assert rules_of(own_text.stale("datasets")) == {"prepare_dataset", "datasets"}
    a.with_name("more.jsonl").unlink()
    before = b.read_text()
    b.write_text(before + before)
    assert rules_of(own_text.stale("datasets")) == {"get_tokenizer", "prepare_dataset", "datasets"}

    b.unlink()
    shutil.rmtree(a.parent)
    told = own_text.snakemake("datasets")
    assert "datasets.text: paths: 'text' matches no file that can be read" in told and "Nothing to be done" in told
    assert "tokenizers.bpe-512: paths: 'b.jsonl' matches no file" in told and "what was made of it stays" in told
    own_text.edit("study.yaml", "val_fraction: 0.1", "val_fraction: 0.2")
    told = own_text.snakemake("datasets", check=False)
    assert "error: paths: 'text' matches no file that can be read" in told


def test_an_added_case_runs_alone_and_a_removed_one_leaves_the_tables(project):
    project.edit("study.yaml", "large: {micro_batch_size: 4}", "large: {micro_batch_size: 4}, more: {seed: 5}")
    measured = [job for job in project.stale() if not is_analysis(job.split()[0])]
    assert measured == ["run_baseline results/minimal/runs/baseline/more.json"]
    project.edit("study.yaml", ", more: {seed: 5}", "")
    project.edit("study.yaml", "ablations: {cases: {eager: {attention: eager}}}", "ablations: {cases: {}}")
    jobs = project.stale()
    assert jobs and all(is_analysis(rule) for rule in rules_of(jobs))


def test_a_changed_plot_reruns_the_plot(project):
    with (project.folder / "src/mfubench/analysis/figures/throughput.py").open("a") as stream:
        stream.write("\nCHANGED = 1\n")
    rules = rules_of(project.stale())
    assert "plot_throughput" in rules
    assert rules <= {"plot_throughput", "write_report", "audit_study", "check_audit"}


@pytest.mark.parametrize("path", ["src/mfubench/flops.py", "src/mfubench/hardware.py", "config/hardware.yaml"])
def test_changed_facts_and_formulas_rerun_the_analysis_and_no_training(project, path):
    with (project.folder / path).open("a") as stream:
        stream.write("\nCHANGED: {}\n" if path.endswith("yaml") else "\nCHANGED = 1\n")
    rules = rules_of(project.stale())
    assert {"tabulate_runs", "write_report", "audit_study"} <= rules
    assert all(is_analysis(rule) for rule in rules)


@pytest.mark.parametrize("path", ["model/decoder.py", "train/step.py", "config.py", "run_log.py"])
def test_changed_training_code_reruns_the_trainings(project, path):
    with (project.folder / "src" / "mfubench" / path).open("a") as stream:
        stream.write("\nCHANGED = 1\n")
    rules = rules_of(project.stale())
    stages = ("smoke", "baseline", "scaling", "tiers", "ablations", "training")
    assert {f"run_{stage}" for stage in stages} | {"search_memory"} <= rules
    assert not rules & {"get_tokenizer", "prepare_dataset", "record_machine"}


def test_comments_layout_and_touched_files_rerun_nothing(project):
    for path in (project.folder / "src").rglob("*.py"):
        path.write_text("# a comment\n\n\n" + path.read_text())
    for path in (project.folder / "workflow").rglob("*.py"):
        path.touch()
    assert "Nothing to be done" in project.snakemake("-n")


def test_a_fresh_clone_with_results_copied_in_reruns_nothing(finished, tmp_path):
    clone = tmp_path / "clone"
    clone.mkdir()
    for part in (*PARTS, "study.yaml"):  # new files, new times
        source = finished.folder / part
        if source.is_dir():
            shutil.copytree(source, clone / part, copy_function=shutil.copyfile)
        elif source.exists():
            shutil.copyfile(source, clone / part)
    for part in ("results", "resources"):  # as `cp -a` or rsync -a bring them
        shutil.copytree(finished.folder / part, clone / part, copy_function=shutil.copy2)
    assert "Nothing to be done" in Project(Path(clone)).snakemake("-n")


def test_a_new_generation_of_the_machine_marks_every_run_stale(project):
    project.edit("study.yaml", "machine: {gpus: auto}", "machine: {gpus: auto, generation: 2}")
    rules = rules_of(project.stale())
    assert {"record_machine", "measure_ceilings", "run_baseline", "run_training", "search_memory"} <= rules
    assert not rules & {"get_tokenizer", "prepare_dataset"}

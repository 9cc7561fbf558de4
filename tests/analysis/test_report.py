from __future__ import annotations

import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from analysis.example_study import (
    add_untried_case,
    declare,
    disturb_ceilings,
    make_gpu_log,
    write_gpu_study,
    write_memory_search,
)
from factories import make_run_log

from mfubench import cli
from mfubench.analysis.findings import Findings
from mfubench.analysis.report import main, write_report
from mfubench.analysis.report.blocks import Table
from mfubench.analysis.report.closing_sections import left_out_section, variables_of
from mfubench.analysis.report.measured_sections import throttled_words
from mfubench.analysis.report.render import inline_html, markdown_cell, sections_of
from mfubench.run_log import Resume, RunLog, read_run_log, write_json, write_run_log

pytestmark = pytest.mark.slow  # each report draws nine figures twice

ORDER = [
    "Which settings to train with",
    "Expected against measured",
    "Where the expectations contradict themselves",
    "What each optimisation is worth",
    "Scaling",
    "Memory",
    "Loss and gradients",
    "MFU over time",
    "Where the machine's time went",
    "Where the rest went",
    "Skipped arms and fallbacks",
    "What a whole training would take",
    "All runs",
    "Machine and software",
    "The audit's verdict",
    "How to read the numbers",
]
FIGURES = 9


class Page(HTMLParser):
    """What a page refers to, its headings, its words, and whether its elements are closed in order."""

    VOID = ("meta", "link", "img", "source", "br", "wbr")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.headings: list[str] = []
        self.alternatives: list[str] = []
        self.identifiers: set[str] = set()
        self.words = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.references += [values[key] for key in ("src", "href", "srcset") if key in values]
        if "id" in values:
            self.identifiers.add(values["id"])
        if tag == "img":
            self.alternatives.append(values.get("alt", ""))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["h2"]:
            self.headings.append(data)
        if self.open[-1:] != ["style"]:
            self.words += data


def page_of(study: Path, partial: bool = False) -> Page:
    html = study / "report.html"
    write_report(study, html, study / "report.md", study / "summary.json", partial=partial)
    return Page(html.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def written(gpu_study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    study = shutil.copytree(gpu_study, folder / "study")
    (study / "figures").mkdir()
    for section in sections_of(Findings.of(study)):
        for block in section.blocks:
            if block.kind == "figure":
                (study / "figures" / f"{block.name}.png").touch()
    arguments = ["--study-dir", str(study), "--html", str(folder / "report.html")]
    arguments += ["--markdown", str(folder / "report.md"), "--summary", str(folder / "summary.json")]
    assert main(arguments) == 0
    return folder


@pytest.fixture(scope="module")
def page(written: Path) -> Page:
    return Page((written / "report.html").read_text(encoding="utf-8"))


def test_sections_stand_in_the_order_of_the_question(page: Page):
    assert page.headings == ORDER
    assert page.open == []


def test_the_page_needs_nothing_else(written: Path, page: Page):
    """Pictures are inside, links go to its own sections, no style or script is fetched."""
    assert all(reference.startswith(("data:", "#")) for reference in page.references)
    assert {reference[1:] for reference in page.references if reference.startswith("#")} <= page.identifiers
    html = (written / "report.html").read_text(encoding="utf-8")
    assert "<script" not in html and "@import" not in html and "url(" not in html


def test_every_picture_is_there_in_both_appearances_and_in_words(page: Page):
    pictures = [reference for reference in page.references if reference.startswith("data:image/png;base64,")]
    assert len(pictures) == len(set(pictures)) == 2 * FIGURES
    assert len(page.alternatives) == FIGURES and all(len(text) > 20 for text in page.alternatives)


def test_the_answer_comes_with_its_command(page: Page):
    assert "Fastest" in page.words
    assert re.search(r"551,\d00 tokens/s on 8 GPUs", page.words)
    assert re.search(r"mfubench train llama2-1\.36b --data \S+ .*cuda_graphs=true", page.words)


def test_contradictions_are_shown_with_their_arithmetic(page: Page):
    assert "180,000 tokens/s" in page.words and "8.78" in page.words
    assert "more than they can do" in page.words


def test_long_cells_have_room_on_a_telephone(written: Path):
    html = (written / "report.html").read_text(encoding="utf-8")
    cells = re.findall(r'<td class="left long">(.*?)</td>', html)
    assert cells and min(map(len, cells)) > 80 and "td.long { min-width: 18rem; }" in html


def test_every_ratio_has_its_name_in_full(page: Page):
    for ratio in ("model", "hardware", "maximum achievable matmul"):
        assert f"{ratio} FLOPs utilisation" in page.words


def test_no_difference_skips_and_fallbacks_are_told(page: Page):
    for words in (
        "no difference",
        "needs 16 processes a node, this machine holds 8",
        "CUDA out of memory at micro-batch 32",
        "cuDNN attention has no float32",
        "nothing to object to in 27 runs",
    ):
        assert words in page.words


def test_a_run_whose_earlier_steps_ran_on_another_machine_is_told(gpu_study: Path):
    found = Findings.of(gpu_study)
    log = found.study.runs["tiers/tier1"]
    resume = Resume(step=12, at="2026-03-02T08:59:50+00:00", changed=["cards: A there, B here"])
    found.study.runs["tiers/tier1"] = log.model_copy(update={"resumes": [resume]})
    told = [block.rows for block in left_out_section(found).blocks if isinstance(block, Table)][-1]
    assert told == [
        ["`tiers/tier1`", "the steps before step 12 are warm-up, they ran otherwise: cards: A there, B here"]
    ]


def test_summary_has_exactly_the_agreed_keys(written: Path):
    summary = json.loads((written / "summary.json").read_text())
    assert set(summary) == {"machine", "study", "cases", "recommended", "time"}
    assert summary["study"] == "llama2-1.36b-80gb"
    case = summary["cases"]["tiers/tier1"]
    assert set(case) == {"status", "world_size", "tokens_per_s_per_gpu", "mfu", "peak_memory_gib"}
    assert set(case["mfu"]) == {"palm", "matmul", "causal", "mamfu"}
    for values in (case["tokens_per_s_per_gpu"], *case["mfu"].values()):
        assert set(values) == {"median", "q1", "q3"} and values["q1"] <= values["median"] <= values["q3"]
    recommended = summary["recommended"]["llama2-1.36b"]
    assert (recommended["case"], recommended["world_size"], recommended["untried"]) == ("tiers/tier3", 8, None)
    spent = summary["time"]["total"]
    assert set(spent) == {"runs", "total_s", "gpu_total_s", "parts_s", "gpu_parts_s"}
    assert sum(spent["parts_s"].values()) == pytest.approx(spent["total_s"], rel=1e-12)
    assert sum(stage["runs"] for stage in summary["time"]["stages"].values()) == spent["runs"]
    oom = summary["cases"]["ablations/4.4-micro-batch32"]
    assert (oom["status"], oom["tokens_per_s_per_gpu"], oom["mfu"]["palm"]) == ("oom", None, None)


def test_markdown_says_the_same(written: Path):
    text = (written / "report.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, flags=re.M) == ORDER
    assert len(re.findall(r"!\[[^]]+\]\([^)]*figures/\w+\.png\)", text)) == FIGURES
    tables = [block for block in re.split(r"\n\s*\n", text) if block.startswith("|")]
    assert len(tables) > 10
    for block in tables:
        rows = block.strip().splitlines()
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_a_cpu_study_reads_sensibly(cpu_study: Path, tmp_path: Path):
    page = page_of(Path(shutil.copytree(cpu_study, tmp_path / "study")))
    about_expectations = ("Expected against measured", "Where the expectations contradict themselves")
    assert page.headings == [heading for heading in ORDER if heading not in about_expectations]  # it names none
    assert "tokens/s/process" in page.words and "tokens/s/GPU" not in page.words
    assert "matmul measured on" in page.words
    assert "resident set" in page.words


def test_ceilings_of_a_busy_machine_are_doubted_at_the_head(cpu_study: Path, tmp_path: Path):
    study = Path(shutil.copytree(cpu_study, tmp_path / "a study"))
    assert "cores while the ceilings were measured" not in page_of(study).words
    disturb_ceilings(study)
    words = " ".join(page_of(study).words.split())
    head = words[: words.index("Which settings to train with")]
    told = "Other processes took 1.4 of 2 cores while the ceilings were measured: every MFU is too high"
    assert told in head and f"rm -r '{study}/ceilings.json' && snakemake --cores all --configfile … measures" in head
    assert "with nothing else running here. Audit: " in re.sub(r"\s+", " ", (study / "report.md").read_text("utf-8"))
    declared = json.loads((study / "study.json").read_text())
    write_json(study / "study.json", declared | {"config_files": ["config/studies/mine.yaml"]})
    assert "&& snakemake --cores all --configfile config/studies/mine.yaml measures" in page_of(study).words


def test_a_variable_that_runs_had_otherwise_is_told_with_their_number():
    def log(**variables: str) -> RunLog:
        made = make_run_log(device="cpu")
        made.environment.variables = variables
        return made

    logs = [log(OMP_NUM_THREADS="2", NCCL_DEBUG="WARN")] * 17 + [log(OMP_NUM_THREADS="1", NCCL_DEBUG="WARN")] * 4
    assert variables_of(logs) == {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "2 in 17 runs; 1 in 4 runs"}
    assert variables_of([*logs, log(NCCL_DEBUG="WARN")])["OMP_NUM_THREADS"].endswith("1 in 4 runs; not set in 1 run")
    many = [log(MFUBENCH_LEASE=f"card {number}") for number in range(7)]
    assert variables_of(many)["MFUBENCH_LEASE"].endswith("card 3 in 1 run; 3 other values in the rest")


def test_the_limit_of_a_memory_search_is_not_called_exact_on_a_cpu(cpu_study: Path, page: Page, tmp_path: Path):
    study = Path(shutil.copytree(cpu_study, tmp_path / "study"))
    write_memory_search(study)
    said = ("about 30", "a largest micro-batch is not exact: another search may find one more or one less")
    words = " ".join(page_of(study).words.split())
    assert all(words_on_cpu in words for words_on_cpu in said)
    assert not any(words_on_cpu in " ".join(page.words.split()) for words_on_cpu in said)


def test_trials_of_a_busy_machine_are_doubted_where_they_stand(cpu_study: Path, tmp_path: Path, monkeypatch):
    study = Path(shutil.copytree(cpu_study, tmp_path / "results" / "study"))
    write_memory_search(study)
    (study / "work" / "memory").mkdir(parents=True)
    assert "The machine was busy with something else during" not in page_of(study).words
    path = study / "memory" / "5.1-limit.json"
    limit = json.loads(path.read_text())
    for trial, others in zip(limit["trials"], (0.9, 1.4), strict=False):
        trial["contention"] = {"others": others, "cores": 2, "used": 2 - others, "wanted": 2}
    write_json(path, limit)
    monkeypatch.chdir(tmp_path)
    words = " ".join(page_of(study).words.split())
    section = words[words.index("Memory ") :]
    assert "The machine was busy with something else during 2 of 10 trials" in section
    assert "The worst, micro-batch 8 of memory/5.1-limit: other processes took 1.4 of 2 cores" in section
    anew = "rm -r results/study/memory results/study/work/memory && snakemake --cores all --configfile … searches anew"
    assert anew in section


def test_throttled_steps_are_counted_over_all_processes_of_a_run():
    def telemetry(steps: int, sampled: int) -> dict[str, Any]:
        return {"steps_sampled": sampled, "throttled": {"power_cap": {"steps": steps, "share": steps / sampled}}}

    before = Resume(step=40, at="2026-03-02T08:59:50+00:00", telemetry=telemetry(30, 40))
    log = make_run_log(telemetry=telemetry(0, 60)).model_copy(update={"resumes": [before]})
    assert throttled_words(log) == "power_cap 30 %"
    unknown = {"throttled": {"power_cap": {"steps": 3, "share": 0.1}}}  # as a hand-made log may have it
    assert throttled_words(make_run_log(telemetry=unknown)) == throttled_words(make_run_log(telemetry=None)) == "–"


def test_what_the_effects_section_calls_a_difference_is_explained_there(page: Page):
    words = " ".join(page.words.split())
    told = "or, of an interval that leaves a ratio open by more than a factor of 4, too noisy to tell."
    assert f"else the two were not told apart, {told}" in words


def test_partial_shows_what_exists_what_failed_and_why(changed_study: Path):
    for path in (changed_study / "runs").glob("*/*.json"):
        if path.parent.name not in ("smoke", "baseline"):
            path.unlink()
    (changed_study / "memory" / "5.1-limit.json").unlink()
    write_json(changed_study / "work" / "tiers" / "tier1" / "failure.json", {"reason": "rank 5: NCCL timeout <x>"})
    page = page_of(changed_study, partial=True)
    assert page.headings == ORDER
    assert "rank 5: NCCL timeout <x>" in page.words
    assert "has not been run" in page.words


def test_a_part_of_a_study_is_not_sold_as_the_whole(changed_study: Path):
    """Cards are those of the runs, and the description of the whole study is told apart from what was measured."""
    for path in (changed_study / "runs").glob("*/*.json"):
        if read_run_log(path).config.world_size > 2:
            path.unlink()
    (changed_study / "memory" / "5.1-limit.json").unlink()
    declared = json.loads((changed_study / "study.json").read_text())
    declared["cases"] = {name: {"world_size": 8 if "tier" in name else 2} for name in declared["cases"]}
    write_json(changed_study / "study.json", declared)
    words = " ".join(page_of(changed_study).words.split())
    count = len(declared["cases"]) + 2  # and a search, and one that is left out on this machine
    assert f"6 of {count} cases on 2× NVIDIA H100 80GB HBM3" in words
    assert f"A part of the study: 6 of its {count} cases have a result. None of its runs on 8 GPUs is among" in words
    assert f"Missing ({count - 7}): " in words and "tiers/tier1, tiers/tier1-repeat1" in words
    assert "Left out (1): ablations/4.5-fsdp." in words
    assert "The whole study, as declared: An example." in words
    text = (changed_study / "report.md").read_text(encoding="utf-8")
    assert text.startswith(f"# llama2-1.36b-80gb, 6 of {count} cases, on 2× NVIDIA H100 80GB HBM3\n\n> **A part of ")
    assert "1 run on 1 GPU, 5 runs on 2 GPUs · cases: 6 measured" in text


def test_a_whole_study_is_not_called_a_part(cpu_study: Path, tmp_path: Path):
    study = Path(shutil.copytree(cpu_study, tmp_path / "study"))
    page_of(study)
    text = (study / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# default on AMD EPYC 7B13, no GPU\n\nAn example.\n")
    assert "6 runs on 1 process, 1 run on 2 processes · cases: 7 measured" in text


def test_markdown_links_no_picture_that_is_not_there(changed_study: Path):
    page_of(changed_study)
    text = (changed_study / "report.md").read_text(encoding="utf-8")
    assert "![" not in text and text.count("(The picture is in the HTML report.)") == FIGURES


def test_partial_before_the_first_run(changed_study: Path):
    shutil.rmtree(changed_study / "runs")
    shutil.rmtree(changed_study / "memory")
    page = page_of(changed_study, partial=True)
    assert "nothing to recommend" in page.words
    assert json.loads((changed_study / "summary.json").read_text())["cases"] == {}


def test_the_machine_time_names_its_largest_part_and_who_is_left_out(changed_study: Path):
    path = changed_study / "runs" / "tiers" / "tier2.json"
    write_run_log(path, read_run_log(path).model_copy(update={"wall": None}))
    words = " ".join(page_of(changed_study).words.split())
    assert "The largest part that is no measured step: first step (compilation) and warm-up" in words
    assert "Left out (no clock): tiers/tier2." in words
    text = (changed_study / "report.md").read_text(encoding="utf-8")
    total, *stages = re.findall(r"^\| \*\*total\*\* \| ([\d,.]+) \|", text, flags=re.M)
    minutes = [float(value.replace(",", "")) for value in stages]
    assert len(stages) == 7 and sum(minutes) == pytest.approx(float(total.replace(",", "")), abs=0.05)


def test_settings_untried_on_all_gpus_are_named_below_the_recommendation(changed_study: Path):
    path = add_untried_case(changed_study, speed=1.06)
    words = " ".join(page_of(changed_study).words.replace("\u00a0", " ").split())
    told = re.search(
        r"Not measured on 8 GPUs: baseline/1\.4-graphs reached 73,\d00 tokens/s/GPU on 2 GPUs, \+6\..*", words
    )
    assert told is not None and "It differs in: loader.kind: dataloader → memmap. This would measure it" in told[0]
    command = json.loads((changed_study / "summary.json").read_text())["recommended"]["llama2-1.36b"]["untried"][
        "command"
    ]
    assert "world_size=8" in command and command in words
    assert f"```\n{command}\n```" in (changed_study / "report.md").read_text(encoding="utf-8")
    path.unlink()
    assert "Not measured on" not in page_of(changed_study).words


def test_an_unknown_card_costs_the_mfu_not_the_report(tmp_path: Path):
    study = write_gpu_study(tmp_path / "study")
    for path in (study / "runs").glob("*/*.json"):
        if path.parent.name not in ("tiers", "training"):
            path.unlink()
    for name in ("tier1", "tier1-repeat1", "tier1-repeat2", "tier2", "tier2-repeat1", "tier2-repeat2", "tier3"):
        write_run_log(study / "runs" / "tiers" / f"{name}.json", make_gpu_log(f"tiers/{name}", 1, "NVIDIA Z999"))
    write_run_log(study / "runs" / "training" / "pretrain.json", make_gpu_log("training/pretrain", 1, "NVIDIA Z999"))
    page = page_of(study)
    assert "no row for the card 'NVIDIA Z999'" in page.words
    assert "tokens/s on 8 GPUs" in page.words


def test_a_diverged_run_is_shown_as_a_result(changed_study: Path):
    log = make_gpu_log("training/pretrain", 1)
    for step in log.steps[300:]:
        step.loss, step.grad_norm = None, None
    diverged = {"status": "diverged", "reason": "the loss of step 301 is not finite"}
    write_run_log(changed_study / "runs" / "training" / "pretrain.json", log.model_copy(update=diverged))
    page = page_of(changed_study)
    assert "the loss of step 301 is not finite" in page.words
    assert not re.search(r"\bnan\b", page.words, flags=re.I)


def test_runs_that_ended_before_they_began_are_shown(changed_study: Path):
    """Skipped before the model was built: no steps, no memory, no model."""
    empty = {"steps": [], "rank_step_times_s": [], "memory": [], "parameters": None, "flop_terms": None}
    changes = {**empty, "status": "skipped", "reason": "CUDA graphs are not to be had here", "wall": None}
    log = make_gpu_log("tiers/tier3", 1).model_copy(update={**changes, "evaluations": [], "kernels": None})
    write_run_log(changed_study / "runs" / "tiers" / "tier3.json", log)
    page = page_of(changed_study)
    assert "CUDA graphs are not to be had here" in page.words
    runs = [read_run_log(path) for path in (changed_study / "runs").glob("*/*.json")]
    on_eight = [run.name for run in runs if run.config.world_size == 8]
    assert "tiers/tier3" in on_eight and f"{len(on_eight) - 1} runs on 8 GPUs" in page.words


def test_a_run_that_only_evaluates_has_its_row(changed_study: Path):
    log = make_gpu_log("training/pretrain", 1)
    config = log.config.model_copy(update={"name": "training/evaluate"})
    changes = {"name": config.name, "config": config, "steps": [], "rank_step_times_s": [], "wall": None}
    write_run_log(changed_study / "runs" / "training" / "evaluate.json", log.model_copy(update=changes))
    declare(changed_study, config.name)
    words = " ".join(page_of(changed_study).words.split())
    assert re.search(r"training/evaluate ?0 ?– ?– ?3\.\d\d\d ?\([\d,]+ tokens\)", words)


@pytest.mark.faults
def test_a_report_that_cannot_be_written_is_one_line(
    changed_study: Path, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    def refused(html: Path, why: str) -> None:
        monkeypatch.setattr(sys, "argv", ["mfubench", "report", str(changed_study), "--output", str(html)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 1
        advice = "make room, or name another file with --output"
        assert capsys.readouterr().err == f"error: {html}: the report cannot be written there ({why}); {advice}\n"

    (tmp_path / "file").touch()
    refused(tmp_path / "file" / "reports" / "report.html", "Not a directory")
    with open(small_disk / "somebody-elses", "wb", buffering=0) as stream, pytest.raises(OSError, match="No space"):
        while stream.write(bytes(65536)):
            pass
    refused(small_disk / "report.html", "No space left on device")
    assert [path.name for path in small_disk.rglob("*") if path.is_file()] == ["somebody-elses"]


def test_inline_text_is_escaped():
    assert inline_html("a < b & `c<d>` **bold**") == ("a &lt; b &amp; <code>c&lt;d&gt;</code> <strong>bold</strong>")
    assert markdown_cell("a|b\nc") == "a\\|b c"


def test_what_a_machine_has_no_room_for_is_said_once(changed_study: Path):
    """A study for eight cards on two: what was left out takes a row or a sentence, not one for each case."""
    declared = json.loads((changed_study / "study.json").read_text())
    gone = {name for name in declared["cases"] if name.startswith(("tiers/", "training/"))}
    for name in gone:
        (changed_study / "runs" / f"{name}.json").unlink(missing_ok=True)
    reason = "needs 8 processes a node, this machine holds 2"
    declared["cases"] = {name: case for name, case in declared["cases"].items() if name not in gone}
    declared["skipped"] |= dict.fromkeys(sorted(gone), reason)
    write_json(changed_study / "study.json", declared)
    assert len(gone) > 6
    page_of(changed_study)
    text = (changed_study / "report.md").read_text(encoding="utf-8")
    assert f"Left out ({len(gone) + 1}): see Skipped arms and fallbacks." in text
    (row,) = (line for line in text.splitlines() if line.startswith(f"| left out | {reason} |"))
    assert row.count("`") == 2 * len(gone)
    assert "Not measured, since a case of theirs was left out on this machine: " in text
    assert not [line for line in text.splitlines() if "was left out" in line and line.startswith("|")]
    assert re.search(r"^\d+ more are about cases that were left out on this machine\.$", text, re.MULTILINE)

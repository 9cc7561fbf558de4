from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from analysis.example_study import declare, make_gpu_log, write_gpu_study
from rich.console import Console
from typer.testing import CliRunner

from mfubench.analysis.compare import compare_studies
from mfubench.analysis.compare_table import print_comparison
from mfubench.cli import app
from mfubench.config import ConfigError
from mfubench.run_log import read_run_log, write_json, write_run_log

REGRESSION, NOTHING_COMPARED = 3, 4


@pytest.fixture(scope="module")
def next_week(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same machine and code, other noise."""
    return write_gpu_study(tmp_path_factory.mktemp("results") / "next-week", seed=1000)


def verdicts(first: Path, second: Path, threshold: float = 0.02) -> dict[str, str]:
    return {change.case: change.verdict for change in compare_studies(first, second, threshold).changes}


def test_the_same_speed_is_no_regression(gpu_study: Path, next_week: Path):
    comparison = compare_studies(gpu_study, next_week, 0.02)
    assert comparison.regressions == []
    assert all(abs(change.difference.change) < 0.01 for change in comparison.changes if change.difference)
    assert comparison.spread is not None and comparison.spread.processes >= 16


def test_a_loss_beyond_threshold_and_spread_is_one(gpu_study: Path, changed_study: Path):
    write_run_log(changed_study / "runs" / "tiers" / "tier3.json", make_gpu_log("tiers/tier3", 7, speed=0.97))
    comparison = compare_studies(gpu_study, changed_study, 0.02)
    (change,) = comparison.regressions
    assert change.case == "tiers/tier3"
    assert change.difference is not None and change.difference.change == pytest.approx(-0.03, abs=0.003)
    assert compare_studies(gpu_study, changed_study, 0.05).regressions == []
    assert verdicts(gpu_study, changed_study, 0.05)["tiers/tier3"] == "slower"


def test_a_loss_within_the_spread_is_none(gpu_study: Path, changed_study: Path):
    """Where processes of one setting differ by 5 %, 3 % are nothing."""
    for repeat, speed in ((1, 0.95), (2, 1.05)):
        name = f"tiers/tier1-repeat{repeat}"
        write_run_log(changed_study / "runs" / f"{name}.json", make_gpu_log(name, 7, speed=speed))
    write_run_log(changed_study / "runs" / "tiers" / "tier3.json", make_gpu_log("tiers/tier3", 7, speed=0.97))
    assert verdicts(gpu_study, changed_study)["tiers/tier3"] == "not told apart"
    told = shown(gpu_study, changed_study, 160)
    assert re.search(r"^no regression beyond 2\.0 %; \d+ cases not told apart$", told, flags=re.M)
    assert "not told apart" not in shown(gpu_study, gpu_study, 160)


def test_a_case_that_no_longer_ends_well_is_broken(gpu_study: Path, changed_study: Path):
    path = changed_study / "runs" / "smoke" / "llama2-1.36b.json"
    log = read_run_log(path).model_copy(update={"status": "diverged", "reason": "loss not finite"})
    write_run_log(path, log)
    (change,) = compare_studies(gpu_study, changed_study, 0.02).regressions
    assert (change.case, change.verdict) == ("smoke/llama2-1.36b", "broken")
    assert "loss not finite" in (change.reason or "")


def test_rates_and_their_change_are_of_one_mean(gpu_study: Path, changed_study: Path):
    for repeat, speed in ((1, 0.5), (2, 2.0)):
        name = f"tiers/tier1-repeat{repeat}"
        write_run_log(changed_study / "runs" / f"{name}.json", make_gpu_log(name, 7, speed=speed))
    changes = {change.case: change for change in compare_studies(gpu_study, changed_study, 0.02).changes}
    tier1 = changes["tiers/tier1"]
    assert tier1.difference is not None and tier1.before is not None and tier1.after is not None
    assert tier1.difference.change == pytest.approx(tier1.after / tier1.before - 1)


def test_a_case_that_never_fitted_says_so(gpu_study: Path, next_week: Path):
    changes = {change.case: change for change in compare_studies(gpu_study, next_week, 0.02).changes}
    oom = changes["ablations/4.4-micro-batch32"]
    assert oom.verdict == "not measured" and (oom.reason or "").startswith("ended as oom in the first study: rank 3")


def test_a_case_whose_repeat_died_without_a_log_is_broken(gpu_study: Path, changed_study: Path):
    (changed_study / "runs" / "tiers" / "tier1-repeat1.json").unlink()
    write_json(changed_study / "work" / "tiers" / "tier1-repeat1" / "failure.json", {"reason": "killed by signal 9"})
    (change,) = compare_studies(gpu_study, changed_study, 0.02).regressions
    assert (change.case, change.verdict, change.reason) == ("tiers/tier1", "broken", "killed by signal 9")


def test_cases_of_one_study_alone_and_other_settings(gpu_study: Path, changed_study: Path):
    (changed_study / "runs" / "tiers" / "tier3.json").unlink()
    path = changed_study / "runs" / "ablations" / "4.1-sdpa.json"
    log = read_run_log(path)
    log.used["attention"].used = "eager"
    write_run_log(path, log)
    changes = {change.case: change for change in compare_studies(gpu_study, changed_study, 0.02).changes}
    assert changes["tiers/tier3"].verdict == "only in one"
    assert changes["tiers/tier3"].reason == "not in the second study"
    assert changes["ablations/4.1-sdpa"].differs_in == {"attention": ("sdpa", "eager")}


def test_rates_of_two_models_are_not_compared(gpu_study: Path, changed_study: Path):
    path = changed_study / "runs" / "tiers" / "tier3.json"
    log = make_gpu_log("tiers/tier3", 7, speed=0.5)
    larger = log.config.model.model_copy(update={"name": "llama2-2b", "num_hidden_layers": 27})
    write_run_log(path, log.model_copy(update={"config": log.config.model_copy(update={"model": larger})}))
    comparison = compare_studies(gpu_study, changed_study, 0.02)
    change = next(change for change in comparison.changes if change.case == "tiers/tier3")
    assert (change.verdict, change.reason) == ("other model", "llama2-1.36b → llama2-2b")
    assert change.difference is None
    assert comparison.regressions == []


def test_command_line(gpu_study: Path, changed_study: Path):
    write_run_log(changed_study / "runs" / "tiers" / "tier3.json", make_gpu_log("tiers/tier3", 7, speed=0.9))
    runner = CliRunner()
    good = runner.invoke(app, ["compare", str(gpu_study), str(gpu_study)])
    assert good.exit_code == 0 and "no regression beyond 2.0 %" in good.output
    bad = runner.invoke(app, ["compare", str(gpu_study), str(changed_study)])
    assert bad.exit_code == REGRESSION and "regression: tiers/tier3" in bad.output
    as_json = runner.invoke(app, ["compare", str(gpu_study), str(changed_study), "--json"])
    assert json.loads(as_json.output)["regressions"] == ["tiers/tier3"]
    with pytest.raises(ConfigError, match="--threshold"):
        runner.invoke(app, ["compare", str(gpu_study), str(gpu_study), "--threshold", "2"], catch_exceptions=False)


def shown(first: Path, second: Path, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    print_comparison(compare_studies(first, second, 0.02), console)
    return console.export_text()


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (60, {"95 % interval", "second", "MFU (palm)"}),
        (80, {"second", "MFU (palm)"}),
        (100, {"MFU (palm)"}),
        (160, set()),
    ],
)
def test_a_narrow_terminal_keeps_names_and_verdicts_whole(
    gpu_study: Path, next_week: Path, width: int, left_out: set[str]
):
    lines = shown(gpu_study, next_week, width).splitlines()
    (titles,) = [line for line in lines if line.startswith("case ")]
    assert {title for title in ("95 % interval", "second", "MFU (palm)") if title not in titles} == left_out
    (row,) = [line for line in lines if line.startswith("ablations/4.2-bfloat16-control ")]
    assert "no difference" in row


def test_rates_are_told_in_the_unit_of_the_device(gpu_study: Path, cpu_study: Path):
    assert "Rates in tokens/s/GPU." in shown(gpu_study, gpu_study, 100)
    assert "Rates in tokens/s/process." in shown(cpu_study, cpu_study, 100)


def test_studies_without_a_common_case_are_not_without_regression(gpu_study: Path, changed_study: Path):
    for stage in (changed_study / "runs").glob("[!s]*"):
        stage.rename(stage.with_name(f"other-{stage.name}"))
    shutil.rmtree(changed_study / "runs" / "scaling")
    for path in (changed_study / "runs").glob("other-*/*.json"):
        log = read_run_log(path)
        write_run_log(path, log.model_copy(update={"name": f"{path.parent.name}/{path.stem}"}))
        declare(changed_study, f"{path.parent.name}/{path.stem}")
    result = CliRunner().invoke(app, ["compare", str(gpu_study), str(changed_study)])
    assert result.exit_code == NOTHING_COMPARED, result.output
    assert "nothing compared" in result.output and "no regression" not in result.output
    assert "not in the first study: other-" in result.output and "not in the second study: baseline" in result.output


@pytest.mark.slow
def test_report_command(changed_study: Path):
    result = CliRunner().invoke(app, ["report", str(changed_study), "--partial"])
    assert result.exit_code == 0, result.output
    for name in ("report.html", "report.md", "summary.json", "tables/runs.csv", "figures/throughput.png"):
        assert (changed_study / name).stat().st_size > 100

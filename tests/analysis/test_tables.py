from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from mfubench.analysis.tables import main, write_tables
from mfubench.run_log import Choice, read_run_log, write_json, write_run_log, write_text_atomically

SCRIPTS = Path(__file__).parents[2] / "workflow" / "scripts"


def read(folder: Path) -> dict[str, pd.DataFrame]:
    return {path.stem: pd.read_csv(path) for path in folder.glob("*.csv")}


@pytest.fixture(scope="module")
def tables(gpu_study: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    folder = tmp_path_factory.mktemp("tables")
    assert main(["--study-dir", str(gpu_study), "--output-dir", str(folder)]) == 0
    return read(folder)


def test_all_tables_are_written(tables: dict[str, pd.DataFrame]):
    assert set(tables) == {"runs", "expectations", "effects", "scaling", "memory", "profiles"}


def test_one_row_a_case_with_and_without_figures(tables: dict[str, pd.DataFrame]):
    runs = tables["runs"].set_index("case")
    assert runs.index.is_unique
    tier1 = runs.loc["tiers/tier1"]
    assert tier1.tokens_per_s_per_gpu_q1 <= tier1.tokens_per_s_per_gpu_median <= tier1.tokens_per_s_per_gpu_q3
    assert tier1.tokens_per_s_per_gpu_low95 < tier1.tokens_per_s_per_gpu_median < tier1.tokens_per_s_per_gpu_high95
    assert tier1.total_tokens_per_s_per_gpu == pytest.approx(tier1.tokens_per_s_per_gpu_median, rel=0.01)
    assert tier1.mfu_palm > tier1.mfu_matmul > tier1.mfu_causal
    assert tier1.mfu_mamfu == pytest.approx(tier1.mfu_causal * 989.4 / 731.0)
    oom = runs.loc["ablations/4.4-micro-batch32"]
    assert oom.status == "oom" and pd.isna(oom.tokens_per_s_per_gpu_median) and "out of memory" in oom.reason
    assert runs.loc["ablations/4.5-fsdp"].status == "skipped"


def test_what_was_asked_and_what_was_used_stand_side_by_side(tables: dict[str, pd.DataFrame]):
    row = tables["runs"].set_index("case").loc["ablations/4.2-float32"]
    assert (row.attention_asked, row.attention_used) == ("cudnn", "sdpa")
    assert "cuDNN attention has no float32" in row.fallbacks


def test_a_setting_that_the_first_run_does_not_tell_has_its_column(changed_study: Path, tmp_path: Path):
    path = changed_study / "runs" / "tiers" / "tier3.json"
    log = read_run_log(path)
    log.used["reduction"] = Choice(requested="auto", used="exchange")
    write_run_log(path, log)
    write_tables(changed_study, tmp_path)
    runs = read(tmp_path)["runs"].set_index("case")
    assert runs.loc["tiers/tier3"].reduction_used == "exchange" and pd.isna(runs.loc["tiers/tier2"].reduction_used)


def test_memory_table_holds_every_trial(tables: dict[str, pd.DataFrame]):
    memory = tables["memory"]
    assert list(memory.micro_batch_size) == [4, 8, 12, 16, 20, 24, 28, 30, 31, 32]
    assert set(memory.status) == {"ok", "oom"} and set(memory.largest) == {30}


def test_a_cpu_study_has_all_tables_too(cpu_study: Path, tmp_path: Path):
    write_tables(cpu_study, tmp_path)
    tables = read(tmp_path)
    assert len(tables["effects"]) == len(tables["expectations"]) == len(tables["memory"]) == 0
    assert "verdict" in tables["effects"].columns
    peaks = tables["runs"].peak_source
    assert peaks.str.contains("measured").all()


def test_failures_and_missing_cases_have_their_row(changed_study: Path, tmp_path: Path):
    (changed_study / "runs" / "tiers" / "tier3.json").unlink()
    (changed_study / "runs" / "tiers" / "tier2.json").unlink()
    (changed_study / "runs" / "tiers" / "tier1.json").unlink()
    (changed_study / "work" / "tiers" / "tier1").mkdir(parents=True)
    write_text_atomically(changed_study / "logs" / "tiers" / "tier1.log", "")
    write_json(changed_study / "work" / "tiers" / "tier3" / "failure.json", {"reason": "NCCL timeout"})
    write_tables(changed_study, tmp_path, partial=True)
    runs = read(tmp_path)["runs"].set_index("case")
    assert (runs.loc["tiers/tier3"].status, runs.loc["tiers/tier3"].reason) == ("failed", "NCCL timeout")
    missing = {name: row.reason for name, row in runs.iterrows() if row.status == "missing"}
    assert missing["tiers/tier2"] == "has not been run"
    assert missing["tiers/tier1"] == "began and left no result; see logs/tiers/tier1.log"


def test_the_same_study_gives_the_same_bytes(gpu_study: Path, tmp_path: Path):
    first = [path.read_bytes() for path in write_tables(gpu_study, tmp_path / "a")]
    assert first == [path.read_bytes() for path in write_tables(gpu_study, tmp_path / "b")]


@pytest.mark.parametrize("script", ["tabulate_runs", "plot_ladder", "write_report", "audit_study"])
def test_a_damaged_study_is_told_in_one_line(script: str, gpu_study: Path, tmp_path: Path):
    study = tmp_path / "study"
    shutil.copytree(gpu_study, study)
    (study / "study.json").write_text((study / "study.json").read_text()[:60])
    output = {"tabulate_runs": "--output-dir", "write_report": "--html"}.get(script, "--output")
    command = [sys.executable, SCRIPTS / f"{script}.py", "--study-dir", study, output, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert re.fullmatch(r"error: .*study\.json: .*\n", done.stderr)

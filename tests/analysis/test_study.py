from __future__ import annotations

import json
from pathlib import Path

import pytest
from analysis.example_study import declare, make_gpu_log
from factories import make_run_log

from mfubench.analysis.findings import Findings
from mfubench.analysis.report.blocks import Table
from mfubench.analysis.report.closing_sections import left_out_section
from mfubench.analysis.report.head import case_counts
from mfubench.analysis.study import base_name, load_study
from mfubench.config import ConfigError
from mfubench.run_log import write_json, write_run_log


def test_reads_everything_in_the_order_of_the_stages(gpu_study: Path):
    study = load_study(gpu_study)
    names = list(study.runs)
    assert names[0] == "smoke/llama2-1.36b" and names[-1] == "training/pretrain"
    assert names.index("scaling/2.1-plain-gpus8") < names.index("tiers/tier1")
    assert study.limits["memory/5.1-limit"].largest == 30
    assert study.ceilings is not None and study.ceilings.large_matmul_tflops("bf16") == 731.0
    assert study.missing() == []


def test_numbers_in_names_sort_as_numbers(changed_study: Path):
    for size in (2, 10):
        name = f"ablations/4.4-micro-batch{size}"
        write_run_log(changed_study / "runs" / f"{name}.json", make_run_log(name=name))
        declare(changed_study, name)
    order = [name for name in load_study(changed_study).runs if "4.4-micro-batch" in name]
    assert [int(name.rpartition("batch")[2]) for name in order] == [2, 8, 10, 32]


def test_never_mixes_machines(changed_study: Path):
    other = make_gpu_log("tiers/tier2", 1, gpu_name="NVIDIA A100-SXM4-80GB")
    write_run_log(changed_study / "runs" / "tiers" / "tier2.json", other)
    with pytest.raises(ConfigError) as error:
        load_study(changed_study)
    assert "NVIDIA H100 80GB HBM3" in str(error.value) and "NVIDIA A100-SXM4-80GB" in str(error.value)
    assert "tiers/tier2" in str(error.value)


def test_a_run_log_in_the_wrong_place_is_an_error(changed_study: Path):
    log = changed_study / "runs" / "tiers" / "tier1.json"
    log.rename(log.with_name("tier9.json"))
    with pytest.raises(ConfigError, match=r"tier9\.json: holds the run tiers/tier1"):
        load_study(changed_study)


@pytest.mark.parametrize("content", ["{", "[1]", '{"study": 3}'])
def test_damaged_study_file(changed_study: Path, content: str):
    (changed_study / "study.json").write_text(content)
    with pytest.raises(ConfigError, match=r"study\.json"):
        load_study(changed_study)


def test_a_folder_that_is_no_study(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"holds no study\.json"):
        load_study(tmp_path)


def test_partial_shows_failures_and_what_is_missing(changed_study: Path):
    (changed_study / "runs" / "tiers" / "tier3.json").unlink()
    (changed_study / "runs" / "tiers" / "tier2.json").unlink()
    work = changed_study / "work" / "tiers" / "tier3"
    write_json(work / "failure.json", {"status": "failed", "reason": "rank 5: NCCL timeout"})
    write_json(changed_study / "work" / "tiers" / "tier1" / "failure.json", {"reason": "an earlier try"})
    study = load_study(changed_study, partial=True)
    assert study.failures["tiers/tier3"].reason == "rank 5: NCCL timeout"
    assert "tiers/tier1" not in study.failures  # it has a result since
    assert study.missing() == ["tiers/tier2"]
    assert load_study(changed_study).failures == {}


def test_a_case_that_was_left_out_and_has_a_result_all_the_same_counts_as_run(changed_study: Path):
    assert load_study(changed_study).left_out() == ["ablations/4.5-fsdp"]
    log = make_run_log(name="ablations/4.5-fsdp")
    write_run_log(changed_study / "runs" / "ablations" / "4.5-fsdp.json", log)
    study = load_study(changed_study)
    assert study.left_out() == study.missing() == []
    assert "ablations/4.5-fsdp" in study.declared_names()


def test_results_that_the_study_no_longer_declares_are_left_aside_and_named(changed_study: Path):
    """A case taken out of the study, a search of an earlier version of it: neither is ranked, judged or counted."""
    values = json.loads((changed_study / "study.json").read_text())
    del values["cases"]["tiers/tier3"], values["searches"]["memory/5.1-limit"]
    write_json(changed_study / "study.json", values)
    study = load_study(changed_study)
    assert study.left_over == ["tiers/tier3", "memory/5.1-limit"]
    assert "tiers/tier3" not in study.runs and study.limits == {} and study.missing() == []
    found = Findings.of(changed_study)
    assert case_counts(found)["left over"] == 2
    rows = [row for block in left_out_section(found).blocks if isinstance(block, Table) for row in block.rows]
    assert [row[2] for row in rows if row[0] == "left over"] == ["`tiers/tier3`, `memory/5.1-limit`"]


def test_a_failure_of_a_case_that_is_no_longer_declared_is_none_of_the_study(changed_study: Path):
    for name in ("tiers/of-an-earlier-version", "ablations/4.5-fsdp"):
        write_json(changed_study / "work" / name / "failure.json", {"reason": "killed"})
    assert list(load_study(changed_study, partial=True).failures) == ["ablations/4.5-fsdp"]


def test_a_study_without_any_result_is_for_partial_only(changed_study: Path):
    """One of nothing but a memory search has a report all the same."""
    for path in (changed_study / "runs").glob("*/*.json"):
        path.unlink()
    assert list(load_study(changed_study).limits) == ["memory/5.1-limit"]
    (changed_study / "memory" / "5.1-limit.json").unlink()
    with pytest.raises(ConfigError, match="--partial"):
        load_study(changed_study)
    assert load_study(changed_study, partial=True).runs == {}


def test_failure_of_a_search_trial_counts_for_the_search(changed_study: Path):
    (changed_study / "memory" / "5.1-limit.json").unlink()
    trial = changed_study / "work" / "memory" / "5.1-limit" / "micro-batch8" / "failure.json"
    write_json(trial, {"reason": "disk full"})
    assert load_study(changed_study, partial=True).failures["memory/5.1-limit"].reason == "disk full"


def test_partial_without_a_declaration(changed_study: Path):
    """A workflow that stopped early may not have written study.json yet."""
    (changed_study / "study.json").unlink()
    study = load_study(changed_study, partial=True)
    assert study.name == "study" and "tiers/tier1" in study.runs and study.missing() == []


def test_base_name():
    assert base_name("tiers/tier1-repeat12") == "tiers/tier1"
    assert base_name("tiers/tier1") == "tiers/tier1"


def test_keys_of_later_versions_are_passed_over(changed_study: Path):
    path = changed_study / "study.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "of_tomorrow": 1}))
    assert load_study(changed_study).name == "llama2-1.36b-80gb"


def test_a_part_of_a_study_has_the_traces_that_the_workflow_has_not_kept_yet(changed_study: Path):
    kept = changed_study / "traces" / "tiers" / "tier3.json.gz"
    work = changed_study / "work" / "tiers" / "tier3" / "trace.json.gz"
    work.parent.mkdir(parents=True)
    work.write_bytes(kept.read_bytes())
    assert load_study(changed_study, partial=True).traces["tiers/tier3"] == kept
    kept.unlink()
    assert load_study(changed_study, partial=True).traces["tiers/tier3"] == work
    assert "tiers/tier3" not in load_study(changed_study).traces

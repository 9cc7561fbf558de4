from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from analysis.example_study import noisy_steps
from factories import ATTENTION_KERNELS, make_run_log, with_threads

from mfubench.analysis.effects import (
    Effect,
    judge_effect,
    judge_effects,
    spread_between_processes,
    why_missing,
)
from mfubench.analysis.findings import Findings
from mfubench.analysis.measures import measure
from mfubench.analysis.report.blocks import Table
from mfubench.analysis.report.measured_sections import effects_section
from mfubench.analysis.settings import differing_settings, settings_that_ran
from mfubench.analysis.statistics import ProcessSpread
from mfubench.analysis.tables import effects_table
from mfubench.config import KernelsConfig
from mfubench.run_log import Choice, Kernels, RunLog, read_run_log, write_run_log


def noisy(log: RunLog, rate: float, seed: int) -> RunLog:
    return log.model_copy(update={"steps": noisy_steps(log, rate, seed, 0.001)})


def measured(**logs: RunLog):
    return {log.name: measure(log, None) for log in logs.values()}


@pytest.fixture(scope="module")
def found(gpu_study: Path) -> Findings:
    return Findings.of(gpu_study)


def test_example_effects(found: Findings):
    verdicts = {effect.name: effect.verdict for effect in found.effects}
    assert verdicts == {
        "torch.compile": "faster",
        "DataLoader": "no difference",
        "CUDA graphs": "faster",
        "cuDNN attention": "faster",
        "float32": "slower",
        "accumulation 16 instead of 1": "faster",
        "micro-batch 24 instead of 8": "faster",
        "FSDP": "not measured",
    }
    by_name = {effect.name: effect for effect in found.effects}
    assert by_name["torch.compile"].difference.change == pytest.approx(69_300 / 55_100 - 1, abs=0.004)
    assert by_name["DataLoader"].difference.arm_processes == 3
    assert by_name["DataLoader"].differs_in == {"loader.kind": ("memmap", "dataloader")}
    assert "needs 16 processes a node" in by_name["FSDP"].reason
    assert all(effect.is_clean for effect in found.effects if effect.difference)


def test_spread_comes_from_repeats_and_from_equal_cases_of_other_names(found: Findings):
    assert found.spread is not None
    # tier1 x 3, scaling/2.2-compile-gpus8 and memory/5.2-micro-batch24 are one setting
    assert found.spread.processes >= 5 + 3
    assert 0.0002 < found.spread.log_deviation < 0.005


def test_settings_are_those_that_ran():
    log = make_run_log(loader={"kind": "dataloader", "num_workers": 2})
    log.used["loader"] = Choice(requested="dataloader", used="memmap", reason="no shared memory")
    settings = settings_that_ran(log)
    assert settings["loader.kind"] == "memmap" and "loader.num_workers" not in settings
    assert settings["attention"] == "cudnn"
    assert "seed" not in settings and "name" not in settings


def test_a_kernel_is_named_once_by_what_ran():
    plain, own = make_run_log(name="tiers/a"), make_run_log(name="tiers/b")
    own.config = own.config.model_copy(update={"kernels": KernelsConfig(norm="auto", rope="auto")})
    own.used |= {
        "norm": Choice(requested="auto", used="fused"),
        "rope": Choice(requested="auto", used="plain", reason="a try failed"),
    }
    plain.used |= {name: Choice(requested="plain", used="plain") for name in ("norm", "rope")}
    assert differing_settings(plain, own) == {"kernels.norm": ("plain", "fused")}
    for name in ("norm", "rope"):  # a log of before its kernels were recorded: what was asked is what ran
        del plain.used[name]
    assert differing_settings(plain, own) == {"kernels.norm": ("plain", "fused")}


@pytest.mark.parametrize(("cases", "words"), [(1, "of 1 setting that"), (2, "of 2 settings that")])
def test_the_settings_that_were_repeated_are_counted(found: Findings, cases: int, words: str):
    assert found.spread is not None
    section = effects_section(replace(found, spread=replace(found.spread, cases=cases)))
    assert words in section.blocks[0].text


def test_settings_without_meaning_are_no_difference():
    plain, compiled = make_run_log(compile="none"), make_run_log(compile="model", compile_mode="default")
    assert differing_settings(plain, compiled) == {"compile": ("none", "model")}


def test_threads_of_a_cpu_are_a_difference_of_their_own():
    """Of as many processes: two share out the same cores, which follows from their number."""
    one, two = (with_threads(make_run_log(device="cpu"), threads) for threads in (1, 2))
    assert differing_settings(one, two) == {"environment.cpu_threads": (1, 2)}
    ddp = with_threads(make_run_log(device="cpu", world_size=2, parallelism="ddp"), 1)
    assert "environment.cpu_threads" not in differing_settings(two, ddp)


def test_power_limits_are_a_difference_of_their_own():
    first, second, unknown = make_run_log(), make_run_log(), make_run_log()
    for log, limit in ((first, 700.0), (second, 450.0), (unknown, None)):
        for gpu in log.environment.gpus:
            gpu.power_limit_w = limit
    assert differing_settings(first, second) == {"environment.power_limit_w": ("700 W", "450 W")}
    assert differing_settings(first, unknown) == differing_settings(first, first) == {}


def test_an_arm_that_fell_back_to_its_control_is_no_contrast(found: Findings):
    control = noisy(make_run_log(name="tiers/a", attention="sdpa"), 60_000, 1)
    arm = noisy(make_run_log(name="tiers/b", attention="fa2"), 61_000, 2)
    arm.used["attention"] = Choice(requested="fa2", used="sdpa", reason="flash-attn is not installed")
    effect = judge_effect(found.study, measured(a=control, b=arm), "fa2", "tiers/b", "tiers/a", None, None)
    assert effect.verdict == "no contrast" and effect.difference is None
    assert "flash-attn is not installed" in effect.reason


def test_arms_with_other_names_and_the_same_kernels_are_no_contrast(found: Findings):
    control = noisy(make_run_log(name="tiers/a", attention="sdpa"), 60_000, 1)
    arm = noisy(make_run_log(name="tiers/b", attention="fa2"), 61_000, 2)
    arm.kernels = Kernels(attention=ATTENTION_KERNELS["sdpa"], matmul=[], other_count=1)
    effect = judge_effect(found.study, measured(a=control, b=arm), "fa2", "tiers/b", "tiers/a", None, None)
    assert effect.verdict == "no contrast" and "same attention kernels" in effect.reason


def test_how_gradients_are_summed_follows_from_the_parallelism():
    def log(parallelism: str, used: str | None, asked: str = "auto") -> RunLog:
        made = make_run_log(world_size=4, parallelism=parallelism, communication={"reduction": asked})
        if used is not None:
            made.used["reduction"] = Choice(requested=asked, used=used)
        return made

    exchange, sharded = log("ddp", "exchange"), log("fsdp", "collective")
    assert differing_settings(exchange, sharded) == {"parallelism": ("ddp", "fsdp")}
    by_itself = {"communication.reduction": ("collective", "exchange")}
    assert differing_settings(log("ddp", "collective", "collective"), exchange) == by_itself
    assert differing_settings(log("ddp", None), exchange) == by_itself  # of a run before there was a choice


def test_two_settings_at_once_are_not_clean(found: Findings):
    control = noisy(make_run_log(name="tiers/a", dtype="bfloat16"), 60_000, 1)
    arm = noisy(make_run_log(name="tiers/b", dtype="float32", attention="sdpa"), 30_000, 2)
    effect = judge_effect(found.study, measured(a=control, b=arm), "fp32", "tiers/b", "tiers/a", None, None)
    assert effect.verdict == "slower" and not effect.is_clean
    assert set(effect.differs_in) == {"dtype", "attention"}
    assert effect.difference.basis == "not repeated"


def test_an_effect_that_nothing_can_be_told_of_is_not_called_none(changed_study: Path):
    """Steps from a sixteenth of their time to sixteen times of it: the table says so as the report does."""
    random = np.random.default_rng(0)
    for path in sorted((changed_study / "runs").glob("*/*.json")):
        log = read_run_log(path)
        for step in log.steps:
            step.step_time_s *= 16 ** random.uniform(-1, 1)
        write_run_log(path, log)
    found = Findings.of(changed_study)
    by_name = {effect.name: effect for effect in found.effects}
    assert by_name["DataLoader"].verdict == "too noisy"
    table = effects_table(found.effects).set_index("effect")
    assert table.loc["DataLoader", "verdict"] == "too noisy"
    assert next(row for row in effects_rows(found) if row[0] == "DataLoader")[1].startswith("too noisy to tell (")


def effect_of(found: Findings, log_deviation: float, expected: str | None, expectations=None) -> Effect:
    """Of two processes that differ in CUDA graphs, on a machine whose processes differ by so much."""
    control = noisy(make_run_log(name="tiers/tier2"), 60_000, 1)
    arm = noisy(make_run_log(name="tiers/tier3", cuda_graphs=True), 60_600, 2)
    spread = ProcessSpread(log_deviation, 30, 5, 35)
    arms = "tiers/tier3", "tiers/tier2"
    return judge_effect(found.study, measured(a=control, b=arm), "graphs", *arms, expected, spread, expectations)


def test_an_interval_that_holds_what_was_expected_is_no_proof_of_none(found: Findings):
    """+1 % with an interval of 3 points to either side, by the study's words or the testing guide's +5 to 15 %."""
    assert effect_of(found, 0.01, None).verdict == "no difference"
    assert effect_of(found, 0.01, "+10-20 %").verdict == "no difference"
    assert effect_of(found, 0.01, "+3-5 %").verdict == "not told apart"
    wide = effect_of(found, 0.02, None)
    assert wide.difference is not None and wide.difference.interval.high > 0.05 and wide.verdict == "not told apart"
    assert found.expectations is not None
    arms = ("tiers/tier3", "tiers/tier2")
    guide = next(item for item in found.expectations.effects if (item.arm, item.control) == arms)
    assert guide.rank == "primary" and guide.change == (0.05, 0.15)
    assert effect_of(found, 0.01, None, found.expectations).verdict == "no difference"
    lower = found.expectations.model_copy(update={"effects": (guide.model_copy(update={"change": (0.03, 0.15)}),)})
    assert effect_of(found, 0.01, None, lower).verdict == "not told apart"


def test_a_setting_that_was_not_told_apart_is_not_as_expected_either(found: Findings):
    wide = effect_of(found, 0.05, "+5-15 %", found.expectations)
    (row,) = effects_rows(replace(found, effects=[wide]))
    assert row[1].startswith("not told apart (+1.") and row[3] == "+5-15 %: not told apart"
    narrow = effect_of(found, 0.002, "+5-15 %", found.expectations)
    (row,) = effects_rows(replace(found, effects=[narrow]))
    assert row[3] == "+5-15 %: ▼ below"
    table = effects_table([wide]).set_index("effect")
    assert table.loc["graphs", "verdict"] == "not told apart"
    assert "goes no further than 5 % to either side" in effects_section(found).blocks[0].text


def effects_rows(found: Findings):
    return next(block for block in effects_section(found).blocks if isinstance(block, Table)).rows


def test_memory_of_an_effect(found: Findings):
    arm = make_run_log(name="tiers/b", micro_batch_size=16)
    for rank in arm.memory:
        rank.peak_reserved_gib = 2 * 46.8
    effect = judge_effect(
        found.study, measured(a=make_run_log(name="tiers/a"), b=arm), "x", "tiers/b", "tiers/a", None, None
    )
    assert effect.memory_change == pytest.approx(1.0)


def test_without_repeats_there_is_no_spread():
    assert spread_between_processes(measured(a=make_run_log(name="tiers/a"))) is None


def test_why_a_case_is_missing(found: Findings):
    assert "out of memory" in why_missing(found.study, "ablations/4.4-micro-batch32")
    assert "was left out" in why_missing(found.study, "ablations/4.5-fsdp")
    assert why_missing(found.study, "tiers/tier9") == "tiers/tier9 has not been run"


def test_no_effects_declared(cpu_study: Path):
    found = Findings.of(cpu_study)
    assert judge_effects(found.study, found.measures) == []

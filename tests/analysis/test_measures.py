from __future__ import annotations

import numpy as np
import pytest
from analysis.example_study import write_ceilings
from factories import make_run_log

from mfubench.analysis.measures import final_loss, measure
from mfubench.ceilings import read_ceilings
from mfubench.run_log import Choice


def test_mfu_by_every_convention_of_a_known_rate(tmp_path):
    write_ceilings(tmp_path, "cuda", "NVIDIA H100 80GB HBM3", {"bf16": 700.0})
    log = make_run_log(step_time_s=8 * 4 * 2048 / 72_000)  # 72,000 tokens/s/GPU but for the wobble
    judged = measure(log, read_ceilings(tmp_path / "ceilings.json"))
    rate = judged.tokens_per_s_per_gpu.median
    assert rate == pytest.approx(72_000, rel=0.002)
    attention = 12 * 18 * 2304 * 2048
    matmul = 1_294_159_104 - 32_000 * 2304 - 37 * 2304  # without the embedding that is looked up, and the norms
    expected = {
        "palm": 6 * 1_294_159_104 + attention,
        "matmul": 6 * matmul + attention,
        "causal": 6 * matmul + attention / 2,
    }
    for convention, flops in expected.items():
        assert judged.mfu[convention].median == pytest.approx(rate * flops / 989.4e12, rel=1e-9)
    assert judged.mfu["hfu"].median == judged.mfu["causal"].median  # nothing is computed twice
    assert judged.mfu["mamfu"].median == pytest.approx(rate * expected["causal"] / 700e12, rel=1e-9)


def test_checkpointing_raises_hfu_alone():
    judged = measure(make_run_log(activation_checkpointing="full"), None)
    assert judged.mfu["hfu"].median > 1.2 * judged.mfu["causal"].median
    assert "mamfu" not in judged.mfu  # no ceilings


def test_float32_is_judged_against_its_own_peak():
    judged = measure(make_run_log(dtype="float32", attention="sdpa"), None)
    assert judged.peak is not None and (judged.peak.dtype, judged.peak.tflops) == ("tf32", 494.7)


def test_mamfu_is_of_the_runs_own_arithmetic(tmp_path):
    """A float8 run has none: no float8 matmul is measured."""
    write_ceilings(tmp_path, "cuda", "NVIDIA H100 80GB HBM3", {"bf16": 731.0, "tf32": 402.0, "fp32": 52.0})
    ceilings = read_ceilings(tmp_path / "ceilings.json")
    for settings, tflops in (({}, 731.0), ({"dtype": "float32"}, 402.0), ({"dtype": "float32", "tf32": False}, 52.0)):
        judged = measure(make_run_log(**settings), ceilings)
        measured = judged.mfu["causal"].median * judged.peak.tflops / judged.mfu["mamfu"].median
        assert measured == pytest.approx(tflops)
    assert "mamfu" not in measure(make_run_log(fp8=True), ceilings).mfu


def test_mamfu_of_a_process_is_of_its_share_of_the_threads(tmp_path):
    write_ceilings(tmp_path, "cpu", "AMD EPYC 7B13", {"fp32": 0.35})  # by two threads, of which each rank has one
    judged = measure(make_run_log(device="cpu", world_size=2), read_ceilings(tmp_path / "ceilings.json"))
    assert judged.mfu["mamfu"].median == pytest.approx(judged.mfu["causal"].median)


def test_an_unknown_card_costs_the_mfu_and_says_why():
    judged = measure(make_run_log(gpu_name="NVIDIA Z999"), None)
    assert judged.mfu == {} and judged.headline_mfu is None
    assert judged.tokens_per_s_per_gpu is not None
    assert "Z999" in judged.peak_problem


def test_rates_are_per_gpu_and_memory_is_the_fullest_ranks():
    log = make_run_log(world_size=4)
    log.memory[2].peak_reserved_gib = 60.0
    judged = measure(log, None)
    assert judged.tokens_per_s == pytest.approx(4 * judged.tokens_per_s_per_gpu.median)
    assert judged.peak_memory_gib == 60.0
    assert judged.capacity_gib == pytest.approx(79.2)


def test_warm_up_and_compilation_do_not_count():
    log = make_run_log()
    assert len(measure(log, None).rates) == sum(step.phase == "measured" for step in log.steps) < len(log.steps)


def test_out_of_memory_has_a_peak_but_no_rate():
    judged = measure(make_run_log(status="oom", steps=[], rank_step_times_s=[], reason="CUDA out of memory"), None)
    assert judged.tokens_per_s_per_gpu is None and judged.mfu == {} and judged.stability is None
    assert judged.total_rate is None and judged.final_loss is None


def test_a_skipped_run_says_nothing_and_breaks_nothing():
    empty = {"steps": [], "rank_step_times_s": [], "memory": [], "parameters": None, "flop_terms": None}
    judged = measure(make_run_log(status="skipped", reason="no CUDA graphs here", wall=None, **empty), None)
    assert (judged.peak, judged.peak_problem, judged.peak_memory_gib, judged.capacity_gib) == (None, None, None, None)
    assert judged.log.fallbacks() == {}


def test_outliers_are_counted():
    log = make_run_log(max_iters=60)
    assert measure(log, None).stability.outliers == 0
    log.steps[30].step_time_s *= 1.5
    stability = measure(log, None).stability
    assert stability.outliers == 1
    assert stability.slowest == pytest.approx(1.5, rel=0.02)


def test_a_slow_rank_shows_as_skew():
    log = make_run_log(world_size=2)
    log.rank_step_times_s[1] = [1.02 * seconds for seconds in log.rank_step_times_s[0]]
    assert measure(log, None).stability.rank_skew == pytest.approx(0.02)


def test_final_loss_is_null_after_a_loss_that_is_not_finite():
    log = make_run_log()
    last_quarter = [step.loss for step in log.steps[-(len(log.steps) // 4) :]]
    assert final_loss(log.steps) == pytest.approx(np.median(last_quarter))
    log.steps[-1].loss = None
    assert final_loss(log.steps) is None
    assert final_loss([]) is None


def test_fallbacks_name_what_ran_and_why():
    log = make_run_log()
    log.used["attention"] = Choice(requested="fa2", used="sdpa", reason="flash-attn is not installed")
    log.used["loss"] = Choice(requested="auto", used="chunked")
    assert log.fallbacks() == {"attention": "fa2 → sdpa: flash-attn is not installed"}

"""Honest time, adaptive length, and everything a run log is to hold."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
from train.train_runs import VOCABULARY, losses, run_here, run_many, tiny_config

from mfubench.config import KernelsConfig
from mfubench.data.meta import TokenizerMeta, write_meta
from mfubench.run_log import read_steps
from mfubench.train.adaptive import bootstrap_interval, enough, warmup_length
from mfubench.train.step import TrainStep


@pytest.fixture(scope="module")
def everything(data, tmp_path_factory):
    """One run with all that can happen between steps."""
    work = tmp_path_factory.mktemp("everything")
    config = tiny_config(
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        evaluation={"interval": 6, "iters": 2, "at_start": True, "at_end": True},
        checkpoint={"interval": 10},
        sample_tokens=5,
        measurement={"profile": "kernels", "warmup_steps": 3, "preheat_s": 0.2, "gradient_interval": 8},
    )
    return run_here(config, data, work), work


def test_every_field_says_what_was_used(everything):
    log, _ = everything
    assert log.status == "ok" and log.reason is None
    assert set(log.used) == {
        "attention", "compile", "cuda_graphs", "loader", "loss", "parallelism", "dtype", "tf32", "fp8",
        "reduction", *KernelsConfig.model_fields,
    }  # fmt: skip
    assert (log.used["parallelism"].requested, log.used["parallelism"].used) == ("ddp", "none")
    assert log.used["parallelism"].reason == "one process"
    assert log.parameters.total == log.flop_terms.parameters
    assert log.parameters.matmul == log.flop_terms.matmul_parameters
    assert log.dataset.train_tokens == 20_000 and log.dataset.source == "arithmetic progressions"
    assert log.environment.cpu_threads >= 1 and log.environment.command
    assert log.kernels.attention and log.kernels.matmul
    assert log.memory[0].peak_rss_gib > 0.05
    assert len(log.sample.split()) == 5
    assert {"samples", "host", "gpus"} <= log.telemetry.keys()


def test_exactly_max_iters_steps_and_marked_phases(everything):
    log, work = everything
    assert [step.step for step in log.steps] == list(range(20))
    assert [step.phase for step in log.steps] == ["warmup"] * 4 + ["measured"] * 16
    assert read_steps(work / "steps.jsonl") == log.steps
    assert all(step.tokens == 128 for step in log.steps)


def test_what_happens_between_steps_changes_no_loss(everything, data, tmp_path):
    log, _ = everything
    measurement = {"profile": "none", "gradient_interval": 8}
    plain = run_here(
        tiny_config(micro_batch_size=4, gradient_accumulation_steps=2, measurement=measurement), data, tmp_path
    )
    assert losses(log) == losses(plain)
    assert log.gradient_statistics == plain.gradient_statistics


def test_phases_stand_apart_and_times_reconcile_with_the_wall_clock(everything):
    log, _ = everything
    by_kind = {phase.kind for phase in log.phases}
    assert by_kind == {"setup", "preheat", "evaluation", "checkpoint", "profile", "sample", "logging"}
    assert [evaluation.step for evaluation in log.evaluations] == [0, 6, 12, 18, 20]
    assert [phase.after_step for phase in log.phases if phase.kind == "checkpoint"] == [10, 20]
    preheat = next(phase for phase in log.phases if phase.kind == "preheat")
    assert preheat.time_s >= 0.2
    inside = [phase for phase in log.phases if phase.kind not in ("setup", "sample") and phase.after_step > 0]
    steps_s = sum(step.step_time_s for step in log.steps)
    accounted = steps_s + sum(phase.time_s for phase in inside)
    assert accounted == pytest.approx(log.wall.training_s, rel=0.05)
    start_s = log.wall.joined_s + log.wall.chosen_s
    assert min(log.wall.joined_s, log.wall.chosen_s) > 0 and start_s + log.wall.training_s < log.wall.total_s
    assert log.wall.training_tokens == 20 * 128
    assert all(0 <= step.data_time_s <= step.step_time_s for step in log.steps)
    assert log.rank_step_times_s == [[step.step_time_s for step in log.steps]]


def test_evaluation_improves_and_is_repeatable(everything):
    log, _ = everything
    assert log.evaluations[0].loss == pytest.approx(math.log(97), rel=0.05)
    assert log.evaluations[-1].loss < 0.8 * log.evaluations[0].loss
    assert log.evaluations[0].tokens == 2 * 4 * 16


def test_gradient_statistics_at_their_interval(everything):
    log, _ = everything
    assert [record.step for record in log.gradient_statistics] == [0, 8, 16]
    assert set(log.gradient_statistics[0].layers) == {
        "blocks.0", "blocks.1", "final_norm", "lm_head", "token_embedding",
    }  # fmt: skip
    first = log.gradient_statistics[0].layers
    sizes = {"blocks.0": 32 * (32 + 32) + 32 * 32 + 3 * 32 * 64 + 2 * 32}
    assert first["blocks.0"]["std"] * math.sqrt(sizes["blocks.0"]) < log.steps[0].grad_norm


@pytest.mark.slow
def test_evaluation_and_gradient_statistics_do_not_depend_on_the_parallelism(data, tmp_path):
    options = {
        "measurement": {"profile": "kernels", "gradient_interval": 5},
        "evaluation": {"at_end": True, "iters": 2},
        "sample_tokens": 4,
    }
    reference = run_here(tiny_config(**options), data, tmp_path / "reference")
    configs = {
        parallelism: tiny_config(world_size=2, micro_batch_size=4, parallelism=parallelism, **options)
        for parallelism in ("ddp", "zero1", "fsdp")
    }
    logs = run_many(configs, data, tmp_path)
    for log in logs.values():
        assert log.evaluations[-1].loss == pytest.approx(reference.evaluations[-1].loss, rel=1e-5)
        assert log.evaluations[-1].tokens == reference.evaluations[-1].tokens
        assert log.sample == reference.sample
        assert log.kernels.attention == reference.kernels.attention
        for found, expected in zip(log.gradient_statistics, reference.gradient_statistics, strict=True):
            for layer, values in expected.layers.items():
                assert found.layers[layer] == pytest.approx(values, rel=1e-3, abs=1e-7)


def write_tokenizer(folder: Path, sha256: str) -> Path:
    """A tokenizer of the vocabulary of the tiny dataset, which was prepared with one of hash 0000…"""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder.mkdir()
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    meta = TokenizerMeta(
        name="words", kind="files", source="here", vocab_size=VOCABULARY, largest_id=VOCABULARY - 1, eos_id=0,
        eos_token="w0", sha256=sha256, vocabulary_sha256=sha256, encoder="tokenizers",
    )  # fmt: skip
    write_meta(meta, folder)
    return folder


def test_text_is_sampled_with_the_tokenizer_of_the_data_alone(data, tmp_path):
    config = tiny_config(max_iters=2, sample_tokens=3)
    own = write_tokenizer(tmp_path / "own", "0" * 64)
    log = run_here(config, data, tmp_path / "work", "--tokenizer", str(own))
    assert [word[0] for word in log.sample.split()] == ["w", "w", "w"]
    other = write_tokenizer(tmp_path / "other", "1" * 64)
    with pytest.raises(AssertionError, match="was prepared with none, hash 0000"):
        run_here(config, data, tmp_path / "refused", "--tokenizer", str(other))
    without = config.model_copy(update={"sample_tokens": 0})  # which does not look at it
    assert run_here(without, data, tmp_path / "refused", "--tokenizer", str(other)).sample is None


def test_adaptive_length_ends_early_and_says_why(data, tmp_path):
    measurement = {"profile": "none", "adaptive": True, "min_steps": 20, "tolerance": 0.3, "warmup_steps": 2}
    log = run_here(tiny_config(max_iters=400, measurement=measurement), data, tmp_path)
    assert log.status == "ok"
    assert 22 < len(log.steps) < 400
    assert "the median step time" in log.stopped_early
    assert len(log.measured_steps()) >= 20


def test_telemetry_is_of_the_steps_that_count_alone(monkeypatch, data, tmp_path):
    """Not of the warm-up that adaptive length finds among the steps that were measured."""
    take_step, taken = TrainStep.__call__, iter(range(1000))

    def slow_at_first(self, inputs, labels):
        time.sleep(0.1 if next(taken) < 8 else 0.0)
        return take_step(self, inputs, labels)

    monkeypatch.setattr(TrainStep, "__call__", slow_at_first)
    measurement = {"profile": "none", "adaptive": True, "min_steps": 20, "tolerance": 0.9, "warmup_steps": 0}
    log = run_here(tiny_config(max_iters=400, measurement=measurement), data, tmp_path)
    assert log.stopped_early is not None and {step.phase for step in log.steps[1:7]} == {"warmup"}
    assert log.telemetry["steps"] == len(log.measured_steps())


@pytest.mark.slow
def test_adaptive_length_is_the_same_on_all_ranks(data, tmp_path):
    measurement = {"profile": "none", "adaptive": True, "min_steps": 20, "tolerance": 0.5}
    config = tiny_config(max_iters=300, world_size=2, micro_batch_size=4, measurement=measurement)
    log = run_many({"run": config}, data, tmp_path)["run"]
    assert len(log.steps) < 300
    assert [len(times) for times in log.rank_step_times_s] == [len(log.steps)] * 2


def test_warmup_is_found_in_the_times():
    generator = np.random.default_rng(0)
    times = 1.0 + 0.01 * generator.standard_normal(100)
    assert warmup_length(times) < 10
    times[:12] += np.linspace(1.0, 0.1, 12)
    assert 11 <= warmup_length(times) <= 20
    assert warmup_length(np.array([1.0, 2.0])) == 0


def test_interval_holds_the_median_and_widens_with_autocorrelation():
    generator = np.random.default_rng(1)
    noise = generator.standard_normal(400)
    independent = 1 + 0.01 * noise
    slow = 1 + 0.01 * np.convolve(noise, np.ones(10) / np.sqrt(10), mode="same")
    low, high = bootstrap_interval(independent)
    assert low < np.median(independent) < high
    assert high - low < 0.006
    slow_low, slow_high = bootstrap_interval(slow)
    assert slow_high - slow_low > 1.5 * (high - low)


def test_enough_waits_for_steps_and_for_precision():
    steady = [1.0 + 0.001 * math.sin(i) for i in range(60)]
    assert enough(steady[:10], min_steps=20, tolerance=0.01) is None
    warmup, sentence = enough(steady, min_steps=20, tolerance=0.01)
    assert 0 <= warmup <= 30 and "asked for +-1.00%" in sentence
    noisy = (1.0 + 0.3 * np.random.default_rng(2).standard_normal(60)).tolist()
    assert enough(noisy, min_steps=20, tolerance=0.001) is None

"""Each known fault, planted alone in a good run log, is found, and nothing else is."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
from factories import ATTENTION_KERNELS, make_model, make_run_log, with_threads

from mfubench.audit import audit_run, audit_study
from mfubench.audit.run import judge_run
from mfubench.audit.run_numbers import own_steps
from mfubench.config import CheckpointConfig, EvaluationConfig, KernelsConfig, MeasurementConfig
from mfubench.run_log import Choice, GradientStatistics, Phase, Resume, RunLog, Step

Plant = Callable[[], RunLog]


def with_steps(log: RunLog, steps: list[Step]) -> RunLog:
    """A copy with other steps; rank 0's own times are theirs."""
    times_s = [[step.step_time_s for step in steps], *log.rank_step_times_s[1:]]
    return log.model_copy(update={"steps": steps, "rank_step_times_s": times_s})


def change_steps(log: RunLog, **changes: Callable) -> RunLog:
    """A copy whose steps have fields replaced by a function of the step."""
    return with_steps(
        log, [step.model_copy(update={key: change(step) for key, change in changes.items()}) for step in log.steps]
    )


def change_step(log: RunLog, position: int, **values: object) -> RunLog:
    steps = list(log.steps)
    steps[position] = steps[position].model_copy(update=values)
    return with_steps(log, steps)


def change_wall(log: RunLog, **changes: Any) -> RunLog:
    """A copy with another clock of the whole; the process lasts as much longer as its training does."""
    assert log.wall is not None
    longer_s = changes.get("training_s", log.wall.training_s) - log.wall.training_s
    changes.setdefault("total_s", log.wall.total_s + longer_s)
    return log.model_copy(update={"wall": log.wall.model_copy(update=changes)})


def use(log: RunLog, key: str, **changes: str | None) -> RunLog:
    used = {**log.used, key: log.used[key].model_copy(update=changes)}
    return log.model_copy(update={"used": used})


def four_gpus(**overrides: object) -> RunLog:
    return make_run_log(world_size=4, gradient_accumulation_steps=8, **overrides)


# --- tokens -----------------------------------------------------------------------------------------------------------


def tokens_of_one_rank() -> RunLog:
    log = four_gpus()
    log = change_steps(log, tokens=lambda step: step.tokens // 4)
    return change_wall(log, training_tokens=log.wall.training_tokens // 4)


def tokens_without_accumulation() -> RunLog:
    log = four_gpus()
    log = change_steps(log, tokens=lambda step: step.tokens // 8)
    return change_wall(log, training_tokens=log.wall.training_tokens // 8)


def tokens_of_one_micro_step_of_one_rank() -> RunLog:
    log = four_gpus()
    log = change_steps(log, tokens=lambda step: step.tokens // 32)
    return change_wall(log, training_tokens=log.wall.training_tokens // 32)


def tokens_over_all_ranks_times_ranks() -> RunLog:
    log = change_steps(four_gpus(step_time_s=8.0), tokens=lambda step: step.tokens * 4)
    return change_wall(log, training_tokens=log.wall.training_tokens * 4)


def accumulation_divided_by_the_ranks_once_more() -> RunLog:
    log = make_run_log(world_size=4, gradient_accumulation_steps=64)
    log = change_steps(log, tokens=lambda step: step.tokens // 8)
    return change_wall(log, training_tokens=log.wall.training_tokens // 8)


def tokens_of_a_resumed_run_from_its_first_process() -> RunLog:
    log = make_run_log(first_step=10)
    return change_wall(log, training_tokens=log.wall.training_tokens + 10 * log.config.tokens_per_step)


def first_step_after_resume_holds_all_before() -> RunLog:
    log = make_run_log(first_step=10)
    return change_step(log, 0, tokens=11 * log.config.tokens_per_step)


def steps_replayed_by_a_resume() -> RunLog:
    before, after = make_run_log(step_count=15), make_run_log(first_step=10)
    steps = [*before.steps, *after.steps]
    return after.model_copy(update={"steps": steps, "rank_step_times_s": [[step.step_time_s for step in steps]]})


def tokens_that_no_step_accounts_for() -> RunLog:
    log = make_run_log()
    return change_wall(log, training_tokens=2 * log.wall.training_tokens)


def one_iteration_too_many() -> RunLog:
    return make_run_log(step_count=31)


def wall_of_fewer_tokens() -> RunLog:
    log = make_run_log()
    return change_wall(log, training_tokens=log.wall.training_tokens // 2)


def wall_of_fewer_tokens_after_a_resume() -> RunLog:
    log = make_run_log(first_step=10)
    return change_wall(log, training_tokens=log.wall.training_tokens - log.config.tokens_per_step)


# --- steps that were picked -------------------------------------------------------------------------------------------


def keep_steps(log: RunLog, keep: Callable[[Step], bool]) -> RunLog:
    """A copy with some of the steps, and the other records lowered to match."""
    kept = [position for position, step in enumerate(log.steps) if keep(step)]
    left_out = [step for step in own_steps(log) if not keep(step)]
    times_s = [[times[position] for position in kept] for times in log.rank_step_times_s]
    log = log.model_copy(update={"steps": [log.steps[position] for position in kept], "rank_step_times_s": times_s})
    tokens = log.wall.training_tokens - sum(step.tokens for step in left_out)
    training_s = log.wall.training_s - sum(step.step_time_s for step in left_out)
    return change_wall(log, training_tokens=tokens, training_s=training_s)


def slower_half(log: RunLog) -> set[int]:
    """Numbers of the slower ones of the measured steps."""
    measured = sorted(log.measured_steps(), key=lambda step: step.step_time_s)
    return {step.step for step in measured[len(measured) // 2 :]}


def call_slower_half(phase: str, log: RunLog) -> RunLog:
    slow = slower_half(log)
    return change_steps(log, phase=lambda step: phase if step.step in slow else step.phase)


def steps_cut_from_the_middle() -> RunLog:
    return keep_steps(make_run_log(), lambda step: not 10 <= step.step < 14)


def slower_half_cut_out() -> RunLog:
    log = make_run_log()
    slow = slower_half(log)
    return keep_steps(log, lambda step: step.step not in slow)


def beginning_cut_off() -> RunLog:
    return keep_steps(make_run_log(), lambda step: step.step >= 5)


def end_cut_off() -> RunLog:
    return keep_steps(make_run_log(), lambda step: step.step < 20)


def steps_cut_out_before_a_resume() -> RunLog:
    return keep_steps(make_resumed_log(15), lambda step: not 6 <= step.step < 9)


def make_resumed_log(*resumed_at: int, **overrides: Any) -> RunLog:
    """A run of several processes, each of which compiles and warms up; the last one's wall."""
    log = make_run_log(**overrides)
    parts = [make_run_log(first_step=start, **overrides) for start in (0, *resumed_at)]
    ends = (*resumed_at, log.config.max_iters)
    steps = [step for part, end in zip(parts, ends, strict=True) for step in part.steps if step.step < end]
    resumes = [Resume(step=step, at="2026-03-02T08:59:50+00:00") for step in resumed_at]
    return with_steps(parts[-1], steps).model_copy(update={"resumes": resumes})


def slow_steps_of_an_earlier_process_called_warm_up() -> RunLog:
    log = make_resumed_log(15)
    return change_steps(log, phase=lambda step: "warmup" if step.step in (7, 11) else step.phase)


def slow_steps_after_a_resume_called_warm_up() -> RunLog:
    log = make_resumed_log(15)
    return change_steps(log, phase=lambda step: "warmup" if 15 <= step.step < 25 else step.phase)


def warm_up_after_a_resume_called_measured() -> RunLog:
    log = make_resumed_log(15)
    return change_steps(log, phase=lambda step: "measured" if step.step in (16, 17) else step.phase)


ADAPTIVE = MeasurementConfig(warmup_steps=1, adaptive=True, min_steps=6)


def make_adaptive_log(slow_steps: int = 4) -> RunLog:
    """A run that found `slow_steps` more of warm-up by itself and stopped before its 200 steps."""
    log = make_run_log(max_iters=200, step_count=30, measurement=ADAPTIVE)
    found = range(2, 2 + slow_steps)
    log = change_steps(
        log,
        step_time_s=lambda step: step.step_time_s * (1.1 if step.step in found else 1),
        phase=lambda step: "warmup" if step.step in found else step.phase,
    )
    training_s = log.wall.training_s + 0.1 * sum(log.steps[step].step_time_s for step in found)
    return change_wall(say_stopped(log), training_s=training_s)


def say_stopped(log: RunLog) -> RunLog:
    times_s = [step.step_time_s for step in log.measured_steps()]
    said = (
        f"after {len(times_s)} measured steps the median step time {statistics.median(times_s):.6f} s is known to "
        "+-0.10% (95 %, block bootstrap; asked for +-0.50%)"
    )
    return log.model_copy(update={"stopped_early": said})


def adaptive_run_with_more_called_warm_up() -> RunLog:
    """The sentence about the end is made to fit: the times themselves show no such warm-up."""
    log = make_adaptive_log()
    return say_stopped(change_steps(log, phase=lambda step: "warmup" if step.step in range(6, 12) else step.phase))


def adaptive_run_with_slow_steps_called_warm_up() -> RunLog:
    log = make_adaptive_log()
    return say_stopped(change_steps(log, phase=lambda step: "warmup" if step.step in (15, 20) else step.phase))


def adaptive_run_that_was_cut_off() -> RunLog:
    return keep_steps(make_adaptive_log(), lambda step: step.step < 20)


def fixed_length_that_stopped_by_itself() -> RunLog:
    return say_stopped(keep_steps(make_run_log(), lambda step: step.step < 20))


# --- time -------------------------------------------------------------------------------------------------------------


def clock_read_before_the_device_finished() -> RunLog:
    return make_run_log(step_time_s=0.02)


def clock_too_fast_but_possible() -> RunLog:
    log = make_run_log()
    slow_s = sum(step.step_time_s for step in log.steps if step.phase != "compile")
    log = change_steps(log, step_time_s=lambda step: step.step_time_s * (0.75 if step.phase != "compile" else 1))
    return change_wall(log, training_s=log.wall.training_s + 2 * slow_s)  # the steps that were not waited for


def clock_too_fast_after_a_resume() -> RunLog:
    """As above; the evaluations of the process before take as long as what the clock misses, and explain none of it."""
    log = make_run_log(first_step=10)
    hidden_s = 2 * sum(step.step_time_s for step in log.steps)
    log = change_wall(log, training_s=log.wall.training_s + hidden_s)
    earlier = [Phase(kind="setup", after_step=0, time_s=9.4), Phase(kind="evaluation", after_step=5, time_s=hidden_s)]
    return log.model_copy(update={"phases": earlier + log.phases})


def evaluation_inside_a_step() -> RunLog:
    log = make_run_log(evaluation=EvaluationConfig(interval=15))
    evaluated = log.evaluations[0].step
    log = log.model_copy(update={"phases": [phase for phase in log.phases if phase.kind != "evaluation"]})
    return change_step(log, evaluated, step_time_s=log.steps[evaluated].step_time_s + 2.6)


def evaluation_in_the_step_and_beside_it() -> RunLog:
    log = make_run_log()
    return change_step(log, 15, step_time_s=log.steps[15].step_time_s + 2.6)


def checkpoint_inside_steps() -> RunLog:
    log = make_run_log(checkpoint=CheckpointConfig(interval=10))
    for step in (10, 20):
        log = change_step(log, step, step_time_s=log.steps[step].step_time_s + 6.0)
    return change_wall(log, training_s=log.wall.training_s + 12.0)


def recompilation_while_measuring() -> RunLog:
    log = change_step(make_run_log(), 12, step_time_s=33.0)
    return change_wall(log, training_s=log.wall.training_s + 32.1)


def allocator_that_emptied_its_cache() -> RunLog:
    log = make_run_log()
    return log.model_copy(update={"memory": [log.memory[0].model_copy(update={"allocator_retries": 7})]})


def compilation_among_the_measured_steps() -> RunLog:
    return change_steps(make_run_log(), phase=lambda step: "measured")


def rank_0_did_not_wait() -> RunLog:
    log = four_gpus()
    times = [list(times) for times in log.rank_step_times_s]
    times[2] = [1.4 * time for time in times[2]]
    return log.model_copy(update={"rank_step_times_s": times})


def steps_faster_than_rank_0() -> RunLog:
    log = make_run_log()
    steps = [step.model_copy(update={"step_time_s": 0.88 * step.step_time_s}) for step in log.steps]
    return log.model_copy(update={"steps": steps})


def one_step_faster_than_rank_0() -> RunLog:
    log = four_gpus()
    steps = [*log.steps[:-1], log.steps[-1].model_copy(update={"step_time_s": 0.99 * log.steps[-1].step_time_s})]
    return log.model_copy(update={"steps": steps})


def waiting_for_data_longer_than_the_steps() -> RunLog:
    return change_steps(make_run_log(), data_time_s=lambda step: 1.2 * step.step_time_s)


def one_cpu_step_that_waited_longer_than_it_took() -> RunLog:
    log = make_run_log(device="cpu")
    return change_step(log, 12, data_time_s=1.1 * log.steps[12].step_time_s)


def one_step_that_waited_longer_than_ten_took() -> RunLog:
    log = make_run_log()
    return change_step(log, 12, data_time_s=11 * log.steps[12].step_time_s)


def process_shorter_than_its_training() -> RunLog:
    log = make_run_log()
    return change_wall(log, total_s=0.5 * log.wall.training_s)


# --- FLOPs and parameters ---------------------------------------------------------------------------------------------


def wrong_parameters(**terms: int) -> RunLog:
    log = make_run_log()
    return log.model_copy(update={"flop_terms": log.flop_terms.model_copy(update=terms)})


def grouped_heads_counted_as_full_ones() -> RunLog:
    log = make_run_log(model=make_model("llama3-1.5b"))
    full = make_model("llama3-1.5b", num_key_value_heads=16)
    return log.model_copy(update={"parameters": make_run_log(model=full).parameters})


def tied_embedding_counted_twice() -> RunLog:
    log = make_run_log(model=make_model("gpt2-1.36b"))
    twice = log.parameters.model_copy(update={"total": log.parameters.total + 50257 * 2304})
    return log.model_copy(update={"parameters": twice})


def tied_embedding_not_counted() -> RunLog:
    log = make_run_log(model=make_model("gpt2-1.36b"))
    less = log.parameters.total - 50257 * 2304
    return log.model_copy(update={"parameters": log.parameters.model_copy(update={"total": less})})


def dimensions_of_another_model() -> RunLog:
    log = make_run_log()
    other = make_run_log(model=make_model("llama3-1.5b"))
    return log.model_copy(update={"parameters": other.parameters})


def attention_width_taken_from_hidden_size() -> RunLog:
    log = make_run_log(model=make_model("qwen3-1.8b", head_dim=256))
    return log.model_copy(update={"flop_terms": log.flop_terms.model_copy(update={"attention_width": 2048})})


# --- what ran ---------------------------------------------------------------------------------------------------------


def show_kernels(log: RunLog, kernels: list[str]) -> RunLog:
    return log.model_copy(update={"kernels": log.kernels.model_copy(update={"attention": kernels})})


def cached_graph_of_another_kernel() -> RunLog:
    return show_kernels(make_run_log(attention="eager"), ATTENTION_KERNELS["sdpa"])


def flash_2_called_flash_3() -> RunLog:
    log = make_run_log(attention="fa2")
    return log.model_copy(
        update={
            "config": log.config.model_copy(update={"attention": "fa3"}),
            "used": {**log.used, "attention": Choice(requested="fa3", used="fa3")},
        }
    )


def fallback_without_a_reason() -> RunLog:
    return use(make_run_log(cuda_graphs=True), "cuda_graphs", used="false")


def attention_flag_ignored() -> RunLog:
    log = make_run_log(attention="sdpa")
    log = use(log, "attention", requested="cudnn", used="cudnn")
    return show_kernels(log, ATTENTION_KERNELS["cudnn"])


def flash_attention_in_float32() -> RunLog:
    log = make_run_log(dtype="float32", attention="fa2", kernels=None)
    return log


def times_of_one_rank_kept() -> RunLog:
    log = four_gpus()
    return log.model_copy(update={"rank_step_times_s": log.rank_step_times_s[:1]})


def script_started_once_a_gpu() -> RunLog:
    log = make_run_log()
    gpus = make_run_log(world_size=4).environment.gpus
    return log.model_copy(update={"environment": log.environment.model_copy(update={"gpus": gpus})})


def ranks_on_one_card() -> RunLog:
    log = four_gpus()
    gpus = [log.environment.gpus[0]] * 4
    return log.model_copy(update={"environment": log.environment.model_copy(update={"gpus": gpus})})


def more_memory_than_the_card_has() -> RunLog:
    log = four_gpus()
    memory = [*log.memory[:2], log.memory[2].model_copy(update={"peak_reserved_gib": 95.0}), log.memory[3]]
    return log.model_copy(update={"memory": memory})


def renamed_run() -> RunLog:
    return make_run_log().model_copy(update={"name": "baseline/another"})


def kernels_other_than_asked_for() -> RunLog:
    log = make_run_log(kernels=None)
    config = log.config.model_copy(update={"kernels": log.config.kernels.model_copy(update={"norm": "fused"})})
    used = {**log.used, "norm": Choice(requested="plain", used="plain")}
    return log.model_copy(update={"config": config, "used": used})


def graphs_other_than_asked_for() -> RunLog:
    return use(make_run_log(cuda_graphs=True), "cuda_graphs", requested="false", used="false")


def unknown_card() -> RunLog:
    return make_run_log(gpu_name="NVIDIA X900 Unheard Edition")


# --- training itself --------------------------------------------------------------------------------------------------


def learning_rate_frozen_by_a_graph() -> RunLog:
    return change_steps(make_run_log(cuda_graphs=True), learning_rate=lambda step: 1.5e-7)


def gradients_read_after_clearing() -> RunLog:
    log = make_run_log(measurement=MeasurementConfig(gradient_interval=10))
    empty = [
        GradientStatistics(step=step, layers={"layer.0": {"mean": 0.0, "max": None, "std": None}}) for step in (10, 20)
    ]
    return log.model_copy(update={"gradient_statistics": empty})


def gradient_norm_always_absent() -> RunLog:
    return change_steps(make_run_log(), grad_norm=lambda step: None)


def gradients_of_one_replayed_graph() -> RunLog:
    return change_steps(make_run_log(cuda_graphs=True), grad_norm=lambda step: 1.375)


def loss_lost_and_called_ok() -> RunLog:
    return change_steps(make_run_log(), loss=lambda step: None if step.step > 20 else step.loss)


def loss_written_as_nan() -> RunLog:
    return change_steps(make_run_log(), loss=lambda step: float("nan") if step.step > 20 else step.loss)


def negative_loss() -> RunLog:
    return change_step(make_run_log(), 20, loss=-1.5)


def one_loss_in_every_step() -> RunLog:
    return change_steps(make_run_log(), loss=lambda step: 7.25)


def negative_loss_of_an_evaluation() -> RunLog:
    log = make_run_log()
    return log.model_copy(update={"evaluations": [log.evaluations[0].model_copy(update={"loss": -0.5})]})


def change_dataset(log: RunLog, **changes: object) -> RunLog:
    return log.model_copy(update={"dataset": log.dataset.model_copy(update=changes)})


def large_ids_written_as_uint16() -> RunLog:
    return change_dataset(make_run_log(model=make_model("qwen3-1.8b")), token_dtype="uint16")


def embedding_without_rows_for_all_ids() -> RunLog:
    log = make_run_log(model=make_model("qwen3-1.8b", vocab_size=151_643))
    return change_dataset(log, vocab_size=151_669)


FAULTS: list[tuple[Plant, set[str]]] = [
    (tokens_of_one_rank, {"tokens_per_s_is_one_rank"}),
    (tokens_without_accumulation, {"tokens_per_s_excludes_accumulation"}),
    (tokens_of_one_micro_step_of_one_rank, {"tokens_per_s_is_one_rank", "tokens_per_s_excludes_accumulation"}),
    (tokens_over_all_ranks_times_ranks, {"ranks_counted_twice"}),
    (accumulation_divided_by_the_ranks_once_more, {"accumulation_differs_from_banner"}),
    (tokens_of_a_resumed_run_from_its_first_process, {"resumed_tokens_counted"}),
    (first_step_after_resume_holds_all_before, {"resumed_tokens_counted"}),
    (steps_replayed_by_a_resume, {"resumed_tokens_counted"}),
    (tokens_that_no_step_accounts_for, {"steps_miscounted"}),
    (one_iteration_too_many, {"steps_miscounted"}),
    (wall_of_fewer_tokens, {"steps_miscounted"}),
    (wall_of_fewer_tokens_after_a_resume, {"steps_miscounted"}),
    (lambda: call_slower_half("warmup", make_run_log()), {"steps_miscounted"}),
    (lambda: call_slower_half("compile", make_run_log()), {"steps_miscounted"}),
    (steps_cut_from_the_middle, {"steps_miscounted"}),
    (slower_half_cut_out, {"steps_miscounted"}),
    (beginning_cut_off, {"steps_miscounted"}),
    (end_cut_off, {"steps_miscounted"}),
    (steps_cut_out_before_a_resume, {"steps_miscounted"}),
    (slow_steps_of_an_earlier_process_called_warm_up, {"steps_miscounted"}),
    (slow_steps_after_a_resume_called_warm_up, {"steps_miscounted"}),
    (warm_up_after_a_resume_called_measured, {"warm_up_included"}),
    (adaptive_run_with_more_called_warm_up, {"steps_miscounted"}),
    (adaptive_run_with_slow_steps_called_warm_up, {"steps_miscounted"}),
    (adaptive_run_that_was_cut_off, {"steps_miscounted"}),
    (fixed_length_that_stopped_by_itself, {"steps_miscounted"}),
    (steps_faster_than_rank_0, {"times_contradict"}),
    (one_step_faster_than_rank_0, {"times_contradict"}),
    (waiting_for_data_longer_than_the_steps, {"times_contradict"}),
    (one_cpu_step_that_waited_longer_than_it_took, {"times_contradict"}),
    (one_step_that_waited_longer_than_ten_took, {"times_contradict"}),
    (process_shorter_than_its_training, {"times_contradict"}),
    (clock_read_before_the_device_finished, {"above_ceiling"}),
    (clock_too_fast_but_possible, {"time_contains_other_work"}),
    (clock_too_fast_after_a_resume, {"time_contains_other_work"}),
    (evaluation_inside_a_step, {"time_contains_other_work"}),
    (evaluation_in_the_step_and_beside_it, {"time_contains_other_work"}),
    (checkpoint_inside_steps, {"time_contains_other_work"}),
    (recompilation_while_measuring, {"time_contains_other_work"}),
    (allocator_that_emptied_its_cache, {"time_contains_other_work"}),
    (compilation_among_the_measured_steps, {"warm_up_included"}),
    (rank_0_did_not_wait, {"ranks_disagree"}),
    (lambda: wrong_parameters(parameters=1_000_000_000), {"parameters_differ"}),
    (lambda: wrong_parameters(num_hidden_layers=24), {"parameters_differ"}),
    (grouped_heads_counted_as_full_ones, {"parameters_differ"}),
    (tied_embedding_counted_twice, {"parameters_differ"}),
    (tied_embedding_not_counted, {"parameters_differ"}),
    (dimensions_of_another_model, {"parameters_differ"}),
    (attention_width_taken_from_hidden_size, {"parameters_differ"}),
    (cached_graph_of_another_kernel, {"not_what_ran"}),
    (flash_2_called_flash_3, {"not_what_ran"}),
    (fallback_without_a_reason, {"not_what_ran"}),
    (attention_flag_ignored, {"not_what_ran"}),
    (flash_attention_in_float32, {"not_what_ran"}),
    (times_of_one_rank_kept, {"ranks_disagree"}),
    (script_started_once_a_gpu, {"ranks_disagree"}),
    (ranks_on_one_card, {"ranks_disagree"}),
    (more_memory_than_the_card_has, {"memory_beyond_the_card"}),
    (renamed_run, {"not_what_ran"}),
    (kernels_other_than_asked_for, {"not_what_ran"}),
    (graphs_other_than_asked_for, {"not_what_ran"}),
    (unknown_card, {"peak_unknown"}),
    (learning_rate_frozen_by_a_graph, {"schedule_frozen"}),
    (gradients_read_after_clearing, {"gradients_absent"}),
    (gradient_norm_always_absent, {"gradients_absent"}),
    (gradients_of_one_replayed_graph, {"gradients_absent"}),
    (loss_lost_and_called_ok, {"loss_not_finite"}),
    (loss_written_as_nan, {"loss_not_finite"}),
    (negative_loss, {"loss_is_no_loss"}),
    (one_loss_in_every_step, {"loss_is_no_loss"}),
    (negative_loss_of_an_evaluation, {"loss_is_no_loss"}),
    (large_ids_written_as_uint16, {"token_ids_do_not_fit"}),
    (embedding_without_rows_for_all_ids, {"token_ids_do_not_fit"}),
]


@pytest.mark.parametrize(("plant", "expected"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_planted_fault_is_found_and_nothing_else(plant: Plant, expected: set[str]) -> None:
    findings = audit_run(plant())
    assert {finding.code for finding in findings} == expected, [finding.sentence for finding in findings]
    for finding in findings:
        assert 0 < finding.confidence <= 1
        assert len(finding.sentence) > 40, "a finding says what is wrong and why"


def test_true_values_of_a_rank_rate() -> None:
    verdict = judge_run(tokens_of_one_rank(), "test", None)
    good = judge_run(four_gpus(), "test", None)
    assert verdict.true_tokens_per_s == good.true_tokens_per_s
    assert verdict.true_mfu_palm == good.true_mfu_palm
    assert verdict.micro_steps_per_gpu == 8
    assert verdict.impossible and not good.impossible


def test_true_micro_steps_of_a_wrong_claim() -> None:
    verdict = judge_run(accumulation_divided_by_the_ranks_once_more(), "test", None)
    assert verdict.micro_steps_per_gpu == 8
    assert verdict.findings[0].true_value == 8


# --- faults that several runs show ------------------------------------------------------------------------------------


def codes_of_study(*logs: RunLog) -> dict[str, set[str]]:
    return {name: {finding.code for finding in findings} for name, findings in audit_study(logs).items()}


def test_arms_with_the_same_kernels_are_no_contrast() -> None:
    """Two attention settings, one cached graph: each record says its own setting, the kernels say otherwise."""
    a = make_run_log(name="ablations/attention-cudnn", attention="cudnn")
    b = show_kernels(make_run_log(name="ablations/attention-sdpa", attention="sdpa"), ATTENTION_KERNELS["cudnn"])
    assert codes_of_study(a, b) == {a.name: {"no_contrast"}, b.name: {"no_contrast"}}


def test_arms_that_fell_back_to_the_same_are_no_contrast() -> None:
    a = make_run_log(name="ablations/attention-sdpa", attention="sdpa")
    b = make_run_log(name="ablations/attention-fa2", attention="fa2")
    b = use(b, "attention", used="sdpa", reason="flash-attn is not installed")
    b = show_kernels(b, ATTENTION_KERNELS["sdpa"])
    assert codes_of_study(a, b) == {a.name: {"no_contrast"}, b.name: {"no_contrast"}}


def test_kernels_that_fell_back_to_the_same_are_no_contrast() -> None:
    arms = []
    for norm in ("fused", "plain"):
        log = make_run_log(name=f"ablations/norm-{norm}")
        config = log.config.model_copy(update={"kernels": KernelsConfig(norm=norm)})
        choice = Choice(requested=norm, used="plain", reason="no triton" if norm == "fused" else None)
        arms.append(log.model_copy(update={"config": config, "used": log.used | {"norm": choice}}))
    assert codes_of_study(*arms) == {log.name: {"no_contrast"} for log in arms}
    (finding, *_) = audit_study(arms)["ablations/norm-fused"]
    assert "kernels.norm fused and plain, and both ran plain" in finding.sentence


def test_arms_that_differ_in_what_no_choice_records_are_a_contrast() -> None:
    """Workers of a loader; a mode of the compiler beside an attention that fell back."""
    few, many = (
        make_run_log(name=f"tiers/{workers}", loader={"kind": "dataloader", "num_workers": workers})
        for workers in (2, 8)
    )
    assert codes_of_study(few, many) == {}
    default = make_run_log(name="tiers/default", compile="block", attention="sdpa")
    tuned = make_run_log(
        name="tiers/tuned", compile="block", attention="fa2", compile_mode="max-autotune-no-cudagraphs"
    )
    tuned = use(tuned, "attention", used="sdpa", reason="flash-attn is not installed")
    assert codes_of_study(default, show_kernels(tuned, ATTENTION_KERNELS["sdpa"])) == {}


def test_arms_with_other_data_or_machines_differ_in_work() -> None:
    a = make_run_log(name="ablations/compile-none", compile="none")
    b = make_run_log(name="ablations/compile-model", compile="model")
    assert codes_of_study(a, b) == {}
    repeated_words = change_dataset(b, name="one-word", train_tokens=1_000_000)
    assert codes_of_study(a, repeated_words) == {a.name: {"workloads_differ"}, b.name: {"workloads_differ"}}
    other_card = make_run_log(name=b.name, compile="model", gpu_name="NVIDIA H200")
    assert codes_of_study(a, other_card) == {a.name: {"workloads_differ"}, b.name: {"workloads_differ"}}
    gpus = [gpu.model_copy(update={"power_limit_w": 500.0}) for gpu in b.environment.gpus]
    capped = b.model_copy(update={"environment": b.environment.model_copy(update={"gpus": gpus})})
    assert codes_of_study(a, capped) == {a.name: {"workloads_differ"}, b.name: {"workloads_differ"}}


def test_arms_with_other_threads_on_a_cpu_differ_in_work() -> None:
    logs = [with_threads(make_run_log(name=f"ablations/{threads}", device="cpu"), threads) for threads in (2, 3)]
    assert codes_of_study(*logs) == {log.name: {"workloads_differ"} for log in logs}


def test_repeats_and_grids_are_no_fault() -> None:
    a = make_run_log(name="ablations/compile-none", compile="none")
    repeat = make_run_log(name="ablations/compile-none-repeat2", compile="none", repeat=2)
    other_batch = make_run_log(name="ablations/micro-batch-4", micro_batch_size=4, attention="sdpa")
    assert codes_of_study(a, repeat, other_batch) == {}


def test_a_late_phase_is_no_fault() -> None:
    """What is recorded apart from the steps may be as long as it likes."""
    log = make_run_log()
    phases = [*log.phases, Phase(kind="checkpoint", after_step=20, time_s=300.0)]
    assert audit_run(change_wall(log.model_copy(update={"phases": phases}), training_s=log.wall.training_s + 300)) == []


def test_a_resume_is_no_fault() -> None:
    log = make_run_log(first_step=10, resumes=[Resume(step=10, at="2026-03-02T08:59:50+00:00")])
    assert audit_run(log) == []


@pytest.mark.parametrize("resumed_at", [(15,), (10, 20), (10, 10), (10, 30)])
def test_each_process_compiles_and_warms_up(resumed_at: tuple[int, ...]) -> None:
    assert audit_run(make_resumed_log(*resumed_at)) == []


def test_what_was_computed_in_another_way_is_warm_up() -> None:
    """A resume with other settings makes warm-up of all measured steps before it."""
    log = make_resumed_log(10, 20)
    for changed_at in (10, 20):
        assert audit_run(change_steps(log, phase=before_counts_as_warm_up(changed_at))) == []


def before_counts_as_warm_up(start: int) -> Callable[[Step], str]:
    return lambda step: "warmup" if step.step < start and step.phase == "measured" else step.phase


def test_an_earlier_process_may_have_had_another_warm_up() -> None:
    log = make_resumed_log(15)
    assert audit_run(change_steps(log, phase=lambda step: "warmup" if step.step < 9 else step.phase)) == []


@pytest.mark.parametrize("slow_steps", [0, 1, 4, 8])
def test_warm_up_that_was_found_is_no_fault(slow_steps: int) -> None:
    assert audit_run(make_adaptive_log(slow_steps)) == []


def test_late_compilation_is_no_fault() -> None:
    """One that hides behind work the device had still to do, and three that show."""
    log = make_run_log()
    assert audit_run(change_step(log, 12, phase="compile")) == []
    slow = {12, 17, 22}
    shown = change_steps(
        log,
        phase=lambda step: "compile" if step.step in slow else step.phase,
        step_time_s=lambda step: step.step_time_s + (4.0 if step.step in slow else 0.0),
    )
    assert audit_run(change_wall(shown, training_s=log.wall.training_s + 12.0)) == []


def test_a_host_that_waits_for_data_while_the_device_has_work_is_no_fault() -> None:
    log = make_run_log()
    assert audit_run(change_step(log, 12, data_time_s=3 * log.steps[12].step_time_s)) == []


def test_a_run_that_overfits_may_repeat_no_loss_only() -> None:
    """A loss that is the same twice is no constant."""
    log = make_run_log()
    assert audit_run(change_steps(log, loss=lambda step: 0.25 if step.step > 0 else 10.0)) == []

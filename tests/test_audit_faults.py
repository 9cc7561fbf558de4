"""Each known fault, planted alone in a good run log, is found, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from factories import ATTENTION_KERNELS, make_model, make_run_log

from mfubench.audit import audit_run, audit_study
from mfubench.audit.run import judge_run
from mfubench.config import CheckpointConfig, EvaluationConfig, MeasurementConfig
from mfubench.run_log import Choice, GradientStatistics, Phase, Resume, RunLog

Plant = Callable[[], RunLog]


def change_steps(log: RunLog, **changes: Callable) -> RunLog:
    """A copy whose steps have fields replaced by a function of the step."""
    steps = [step.model_copy(update={key: change(step) for key, change in changes.items()}) for step in log.steps]
    return log.model_copy(update={"steps": steps})


def change_step(log: RunLog, position: int, **values: object) -> RunLog:
    steps = list(log.steps)
    steps[position] = steps[position].model_copy(update=values)
    return log.model_copy(update={"steps": steps})


def change_wall(log: RunLog, **changes: object) -> RunLog:
    assert log.wall is not None
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


# --- time -------------------------------------------------------------------------------------------------------------


def clock_read_before_the_device_finished() -> RunLog:
    return make_run_log(step_time_s=0.02)


def clock_too_fast_but_possible() -> RunLog:
    log = make_run_log()
    slow_s = sum(step.step_time_s for step in log.steps if step.phase != "compile")
    log = change_steps(log, step_time_s=lambda step: step.step_time_s * (0.75 if step.phase != "compile" else 1))
    times = [[step.step_time_s for step in log.steps]]
    log = log.model_copy(update={"rank_step_times_s": times})
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
    (unknown_card, {"peak_unknown"}),
    (learning_rate_frozen_by_a_graph, {"schedule_frozen"}),
    (gradients_read_after_clearing, {"gradients_absent"}),
    (gradient_norm_always_absent, {"gradients_absent"}),
    (gradients_of_one_replayed_graph, {"gradients_absent"}),
    (loss_lost_and_called_ok, {"loss_not_finite"}),
    (loss_written_as_nan, {"loss_not_finite"}),
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


def test_arms_with_other_data_or_machines_differ_in_work() -> None:
    a = make_run_log(name="ablations/compile-none", compile="none")
    b = make_run_log(name="ablations/compile-model", compile="model")
    assert codes_of_study(a, b) == {}
    repeated_words = change_dataset(b, name="one-word", train_tokens=1_000_000)
    assert codes_of_study(a, repeated_words) == {a.name: {"workloads_differ"}, b.name: {"workloads_differ"}}
    other_card = make_run_log(name=b.name, compile="model", gpu_name="NVIDIA H200")
    assert codes_of_study(a, other_card) == {a.name: {"workloads_differ"}, b.name: {"workloads_differ"}}


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

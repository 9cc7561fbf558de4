"""Audit of a run JSON, its facts: what ran against what the record says, ranks, steps, schedule, gradients, tokens."""

from __future__ import annotations

import math
from collections import Counter

from mfubench.audit.findings import Finding
from mfubench.audit.run_numbers import own_steps
from mfubench.host_load import contention_of_run
from mfubench.kernel_families import families_of
from mfubench.run_log import RunLog

NO_FLOAT32 = ("fa2", "fa3", "fa4", "cudnn")
RANK_SPREAD = 1.15  # slowest rank's measured time over rank 0's: all wait for each other in each step
UINT16_IDS = 2**16


def check_status(log: RunLog) -> list[Finding]:
    """What the run says of its end against the steps that it has: only a run that ended well has a rate to show."""
    measured = len(log.measured_steps())
    if log.status == "failed" and measured and log.wall is not None:  # without a wall: the beginning of a resumed run
        sentence = f"the run calls itself failed ({log.reason}), and holds {measured} measured steps and their clock"
        return [Finding("status_contradicts_steps", sentence, 0.95)]
    if log.status != "ok" or measured or log.config.evaluation.only:
        return []
    if not log.steps:
        claimed = f", and {log.wall.training_tokens:,} tokens of training" if log.wall else ""
        sentence = f"the run calls itself ok{claimed}, and holds no step: nothing was trained, or they are gone"
        return [Finding("status_contradicts_steps", sentence, 0.97, "no rate")]
    warmup = log.config.measurement.warmup_steps
    sentence = (
        f"all {len(log.steps)} steps are compilation or warm-up: the run has no rate; max_iters "
        f"{log.config.max_iters} must exceed warmup_steps {warmup} and what compiles"
    )
    return [Finding("nothing_measured", sentence, 0.97)]


def check_machine(log: RunLog) -> list[Finding]:
    """Other processes on the cores that were measured."""
    taken = contention_of_run(log) if log.measured_steps() else None
    return [Finding("machine_was_busy", str(taken), 0.9)] if taken is not None else []


def check_what_ran(log: RunLog) -> list[Finding]:
    """The record of what was used against the configuration, the reasons given, and the kernels that were seen."""
    findings = []
    config, used = log.config, log.used
    asked = {
        "attention": config.attention,
        "compile": config.compile,
        "loader": config.loader.kind,
        "loss": config.loss,
        "parallelism": config.parallelism,
        "dtype": config.dtype,
    }
    for key, wanted in asked.items():
        if key in used and used[key].requested != wanted:
            sentence = f"the configuration asks for {key}: {wanted}, the run took {used[key].requested} as asked for"
            findings.append(Finding("not_what_ran", sentence, 0.97, used[key].used))
    for key, choice in used.items():
        if choice.requested not in ("auto", choice.used) and not choice.reason:
            sentence = f"{key}: {choice.requested} was asked for, {choice.used} ran, and no reason is given"
            findings.append(Finding("not_what_ran", sentence, 0.9, choice.used))
    attention, dtype = used["attention"].used, used["dtype"].used
    if dtype == "float32" and attention in NO_FLOAT32:
        sentence = f"attention {attention} has no float32 kernel, yet is said to have run in float32"
        findings.append(Finding("not_what_ran", sentence, 0.95))
    return findings + check_kernels(log)


def check_kernels(log: RunLog) -> list[Finding]:
    """The attention kernels of the profiled step against the attention that is said to have run."""
    if log.kernels is None or log.environment.device != "cuda":
        return []
    used = log.used["attention"].used
    shown = families_of(log.kernels.attention)
    if not shown or shown == [used]:  # names that nobody knows prove nothing, and plain attention has none
        return []
    sentence = (
        f"attention {used} is said to have run, but the profiled step shows kernels of {' and '.join(shown)} "
        f"({log.kernels.attention[0][:60]} …): a cached graph of another setting, or an ignored flag"
    )
    return [Finding("not_what_ran", sentence, 0.93, " and ".join(shown))]


def check_ranks(log: RunLog) -> list[Finding]:
    """One record from each rank, one card for each, and clocks that agree."""
    world_size = log.config.world_size
    found = {"step times": len(log.rank_step_times_s), "memory peaks": len(log.memory)}
    if log.environment.device == "cuda":
        found["cards"] = len(log.environment.gpus)
    wrong = {what: count for what, count in found.items() if count != world_size}
    if wrong and log.steps:
        listed = ", ".join(f"{what} of {count}" for what, count in wrong.items())
        sentence = f"the run has {world_size} ranks, the log holds {listed}: what the others did is not known"
        return [Finding("ranks_disagree", sentence, 0.95, world_size)]
    uuids = Counter(gpu.uuid for gpu in log.environment.gpus if gpu.uuid)
    shared = [uuid for uuid, count in uuids.items() if count > 1]
    if shared:
        sentence = f"several ranks ran on the card {shared[0]}: they shared its time"
        return [Finding("ranks_disagree", sentence, 0.97)]
    return check_rank_times(log)


def check_rank_times(log: RunLog) -> list[Finding]:
    measured = [position for position, step in enumerate(log.steps) if step.phase == "measured"]
    if not measured:
        return []
    for rank, times in enumerate(log.rank_step_times_s):
        if len(times) != len(log.steps):
            sentence = f"rank {rank} has times of {len(times)} steps, the run {len(log.steps)}: they are not one run's"
            return [Finding("ranks_disagree", sentence, 0.95, len(log.steps))]
    totals = [sum(times[position] for position in measured) for times in log.rank_step_times_s]
    stated = sum(log.steps[position].step_time_s for position in measured)
    if not totals or stated <= 0 or max(totals) <= RANK_SPREAD * stated:
        return []
    slowest = totals.index(max(totals))
    sentence = (
        f"rank {slowest} took {max(totals):.4g} s for the measured steps, the log's clock says {stated:.4g} s: ranks "
        "wait for each other, so the faster clock did not wait for the device"
    )
    return [Finding("ranks_disagree", sentence, 0.85, f"{max(totals) / len(measured):.4g} s a step")]


def check_steps(log: RunLog) -> list[Finding]:
    """As many steps as the configuration says, each once, in order."""
    numbers = [step.step for step in log.steps]
    repeated = [number for number, count in Counter(numbers).items() if count > 1]
    if repeated:
        tokens = log.config.tokens_per_step * len(set(numbers))
        code = "resumed_tokens_counted" if log.resumes else "steps_miscounted"
        sentence = f"step {repeated[0]} and {len(repeated) - 1} others are listed twice: their tokens count twice"
        return [Finding(code, sentence, 0.97, f"{tokens:,} tokens")]
    if numbers != sorted(numbers):
        sentence = "the steps are not in order: records of several processes were mixed"
        return [Finding("steps_miscounted", sentence, 0.95)]
    done = len(own_steps(log)) + (log.resumes[-1].step if log.resumes else 0)
    if done > log.config.max_iters and not log.config.evaluation.only:  # which does no step of those it tells of
        sentence = f"{done} steps were done where max_iters is {log.config.max_iters}: more work than the run claims"
        return [Finding("steps_miscounted", sentence, 0.95, log.config.max_iters)]
    return []


def check_schedule(log: RunLog) -> list[Finding]:
    """A learning rate that stands still while the schedule moves: a captured graph that holds a constant."""
    optimizer = log.config.optimizer
    moving = [step for step in log.steps if step.step < max(optimizer.warmup_iters, optimizer.lr_decay_iters)]
    flat = optimizer.warmup_iters == 0 and optimizer.min_learning_rate == optimizer.learning_rate
    if len(moving) < 5 or flat or len({step.learning_rate for step in moving}) > 1:
        return []
    sentence = (
        f"the learning rate is {moving[0].learning_rate:.3g} in all of {len(moving)} steps, where the schedule changes "
        "it in each: the optimizer was captured with a constant"
    )
    return [Finding("schedule_frozen", sentence, 0.95)]


def check_learning(log: RunLog) -> list[Finding]:
    """Losses are finite, gradients are there."""
    findings = []
    if log.status == "ok":
        lost = [step.step for step in log.steps if step.loss is None or not math.isfinite(step.loss)]
        if lost:
            sentence = (
                f"the run calls itself ok, but the loss of step {lost[0]} and {len(lost) - 1} others is not finite"
            )
            findings.append(Finding("loss_not_finite", sentence, 0.98))
    norms = [step.grad_norm for step in log.steps if step.loss is not None]
    if len(norms) >= 3 and not any(norms):
        sentence = "the gradient norm is zero or absent in every step: it was taken after the gradients were cleared"
        findings.append(Finding("gradients_absent", sentence, 0.93))
    if len(norms) >= 5 and norms[0] and len(set(norms)) == 1:
        sentence = (
            f"the gradient norm is exactly {norms[0]:.6g} in every step: the same gradients were used again and again"
        )
        findings.append(Finding("gradients_absent", sentence, 0.9))
    interval = log.config.measurement.gradient_interval
    values = [
        value for record in log.gradient_statistics for layer in record.layers.values() for value in layer.values()
    ]
    if interval and len(log.steps) > interval and log.status == "ok" and not any(values):
        what = "are all zero or absent" if log.gradient_statistics else "are missing"
        sentence = (
            f"gradient statistics were asked for each {interval} steps and {what}: they were taken after clearing"
        )
        findings.append(Finding("gradients_absent", sentence, 0.93))
    return findings


def check_tokens_fit(log: RunLog) -> list[Finding]:
    """Ids must fit the file's type, and the embedding the ids."""
    dataset = log.dataset
    if dataset is None:
        return []
    findings = []
    if dataset.token_dtype == "uint16" and dataset.vocab_size > UINT16_IDS:
        sentence = (
            f"{dataset.name} has {dataset.vocab_size:,} token ids in uint16, which ends at {UINT16_IDS - 1:,}: larger "
            "ids were cut off, and what was trained on is not the text"
        )
        findings.append(Finding("token_ids_do_not_fit", sentence, 0.97, "uint32"))
    if dataset.vocab_size > log.config.model.vocab_size:
        sentence = (
            f"{dataset.name} has {dataset.vocab_size:,} token ids, the model {log.config.model.vocab_size:,} rows: the "
            "ids above have no row"
        )
        findings.append(Finding("token_ids_do_not_fit", sentence, 0.95, dataset.vocab_size))
    return findings

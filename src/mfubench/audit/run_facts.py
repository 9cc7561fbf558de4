"""Audit of a run JSON, its facts: what ran against what the record says, ranks, memory, schedule, losses, tokens."""

from __future__ import annotations

import math
from collections import Counter

from mfubench.audit.findings import Finding
from mfubench.host_load import contention_of_run
from mfubench.kernel_families import families_of
from mfubench.run_log import RunLog

NO_FLOAT32 = ("fa2", "fa3", "fa4", "cudnn")
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
    if (demoted := log.demoted()) is not None:
        sentence = f"no step counts, so that the run has no rate: {demoted}"
    return [Finding("nothing_measured", sentence, 0.97)]


def check_machine(log: RunLog) -> list[Finding]:
    """Other processes on the cores that were measured."""
    taken = contention_of_run(log) if log.measured_steps() else None
    return [Finding("machine_was_busy", str(taken), 0.9)] if taken is not None else []


def check_what_ran(log: RunLog) -> list[Finding]:
    """The record of what was used against the configuration, the reasons given, and the kernels that were seen."""
    config, used = log.config, log.used
    findings = []
    if log.name != config.name:
        sentence = f"the run is called {log.name} and its configuration {config.name}: the record is of two runs"
        findings.append(Finding("not_what_ran", sentence, 0.95))
    asked = {
        "attention": config.attention,
        "compile": config.compile,
        "loader": config.loader.kind,
        "loss": config.loss,
        "parallelism": config.parallelism,
        "dtype": config.dtype,
        "cuda_graphs": str(config.cuda_graphs).lower(),
        "tf32": str(config.tf32).lower(),
        "fp8": str(config.fp8).lower(),
        **config.kernels.model_dump(),
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
    """One record from each rank, and one card for each."""
    world_size = log.config.world_size
    found = {"step times": len(log.rank_step_times_s), "memory peaks": len(log.memory)}
    if log.environment.device == "cuda":
        found["cards"] = len(log.environment.gpus)
    wrong = {what: count for what, count in found.items() if count != world_size}
    if wrong and log.steps and log.status != "oom":  # whose record is of what one process had written
        listed = ", ".join(f"{what} of {count}" for what, count in wrong.items())
        sentence = f"the run has {world_size} ranks, the log holds {listed}: what the others did is not known"
        return [Finding("ranks_disagree", sentence, 0.95, world_size)]
    uuids = Counter(gpu.uuid for gpu in log.environment.gpus if gpu.uuid)
    shared = [uuid for uuid, count in uuids.items() if count > 1]
    if shared:
        sentence = f"several ranks ran on the card {shared[0]}: they shared its time"
        return [Finding("ranks_disagree", sentence, 0.97)]
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


def check_memory(log: RunLog) -> list[Finding]:
    """What a rank reserved must fit into its card."""
    cards = log.environment.gpus
    for position, memory in enumerate(log.memory if len(log.memory) == len(cards) else ()):
        reserved_gib, card_gib = memory.peak_reserved_gib, cards[position].memory_gib
        if reserved_gib is not None and reserved_gib > card_gib:
            sentence = (
                f"rank {memory.rank} reserved {reserved_gib:.4g} GiB on a card of {card_gib:.4g}: it was another card, "
                "or the peak is not this run's"
            )
            return [Finding("memory_beyond_the_card", sentence, 0.97, f"at most {card_gib:.4g} GiB")]
    return []


def check_learning(log: RunLog) -> list[Finding]:
    """Losses are finite and those of a training, gradients are there."""
    findings = check_losses(log)
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


def check_losses(log: RunLog) -> list[Finding]:
    """Cross-entropy is never negative, and other batches have another loss."""
    losses = [step.loss for step in log.steps if step.loss is not None]
    negative = [step for step in log.steps if step.loss is not None and step.loss < 0]
    negative_evaluations = [one for one in log.evaluations if one.loss is not None and one.loss < 0]
    if negative or negative_evaluations:
        first = (negative or negative_evaluations)[0]
        what = "step" if negative else "evaluation after step"
        sentence = f"the loss of {what} {first.step} is {first.loss:.4g}: a cross-entropy is never negative"
        return [Finding("loss_is_no_loss", sentence, 0.97)]
    if len(losses) >= 5 and len(set(losses)) == 1:
        sentence = (
            f"the loss is exactly {losses[0]:.6g} in each of {len(losses)} steps: a constant was written down, or one "
            "batch was read again and again by a model that does not learn"
        )
        return [Finding("loss_is_no_loss", sentence, 0.9)]
    return []


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

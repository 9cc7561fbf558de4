"""What was measured: effects, scaling, memory, loss, the steps one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mfubench.analysis.contradictions import format_change
from mfubench.analysis.effects import Effect
from mfubench.analysis.expectations import Expectations, expected_change
from mfubench.analysis.expected import judge_effect_size
from mfubench.analysis.figures import effects, ladder, loss, memory, mfu_over_time, scaling
from mfubench.analysis.figures.effects import no_difference_band
from mfubench.analysis.figures.style import per_gpu
from mfubench.analysis.findings import Findings
from mfubench.analysis.measures import FINAL_LOSS, Measures
from mfubench.analysis.report.blocks import Block, Figure, Notice, Section, Table, Text
from mfubench.analysis.report.expectation_sections import MARKS
from mfubench.analysis.scaling import ScalingPoint, words_of_shared_cores
from mfubench.analysis.statistics import BELIEVED_FROM, CARD_SPREAD
from mfubench.analysis.study import MOST_EFFICIENT
from mfubench.analysis.units import (
    NO_DIFFERENCE,
    NOISE_FACTOR,
    NOTHING_TOLD,
    TOO_NOISY,
    format_gib,
    format_interval,
    format_percent,
    format_rate,
    format_seconds,
    format_signed_percent,
    format_told,
    is_noise,
)
from mfubench.run_log import Evaluation, RunLog
from mfubench.words import number_of

WORDS = (
    "Where an interval holds 0, **no difference** is said only if it goes no further than "
    f"{format_percent(NO_DIFFERENCE, 0)} to either side and does not hold what was expected as well; else the two were "
    f"**not told apart**, or, of an interval that leaves a ratio open by more than a factor of {NOISE_FACTOR:.0f}, "
    f"**{TOO_NOISY}**."
)


def effects_section(found: Findings) -> Section:
    spread = found.spread
    known = format_percent(CARD_SPREAD.log_deviation, 2)
    if spread is None:
        basis = (
            "Nothing was repeated in this study, so the intervals hold what the steps of one process say and, at the "
            f"least, how processes of the same work differ on other cards, {known} (**not repeated**): on this machine "
            "they may differ by more. Raise `repeats` in the study to know."
        )
    else:
        band = no_difference_band(spread)
        told_apart = f"that differ by less than {format_percent(band, 2)} may be of one setting"
        if is_noise(1 / (1 + band), 1 + band):
            told_apart = "differ so much that hardly any setting can be told from another"
        basis = (
            f"{spread.processes} processes of {number_of(spread.cases, 'setting')} that ran more than once tell "
            f"how processes differ on this machine: {format_percent(spread.log_deviation, 2)}, the standard deviation "
            f"of the median rate. Two single processes {told_apart}; an interval is never "
            "narrower than the steps themselves allow (block bootstrap)"
        )
        few = spread.degrees_of_freedom < BELIEVED_FROM
        basis += f", nor, with so few repeats, than what is known of other cards ({known})." if few else "."
    blocks: list[Block] = [Text(f"{basis} {WORDS}")]
    alt = "Points with intervals: change of the rate by each setting, beside what was expected of it."
    blocks.append(Figure("effects", alt, effects.draw))
    if found.effects:
        columns = ["setting|", "worth", "95 % interval", "expected|", "memory", "differs in|", "cases|"]
        caption = "Arm over control"
        if found.expectations:
            caption += "; where the testing guide expects a single figure it stands for 3 points to either side"
        left_out = [effect for effect in found.effects if is_of_left_out(effect, found)]
        rows = [effect_row(effect, found.expectations) for effect in found.effects if effect not in left_out]
        if rows:
            blocks.append(Table(columns, rows, caption))
        if left_out:
            names = ", ".join(effect.name for effect in left_out)
            blocks.append(Text(f"Not measured, since a case of theirs was left out on this machine: {names}."))
    alt = "Rates of the baseline and tier cases in order, with the change from each to the next."
    blocks.append(Figure("ladder", alt, ladder.draw))
    return Section("effects", "What each optimisation is worth", blocks)


def is_of_left_out(effect: Effect, found: Findings) -> bool:
    """Whether an effect could not be measured on this machine, before anything ran."""
    return effect.difference is None and not {effect.arm, effect.control}.isdisjoint(found.study.left_out())


def expected_words(effect: Effect, expectations: Expectations | None) -> str:
    """What was expected of an effect, by the study or the testing guide, and whether that came true.

    Of an interval that holds both 0 and what was expected, neither is said.
    """
    change = expected_change(effect.arm, effect.control, expectations)
    words = effect.expected or (format_change(change) if change is not None else "–")
    if change is None or effect.difference is None:
        return words
    judged = judge_effect_size(effect, change)
    if judged == "as expected" and effect.verdict in NOTHING_TOLD:
        return f"{words}: {format_told(effect.verdict)}"
    return f"{words}: {MARKS[judged]}"


def effect_row(effect: Effect, expectations: Expectations | None) -> list[str]:
    expected = expected_words(effect, expectations)
    names = f"`{effect.arm}` over `{effect.control}`"
    if effect.difference is None:
        return [effect.name, f"**{effect.verdict}**", "–", expected, "–", effect.reason or "–", names]
    worth = format_signed_percent(effect.difference.change)
    if effect.verdict in ("no difference", *NOTHING_TOLD):
        worth = f"{format_told(effect.verdict)} ({worth})"
    elif effect.difference.basis == "not repeated":
        worth += " (not repeated)"
    differs_in = ", ".join(f"{key}: {before} → {after}" for key, (before, after) in effect.differs_in.items())
    if not effect.is_clean:
        differs_in += " (more than one thing: the effect has no single cause)"
    interval = format_interval(effect.difference.interval)
    memory_change = "–" if effect.memory_change is None else format_signed_percent(effect.memory_change)
    return [effect.name, worth, interval, expected, memory_change, differs_in, names]


def scaling_section(found: Findings) -> Section:
    blocks: list[Block] = []
    alt = "Efficiency per GPU against the number of GPUs, and the rate over all of them."
    blocks.append(Figure("scaling", alt, scaling.draw))
    if found.scaling:
        columns = [
            "series|",
            "world size",
            per_gpu(found),
            "tokens/s in all",
            "efficiency",
            "95 % interval",
            "runs",
            "case|",
        ]
        rows = [
            [
                point.series,
                str(point.world_size),
                format_rate(point.tokens_per_s_per_gpu),
                format_rate(point.tokens_per_s),
                efficiency_words(point),
                efficiency_interval(point),
                str(point.processes),
                f"`{point.case}`",
            ]
            for point in found.scaling
        ]
        caption = (
            "Weak scaling: the same micro-batch and accumulation for each; against the smallest world size. Rates are "
            "geometric means over all runs of these settings, of whatever stage"
        )
        if any(is_no_scaling(point) for point in found.scaling):
            caption += (
                f". Above {format_percent(MOST_EFFICIENT, 0)} it is no scaling: the runs differ in something else, "
                "such as other work on the machine"
            )
        blocks.append(Table(columns, rows, caption))
        blocks += [
            Notice(f"{', '.join(series)}: {shared}, so that the efficiency is no scaling of hardware.")
            for shared, series in words_of_shared_cores(found.scaling).items()
        ]
    return Section("scaling", "Scaling", blocks)


def is_no_scaling(point: ScalingPoint) -> bool:
    return point.efficiency is not None and point.efficiency > MOST_EFFICIENT


def efficiency_words(point: ScalingPoint) -> str:
    remark = " (same cores)" if point.shares_cores else " (no scaling)" if is_no_scaling(point) else ""
    return f"{format_percent(point.efficiency)}{remark}"


def efficiency_interval(point: ScalingPoint) -> str:
    if point.interval is None:
        return "–"
    if is_noise(point.interval.low, point.interval.high):
        return TOO_NOISY
    return f"{format_percent(point.interval.low)} – {format_percent(point.interval.high)}"


def memory_section(found: Findings) -> Section:
    blocks: list[Block] = [Figure("memory", "Rate against memory, one point a micro-batch size.", memory.draw)]
    on_cpu = per_gpu(found).endswith("process")
    about = "about " if on_cpu else ""
    rows = []
    for name, limit in found.study.limits.items():
        first_oom = min((t.micro_batch_size for t in limit.trials if t.status == "oom"), default=None)
        comfort = f"{100 * limit.search.comfort_fraction:.0f} %"
        rows.append(
            [
                f"`{name}`",
                limit.search.run.parallelism,
                str(limit.search.run.world_size),
                format_gib(limit.memory_gib),
                "nothing fits" if limit.largest is None else f"{about}{limit.largest}",
                "none tried" if first_oom is None else str(first_oom),
                f"{limit.largest_comfortable or 'none of those tried'} (up to {comfort})",
                str(len(limit.trials)),
            ]
        )
    blocks += disturbed_trials(found)
    if rows:
        columns = ["search|", "parallelism|", "world size", "memory", "largest micro-batch", "out of memory at"]
        blocks.append(Table([*columns, "largest comfortable", "trials"], rows, "Each trial is a process of its own"))
    blocks.append(
        Text(
            "Memory is the resident set of the fullest process, against the cap of the run or the machine's share. It "
            "differs from run to run, so that a largest micro-batch is not exact: another search may find one more or "
            "one less."
            if on_cpu
            else "Memory is what was reserved on the fullest GPU; what tensors took at once stands in "
            "`tables/runs.csv` as `peak_allocated_gib`."
        )
    )
    return Section("memory", "Memory", blocks)


def disturbed_trials(found: Findings) -> list[Block]:
    """A warning where other processes held the cores that trials had use for."""
    trials = [(name, trial) for name, limit in found.study.limits.items() for trial in limit.trials]
    disturbed = [(taken, trial, name) for name, trial in trials if (taken := trial.contention) is not None]
    if not disturbed:
        return []
    taken, trial, name = max(disturbed, key=lambda one: one[0].others)
    return [
        Notice(
            f"The machine was busy with something else during {len(disturbed)} of {number_of(len(trials), 'trial')}, "
            f"so that their rates are none of this machine's. The worst, micro-batch {trial.micro_batch_size} of "
            f"`{name}`: {taken}. When nothing else runs here, `{found.study.measure_anew('memory', 'work/memory')}` "
            "searches anew."
        )
    ]


def loss_section(found: Findings) -> Section:
    """Runs of the stage training, those too that only evaluated a checkpoint."""
    rows = [
        loss_row(name, judged)
        for name, judged in found.measures.items()
        if judged.log.config.stage == "training" and (judged.log.steps or judged.log.evaluations)
    ]
    blocks: list[Block] = [Figure("loss", "Loss and gradient norm by optimizer step.", loss.draw)]
    if rows:
        columns = ["run|", "steps", "first loss", "final loss", "held-out loss at the end"]
        blocks.append(Table(columns, rows, f"Nats per token; final loss: {FINAL_LOSS}"))
    return Section("loss", "Loss and gradients", blocks)


def loss_row(name: str, judged: Measures) -> list[str]:
    steps = judged.log.steps
    first = final = "–"
    if steps:
        first = f"{steps[0].loss:.3f}" if steps[0].loss is not None else "not finite"
        final = f"{judged.final_loss:.3f}" if judged.final_loss is not None else "not finite"
    what = f"`{name}`"
    if judged.log.config.continues is not None:
        done = judged.log.resumes[0].step if judged.log.resumes else 0
        doing = "evaluates" if judged.log.config.evaluation.only else "continues"
        what += f" ({doing} `{judged.log.config.continues}` after {done} steps)"
    return [what, str(len(steps)), first, final, held_out_loss(judged.log.evaluations)]


def held_out_loss(evaluations: Sequence[Evaluation]) -> str:
    finite = [entry for entry in evaluations if entry.loss is not None]
    return f"{finite[-1].loss:.3f} ({finite[-1].tokens:,} tokens)" if finite else "–"


def steps_section(found: Findings) -> Section:
    alt = "MFU of each step of up to nine cases, warm-up hatched."
    blocks: list[Block] = [Figure("mfu_over_time", alt, mfu_over_time.draw)]
    rows = []
    for name, judged in found.good.items():
        stability, time = judged.stability, judged.step_time_s
        if stability is None or time is None or judged.log.config.stage == "smoke":
            continue
        rows.append(
            [
                f"`{name}`",
                str(stability.steps),
                format_seconds(time.median),
                format_percent(stability.spread),
                str(stability.outliers),
                format_signed_percent(stability.slowest - 1),
                format_percent(stability.rank_skew, 2) if stability.rank_skew is not None else "–",
                format_percent(judged.data_share, 2),
                throttled_words(judged.log),
            ]
        )
    columns = ["case|", "steps", "step time", "spread", "outliers", "slowest step", "rank skew", "fetching data"]
    caption = "How even the measured steps are; fetching data: the host's time for batches, during which a GPU computes"
    blocks.append(Table([*columns, "throttled|"], rows, caption))
    return Section("steps", "MFU over time", blocks)


def throttled_words(log: RunLog) -> str:
    """Why cards were slowed down, each reason with its share of the sampled steps of all processes."""
    counts: Counter[str] = Counter()
    sampled = 0
    for telemetry in log.telemetry_of_measured():
        sampled += telemetry.get("steps_sampled", 0)
        counts.update({reason: of["steps"] for reason, of in telemetry.get("throttled", {}).items()})
    if not sampled:
        return "–"
    return ", ".join(f"{reason} {format_percent(steps / sampled, 0)}" for reason, steps in counts.items()) or "–"

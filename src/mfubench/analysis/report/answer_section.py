"""The first section: what to train with, and how every case compares."""

from __future__ import annotations

from mfubench.analysis.answer import NEAR_FASTEST, Answer, Candidate, answers, command_for
from mfubench.analysis.figures import throughput
from mfubench.analysis.figures.style import count_words, per_gpu
from mfubench.analysis.findings import Findings
from mfubench.analysis.report.blocks import Block, Card, Cards, Command, Figure, Notice, Section, Table, Text
from mfubench.analysis.units import (
    format_gib,
    format_interval,
    format_percent,
    format_rate,
    format_signed_percent,
    format_told,
    told_of,
)
from mfubench.analysis.untried import untried
from mfubench.host_load import Contention, contention_of_run
from mfubench.words import number_of

MOST_CANDIDATES = 8
MOST_NAMED = 4  # of those that are as fast
UNEVEN = 0.10  # quartiles of the step times this far apart, as a share of the median, are no steady state


def answer_section(found: Findings) -> Section:
    blocks: list[Block] = []
    found_answers = answers(found)
    if not found_answers:
        blocks.append(Notice("No case beyond the smoke tests has been measured yet, so there is nothing to recommend."))
    blocks += busy_machine(found)
    for answer in found_answers:
        if len(found_answers) > 1:
            blocks.append(Text(f"**{answer.model}**"))
        blocks += answer_blocks(found, answer)
    alt = "Bars: rate of every case by stage; points beside them: its MFU by the palm and the causal convention."
    blocks.append(Figure("throughput", alt, throughput.draw))
    return Section("answer", "Which settings to train with", blocks)


def contended(found: Findings) -> dict[str, Contention]:
    """The runs during which other processes held cores that they had use for."""
    return {name: taken for name, judged in found.good.items() if (taken := contention_of_run(judged.log)) is not None}


def busy_machine(found: Findings) -> list[Block]:
    """A warning where other processes held the cores that runs had use for."""
    runs = contended(found)
    if not runs:
        return []
    worst = max(runs, key=lambda name: runs[name].others)
    command = found.study.measure_anew()
    return [
        Notice(
            f"The machine was busy with something else during {len(runs)} of {len(found.good)} runs. The worst, "
            f"`{worst}`: {runs[worst]}. When nothing else runs here, `{command}` measures everything anew, "
            "trainings too."
        )
    ]


def answer_blocks(found: Findings, answer: Answer) -> list[Block]:
    if answer.doubt is not None:
        return [Notice(doubt_sentence(found, answer, answer.doubt)), candidates_table(found, answer)]
    return [
        *unevenness(answer.fastest),
        answer_cards(found, answer),
        *untried_blocks(found, answer),
        candidates_table(found, answer),
    ]


def doubt_sentence(found: Findings, answer: Answer, doubt: str) -> str:
    """In place of the cards: why there is no setting to name, and what to do about it."""
    fastest, busy = answer.fastest, len(contended(found))
    advice = "Raise `repeats` in the study, or measure more steps."
    if busy:
        runs = number_of(len(found.good), "run")
        advice = f"The machine was busy during {busy} of {runs}: measure again, with the command above."
    elif fastest.impossible_mfu is not None and found.ceilings_contention is not None:
        advice = "Measure the ceilings anew first, with the command at the head of this report."
    spread = ""
    if fastest.stability is not None and fastest.stability.spread > UNEVEN:
        spread = f" Its step times spread by {format_percent(fastest.stability.spread, 0)}."
    return (
        f"**No setting can be named:** `{fastest.case}` has the highest rate, {rate_words(found, fastest)}, but it "
        f"{doubt}.{spread} {advice}"
    )


def rate_words(found: Findings, candidate: Candidate) -> str:
    return f"{format_rate(candidate.tokens_per_s)} tokens/s on {count_words(found, candidate.config.world_size)}"


def answer_cards(found: Findings, answer: Answer) -> Cards:
    fastest = answer.fastest
    near = f"of the settings within {100 * NEAR_FASTEST:.0f} % of the fastest"
    cards = [card("Fastest", fastest, found, fastest_note(answer))]
    if answer.most_stable is not None and not unevenness(answer.most_stable):  # else nothing here deserves the name
        if command_for(answer.most_stable.config) == command_for(fastest.config):
            cards[0] = card("Fastest and most stable", fastest, found, fastest_note(answer))
        else:
            cards.append(card("Most stable", answer.most_stable, found, near))
    if answer.least_memory is not None and answer.least_memory.case != fastest.case:
        cards.append(card("Least memory", answer.least_memory, found, near))
    return Cards(cards)


def candidates_table(found: Findings, answer: Answer) -> Table:
    shown = answer.candidates[:MOST_CANDIDATES]
    caption = (
        f"The {len(shown)} fastest of {len(answer.candidates)} settings. Spread: quartiles of the step times over "
        "their median; outliers: steps beyond q3 + 3 (q3 − q1) and 2 % above the median; both of the least even of a "
        "case's processes."
    )
    ranks = "GPUs" if per_gpu(found).endswith("GPU") else "processes"
    columns = ["case|", ranks, "tokens/s in all", "in all, against the fastest", per_gpu(found), "MFU (palm)"]
    columns += ["spread", "outliers", "failures", "memory"]
    return Table(columns, [candidate_row(candidate) for candidate in shown], caption)


def untried_blocks(found: Findings, answer: Answer) -> list[Block]:
    """What may be faster still: settings that only ran on fewer GPUs than the recommended ones."""
    item = untried(found, answer)
    if item is None:
        return []
    fastest, case = answer.fastest, item.candidate
    many, few = fastest.config.world_size, case.config.world_size
    rate, unit = fastest.tokens_per_s / many, per_gpu(found)
    differs_in = ", ".join(f"{key}: {before} → {after}" for key, (before, after) in item.differs_in.items())
    basis = " (not repeated)" if item.difference.basis == "not repeated" else ""
    sentence = (
        f"**Not measured on {count_words(found, many)}:** `{case.case}` reached "
        f"{format_rate(item.tokens_per_s_per_gpu)} {unit} on {count_words(found, few)}, "
        f"{format_signed_percent(item.difference.change)} ({format_interval(item.difference.interval)}){basis} "
        f"against the {format_rate(rate)} of `{fastest.case}`. It differs in: {differs_in}. "
        f"This would measure it on {count_words(found, many)}:"
    )
    return [Text(sentence), Command(item.command)]


def unevenness(candidate: Candidate) -> list[Block]:
    """A warning where the steps differ so much that something else must have run on the machine."""
    if candidate.stability is None or candidate.stability.spread <= UNEVEN:
        return []
    spread = format_percent(candidate.stability.spread, 0)
    return [Notice(f"The step times of `{candidate.case}` spread by {spread}: other work seems to have run on this "
                   "machine, or its clocks did not settle. Take every rate here as rough.")]  # fmt: skip


def fastest_note(answer: Answer) -> str:
    if not answer.as_fast:
        return "no other setting comes as close as the measurement can tell"
    names = ", ".join(f"`{candidate.case}`" for candidate in answer.as_fast[:MOST_NAMED])
    more = len(answer.as_fast) - MOST_NAMED
    return f"not told apart from {names}{f' and {more} more' if more > 0 else ''}: take whichever you trust more"


def card(title: str, candidate: Candidate, found: Findings, note: str) -> Card:
    config = candidate.config
    mfu = candidate.runs[0].headline_mfu
    facts = [f"case `{candidate.case}` — {note}"]
    if mfu is not None:
        facts.append(f"MFU {format_percent(mfu)} (palm)")
    facts.append(
        f"micro-batch {config.micro_batch_size} × accumulation {config.gradient_accumulation_steps} × "
        f"{count_words(found, config.world_size)} = {config.tokens_per_step:,} tokens a step"
    )
    if candidate.peak_memory_gib is not None:
        capacity = candidate.runs[0].capacity_gib
        share = f", {100 * candidate.peak_memory_gib / capacity:.0f} % of {format_gib(capacity)}" if capacity else ""
        facts.append(f"memory {format_gib(candidate.peak_memory_gib)}{share}")
    facts.append(stability_words(candidate))
    return Card(title, rate_words(found, candidate), facts, command_for(config))


def stability_words(candidate: Candidate) -> str:
    stability = candidate.stability
    if stability is None:
        return "no measured steps to judge the stability by"
    processes = len(candidate.runs)
    over = f" in {processes} processes" if processes > 1 else ""
    failures = f"{candidate.failures} failures" if candidate.failures else "no failure"
    return (
        f"step times spread {format_percent(stability.spread)}, {stability.outliers} of {stability.steps} steps are "
        f"outliers, the slowest took {format_signed_percent(stability.slowest - 1)}; {failures}{over}"
    )


def candidate_row(candidate: Candidate) -> list[str]:
    run, stability = candidate.runs[0], candidate.stability
    assert run.tokens_per_s_per_gpu is not None
    against = "–"
    if candidate.against_fastest is not None:
        change = candidate.against_fastest
        against = format_told(told_of(change))
        if change.is_difference:
            against = f"{format_signed_percent(change.change)} ({format_interval(change.interval)})"
    return [
        f"`{candidate.case}`",
        str(candidate.config.world_size),
        format_rate(candidate.tokens_per_s),
        against,
        format_rate(candidate.tokens_per_s / run.log.config.world_size),
        format_percent(run.headline_mfu),
        format_percent(stability.spread) if stability else "–",
        f"{stability.outliers} of {stability.steps}" if stability else "–",
        str(candidate.failures),
        format_gib(candidate.peak_memory_gib),
    ]

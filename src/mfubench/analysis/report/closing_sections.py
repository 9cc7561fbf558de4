"""What did not run as asked, what a whole training would cost, the machine, the audit, how to read the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from mfubench.analysis.answer import answers
from mfubench.analysis.extrapolation import Extrapolation, extrapolate
from mfubench.analysis.figures.style import per_gpu
from mfubench.analysis.findings import Findings
from mfubench.analysis.measures import FINAL_LOSS
from mfubench.analysis.report.blocks import Block, Folded, Notice, Section, Table, Text
from mfubench.analysis.statistics import Quartiles
from mfubench.analysis.units import (
    TOO_NOISY,
    format_count,
    format_digits,
    format_gib,
    format_hours,
    format_percent,
    format_quartiles,
    format_rate,
    is_noise,
)
from mfubench.run_log import RunLog
from mfubench.words import number_of

MOST_VALUES = 4  # of an environment variable that are listed


def runs_section(found: Findings) -> Section:
    """Every case with its figures, for whoever looks for one."""
    rows = []
    for name, judged in found.measures.items():
        config = judged.log.config
        rows.append(
            [
                f"`{name}`",
                judged.log.status,
                str(config.world_size),
                f"{config.micro_batch_size} × {config.gradient_accumulation_steps}",
                format_quartiles(judged.tokens_per_s_per_gpu, format_rate),
                format_rate(judged.total_rate) if judged.total_rate else "–",
                *(mfu_cell(judged.mfu.get(key)) for key in ("palm", "matmul", "causal", "hfu", "mamfu")),
                format_gib(judged.peak_memory_gib),
                f"{judged.final_loss:.3f}" if judged.final_loss is not None else "–",
            ]
        )
    columns = ["case|", "status|", "world size", "micro-batch × accumulation", "tokens/s each: median (quartiles)"]
    columns += ["total tokens / total time", "palm", "matmul", "causal", "HFU", "MAMFU", "memory", "last loss"]
    caption = f"All runs; MFU by every convention; last loss: {FINAL_LOSS}"
    table = Table(columns, rows, caption)
    problems: dict[str, int] = {}
    for name, judged in found.measures.items():
        if judged.peak_problem:
            problem = judged.peak_problem.removeprefix(f"{name}: ")
            problems[problem] = problems.get(problem, 0) + 1
    blocks: list[Block] = [Notice(f"No MFU for {count} of {len(rows)} runs: {why}") for why, count in problems.items()]
    blocks.append(Folded(f"All {len(rows)} runs with all figures", [table]))
    return Section("runs", "All runs", blocks)


def mfu_cell(values: Quartiles | None) -> str:
    return format_percent(values.median) if values is not None else "–"


LEFT_OVER = "a result of a case that the study no longer declares: it is shown nowhere; delete it, or declare it again"


def left_out_section(found: Findings) -> Section:
    study = found.study
    left_out = [[f"`{name}`", "left out", study.declared.skipped[name]] for name in study.left_out()]
    for name, log in study.runs.items():
        if log.status != "ok":
            words = {"oom": "out of memory", "skipped": "left out", "diverged": "diverged"}
            left_out.append([f"`{name}`", words.get(log.status, "failed"), log.reason or "no reason recorded"])
    left_out += [[f"`{name}`", "failed", failure.reason] for name, failure in study.failures.items()]
    left_out += [[f"`{name}`", "missing", study.why_missing(name)] for name in study.missing()]
    left_out += [[f"`{name}`", "left over", LEFT_OVER] for name in study.left_over]
    fell_back = [
        [f"`{name}`", setting, note]
        for name, log in study.runs.items()
        if log.status == "ok"
        for setting, note in log.fallbacks().items()
    ]
    blocks: list[Block] = []
    if left_out:
        rows = grouped(left_out)
        blocks.append(Table(["what happened|", "why|", "cases|"], rows, "Cases without figures"))
    if fell_back:
        rows = grouped(fell_back)
        blocks.append(
            Table(["setting|", "asked → used: why|", "cases|"], rows, "Settings that ran otherwise than asked")
        )
    demoted = [[f"`{name}`", why] for name, log in study.runs.items() if (why := log.demoted()) is not None]
    if demoted:
        blocks.append(Table(["case|", "what changed|"], demoted, "Runs that were resumed otherwise than they began"))
    if not blocks:
        blocks.append(Text("Every case ran, with the settings that were asked for."))
    return Section("left-out", "Skipped arms and fallbacks", blocks)


def grouped(rows: list[list[str]]) -> list[list[str]]:
    """[case, what, why] -> [what, why, the cases it concerns], one row for all cases of the same words."""
    cases: dict[tuple[str, str], list[str]] = {}
    for case, what, why in rows:
        cases.setdefault((what, why), []).append(case)
    return [[what, why, ", ".join(names)] for (what, why), names in cases.items()]


def extrapolation_section(found: Findings) -> Section:
    section = Section("extrapolation", "What a whole training would take")
    price = found.study.declared.price_per_gpu_hour
    hours = "GPU-hours" if per_gpu(found).endswith("GPU") else "process-hours"
    for answer in answers(found):
        if answer.doubt is not None:
            words = f"{answer.model}: no setting can be named, so nothing is extrapolated: "
            section.blocks.append(Text(f"{words}`{answer.fastest.case}` {answer.doubt}."))
            continue
        rows = [extrapolation_row(item) for item in extrapolate(found, answer)]
        columns = ["tokens", "what for|", "iterations", "time", "95 % interval", hours, "energy", "money"]
        world_size = answer.fastest.config.world_size
        caption = f"{answer.model} with the fastest setting, `{answer.fastest.case}`, world size {world_size}"
        section.blocks.append(Table(columns, rows, caption))
    if not section.blocks:
        section.blocks.append(Text("No rate to extrapolate from yet."))
    if not any(isinstance(block, Table) for block in section.blocks):
        return section
    notes = (
        "Training steps alone, at total tokens over total time; evaluations, checkpoints and interruptions come on top."
    )
    notes += (
        " The interval is that of the rate. Energy: the GPUs' median power while steps ran, without host and cooling."
    )
    notes += f" Money: {price:g} per GPU-hour." if price is not None else " No price per GPU-hour is set in the study."
    section.blocks.append(Text(notes))
    return section


def extrapolation_row(item: Extrapolation) -> list[str]:
    low, high = item.hours_interval.low, item.hours_interval.high
    interval = TOO_NOISY if is_noise(low, high) else f"{format_hours(low)} – {format_hours(high)}"
    return [
        format_count(item.target.tokens),
        item.target.label,
        f"{item.iterations:,.0f}",
        format_hours(item.hours),
        interval,
        format_digits(item.gpu_hours) if item.gpu_hours < 1000 else f"{item.gpu_hours:,.0f}",
        f"{item.energy_kwh:,.0f} kWh" if item.energy_kwh is not None else "not sampled",
        f"{item.money:,.0f}" if item.money is not None else "–",
    ]


def environment_section(found: Findings) -> Section:
    environment = found.study.environment
    section = Section("environment", "Machine and software")
    if environment is None:
        section.blocks.append(Text("No run has recorded its environment yet."))
        return section
    logs = found.study.runs.values()
    hosts = sorted({log.environment.host for log in logs})
    rows = [["host", ", ".join(hosts)], ["processor", f"{environment.cpu}, {environment.cpu_count} CPUs"]]
    rows.append(["memory", format_gib(environment.memory_gib)])
    for name in dict.fromkeys(gpu.name for gpu in environment.gpus):
        cards = [gpu for gpu in environment.gpus if gpu.name == name]
        limits = sorted({gpu.power_limit_w for gpu in cards if gpu.power_limit_w})
        limit = f", power limit {' and '.join(f'{watts:.0f} W' for watts in limits)}" if limits else ""
        rows.append(["GPUs", f"{len(cards)}× {name}, {format_gib(cards[0].memory_gib)} each{limit}"])
    peaks = {(j.peak.dtype, j.peak.tflops, j.peak.source) for j in found.measures.values() if j.peak}
    rows += [["peak", f"{tflops:,.4g} TFLOP/s {dtype} — {source}"] for dtype, tflops, source in sorted(peaks)]
    if found.study.ceilings is not None:
        for dtype in found.study.ceilings.measured_dtypes():
            rate = found.study.ceilings.large_matmul_tflops(dtype)
            rows.append(["measured large matmul", f"{rate:,.4g} TFLOP/s {dtype}, hot"])
    versions = {"driver": environment.driver, "CUDA": environment.cuda, "NCCL": environment.nccl}
    versions |= {"cuDNN": environment.cudnn, "torch": environment.torch, "Python": environment.python}
    rows += [[name, version] for name, version in {**versions, **environment.packages}.items() if version]
    commits = {
        f"{log.environment.git_commit[:10]}{' (with changes)' if log.environment.git_dirty else ''}"
        for log in logs
        if log.environment.git_commit
    }
    rows.append(["commit", ", ".join(sorted(commits)) or "not under version control"])
    if environment.slurm_job_id:
        rows.append(["SLURM job", environment.slurm_job_id])
    section.blocks.append(Table(["what|", "value|"], rows))
    variables = [[f"`{name}`", values] for name, values in variables_of(found.study.runs.values()).items()]
    if variables:
        table = Table(["variable|", "value|"], variables)
        section.blocks.append(Folded(f"{len(variables)} environment variables that change speed", [table]))
    return section


def variables_of(logs: Collection[RunLog]) -> dict[str, str]:
    """Environment variables that change speed; where runs had several values, each with the number of its runs."""
    shown = {}
    for name in sorted({name for log in logs for name in log.environment.variables}):
        counts = Counter(log.environment.variables.get(name, "not set") for log in logs)
        told = [f"{value} in {number_of(count, 'run')}" for value, count in counts.most_common(MOST_VALUES)]
        if more := len(counts) - len(told):
            told.append(f"{number_of(more, 'other value')} in the rest")
        shown[name] = "; ".join(told) if len(counts) > 1 else next(iter(counts))
    return shown


def reading_section() -> Section:
    rows = [
        ["palm", "6 N + 12 L H Q T, N all parameters, full attention (the headline)", "datasheet, dense"],
        ["matmul", "as palm, N only the parameters that are multiplied", "datasheet, dense"],
        ["causal", "as matmul, attention halved: what causal kernels execute", "datasheet, dense"],
        ["HFU", "causal, and what activation checkpointing computes again", "datasheet, dense"],
        ["MAMFU", "causal", "large matmul measured on this very machine, hot"],
    ]
    text = (
        "MFU is model FLOPs utilisation, HFU hardware FLOPs utilisation and MAMFU maximum achievable matmul FLOPs "
        "utilisation. Rates are tokens over the time of an optimizer step, by the clock of rank 0; compilation, "
        "preheat and warm-up are recorded and not judged. Quartiles are of the steps; 95 % intervals of a median come "
        "from a block bootstrap over the autocorrelated steps. A CPU has no datasheet: its peak is a matmul measured "
        "on the same threads. All figures come from `runs/*/*.json` and stand in `tables/*.csv`."
    )
    table = Table(["ratio|", "FLOPs of a token|", "divided by|"], rows)
    return Section("reading", "How to read the numbers", [table, Text(text)])

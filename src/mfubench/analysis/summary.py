"""summary.json: the study in one small file for other programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mfubench.analysis.answer import Answer, answers, command_for
from mfubench.analysis.findings import Findings
from mfubench.analysis.machine_time import MachineTime, machine_time
from mfubench.analysis.measures import Measures
from mfubench.analysis.statistics import Quartiles
from mfubench.analysis.study import machine_of
from mfubench.analysis.untried import Untried, untried

SUMMARY_CONVENTIONS = ("palm", "matmul", "causal", "mamfu")


def summarize(found: Findings) -> dict[str, Any]:
    """{machine, study, cases: {"stage/case": {status, world_size, tokens_per_s_per_gpu, mfu, peak_memory_gib}},
    recommended, time}.

    Rates and MFU are {median, q1, q3} over the measured steps; what is not known is null. time: {total, stages: {stage:
    as total}, left_out: {"stage/case": why}}, total: {runs, total_s, gpu_total_s, parts_s, gpu_parts_s}, seconds.
    recommended: {model: {case, world_size, tokens_per_s, doubt, command, untried}}, the fastest in all; doubt: why it
    cannot be named the fastest, else null; untried: {case, world_size, tokens_per_s_per_gpu, change, interval: {low,
    high}, differs_in: {setting: [recommended's, its own]}, command}, faster per GPU on fewer GPUs and never run on as
    many; command runs it on as many.
    """
    environment = found.study.environment
    time = machine_time(found.study.runs.values())
    return {
        "machine": machine_of(environment) if environment else None,
        "study": found.study.name,
        "cases": {name: summarize_case(judged) for name, judged in found.measures.items()},
        "recommended": {answer.model: summarize_answer(found, answer) for answer in answers(found)},
        "time": {
            "total": summarize_time(time.total),
            "stages": {stage: summarize_time(spent) for stage, spent in time.stages.items()},
            "left_out": time.left_out,
        },
    }


def summarize_answer(found: Findings, answer: Answer) -> dict[str, Any]:
    fastest = answer.fastest
    item = untried(found, answer)
    return {
        "case": fastest.case,
        "world_size": fastest.config.world_size,
        "tokens_per_s": fastest.tokens_per_s,
        "doubt": answer.doubt,
        "command": command_for(fastest.config),
        "untried": summarize_untried(item) if item is not None else None,
    }


def summarize_untried(item: Untried) -> dict[str, Any]:
    return {
        "case": item.candidate.case,
        "world_size": item.candidate.config.world_size,
        "tokens_per_s_per_gpu": item.tokens_per_s_per_gpu,
        "change": item.difference.change,
        "interval": asdict(item.difference.interval),
        "differs_in": {key: list(values) for key, values in item.differs_in.items()},
        "command": item.command,
    }


def summarize_time(spent: MachineTime) -> dict[str, Any]:
    return {
        "runs": spent.runs,
        "total_s": spent.total_ns / 1e9,
        "gpu_total_s": spent.gpu_total_ns / 1e9,
        "parts_s": {part: time_ns / 1e9 for part, time_ns in spent.parts_ns.items()},
        "gpu_parts_s": {part: time_ns / 1e9 for part, time_ns in spent.gpu_parts_ns.items()},
    }


def summarize_case(judged: Measures) -> dict[str, Any]:
    return {
        "status": judged.log.status,
        "world_size": judged.log.config.world_size,
        "tokens_per_s_per_gpu": as_json(judged.tokens_per_s_per_gpu),
        "mfu": {key: as_json(judged.mfu.get(key)) for key in SUMMARY_CONVENTIONS},
        "peak_memory_gib": judged.peak_memory_gib,
    }


def as_json(values: Quartiles | None) -> dict[str, float] | None:
    if values is None:
        return None
    return {key: value for key, value in asdict(values).items() if key != "n"}

"""summary.json: the study in one small file for other programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mfubench.analysis.findings import Findings
from mfubench.analysis.measures import Measures
from mfubench.analysis.statistics import Quartiles
from mfubench.analysis.study import machine_of

SUMMARY_CONVENTIONS = ("palm", "matmul", "causal", "mamfu")


def summarize(found: Findings) -> dict[str, Any]:
    """{machine, study, cases: {"stage/case": {status, world_size, tokens_per_s_per_gpu, mfu, peak_memory_gib}}}.

    Rates and MFU are {median, q1, q3} over the measured steps; what is not known is null.
    """
    environment = found.study.environment
    return {
        "machine": machine_of(environment) if environment else None,
        "study": found.study.name,
        "cases": {name: summarize_case(judged) for name, judged in found.measures.items()},
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

"""Audit of a CPU run against its measured ceiling: two measurements, of which either may be the wrong one."""

from __future__ import annotations

import statistics

from mfubench.audit.findings import Finding
from mfubench.ceilings.schema import Ceilings
from mfubench.hardware import Peak
from mfubench.host_load import contention_of_ceilings
from mfubench.run_log import RunLog

# A run may truly beat its ceiling by this much: the matmul was timed for seconds, and a CPU's clock depends on heat.
SUSPICIOUS = 1.25
# Beyond any honest difference: half of the cores taken while the ceiling was measured doubles the ratio, a higher clock
# adds half at most. Three times the matmul rate is possible for neither, so one of the two measurements is wrong.
IMPOSSIBLE = 3.0
SINGLE_STEP = 1.5  # a single step may be so many times faster than the median may


def check_measured_ceiling(log: RunLog, executed: float, palm: float, peak: Peak, ceilings: Ceilings) -> list[Finding]:
    """FLOPs of the measured steps against the matmul rate measured on this machine.

    executed, palm: TFLOP of one rank in one step, as they were computed and as the headline MFU counts them. Steps
    above the rate by either are named; clearly above it by what was executed the run is suspicious, far above it
    impossible: the finding says which of the two measurements to doubt.
    """
    measured = log.measured_steps()
    fastest = min(measured, key=lambda step: step.step_time_s)
    median_s = statistics.median(step.step_time_s for step in measured)
    counted, convention = (palm, "MFU palm") if palm >= executed else (executed, "with what was computed twice")
    above = sum(counted > peak.tflops * step.step_time_s for step in measured)
    if not above:
        return []
    median, highest = executed / median_s / peak.tflops, executed / fastest.step_time_s / peak.tflops
    # A rate scaled down to fewer threads is a guess: what all threads reached together is the bound that is sure.
    sure = IMPOSSIBLE * max(1.0, ceilings.threads / log.environment.cpu_threads)
    if median > sure or highest > SINGLE_STEP * sure:
        confidence = 0.97
    elif median > SUSPICIOUS:
        confidence = 0.75
    else:
        confidence = 0.4
    sentence = (
        f"{above} of {len(measured)} measured steps are above 100 % ({convention}) of the best matmul on this CPU, "
        f"{peak.tflops:.4g} TFLOP/s ({peak.source}): the median at {counted / median_s / peak.tflops:.0%} "
        f"({median:.0%} by what is executed), step {fastest.step} of {fastest.step_time_s:.4g} s at "
        f"{counted / fastest.step_time_s / peak.tflops:.0%} ({highest:.0%}); "
        f"{doubt(log, ceilings)}"
    )
    bound = f"at least {executed / peak.tflops:.4g} s a step, if the ceiling is right"
    disturbed = contention_of_ceilings(ceilings, log.environment.cpu_count) is not None
    return [Finding("above_ceiling", sentence, confidence, None if disturbed else bound)]


def doubt(log: RunLog, ceilings: Ceilings) -> str:
    """Which of the two measurements to repeat."""
    taken = contention_of_ceilings(ceilings, log.environment.cpu_count)
    if taken is not None:
        return (
            f"doubt the ceiling: other processes took {taken.others:.1f} of {taken.cores} cores while it was measured. "
            "Measure the ceilings again on a quiet machine: delete the study's ceilings.json and call snakemake again"
        )
    return (
        "a ceiling is a measurement, too: measure the ceilings again on a quiet machine. Where they stay as they are, "
        "doubt the run: its clock or what it computed is not what the record says"
    )

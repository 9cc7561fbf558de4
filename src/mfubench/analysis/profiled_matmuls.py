"""The matmuls of a profiled step one by one, beside the rate that each reached alone on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from mfubench.analysis.profiles import Profiled
from mfubench.ceilings.schema import Ceilings, Product
from mfubench.hardware import arithmetic_of_run, rank_share
from mfubench.prediction.measured_runs import as_run
from mfubench.prediction.step_model import micro_step_matmuls
from mfubench.run_log import RunLog

PRODUCTS: tuple[Product, ...] = ("forward", "input_gradient", "weight_gradient")  # as step_model lists them
IN_CEILINGS = {"qkv": "qkv", "o": "attention_output", "up": "mlp_up", "down": "mlp_down", "lm_head": "lm_head"}


@dataclass(frozen=True)
class ProfiledMatmul:
    """All calls of one product of one projection in the step."""

    name: str
    product: Product
    count: int
    time_s: float
    flops: float
    alone_tflops: float | None  # measured hot, with nothing else running; on a CPU by a rank's share of the threads

    @property
    def tflops(self) -> float:
        return self.flops / self.time_s / 1e12

    @property
    def excess_s(self) -> float:
        """Time beyond what the calls would take at the rate that they reach alone."""
        return max(0.0, self.time_s - self.flops / self.alone_tflops / 1e12) if self.alone_tflops else 0.0


def profiled_matmuls(profiled: Profiled, ceilings: Ceilings | None) -> list[ProfiledMatmul]:
    """The products whose shapes the profiler recorded and the model has, longest first.

    A weight's gradient may run as either of two products, one the transpose of the other. A square weight's forward
    product and input gradient have the same shape: the pass tells them apart.
    """
    log = profiled.judged.log
    known: dict[tuple[int, int, int], list[tuple[str, Product]]] = {}
    for position, one in enumerate(micro_step_matmuls(as_run(log))):
        product = PRODUCTS[position % 3]
        known.setdefault((one.rows, one.inner, one.columns), []).append((one.name, product))
        if product == "weight_gradient":
            known.setdefault((one.columns, one.inner, one.rows), []).append((one.name, product))
    found: dict[tuple[str, Product], tuple[int, float, float]] = {}
    for total in profiled.rank.matmuls:
        if candidates := known.get(total.shape):
            key = next((one for one in candidates if fits(one[1], total.direction)), candidates[0])
            m, k, n = total.shape
            before = found.get(key, (0, 0.0, 0.0))
            found[key] = before[0] + total.count, before[1] + total.total_s, before[2] + 2.0 * m * k * n * total.count
    rates = rates_alone(log, ceilings) if ceilings is not None else {}
    matmuls = [
        ProfiledMatmul(IN_CEILINGS[name], product, *numbers, rates.get((IN_CEILINGS[name], product)))
        for (name, product), numbers in found.items()
    ]
    return sorted(matmuls, key=lambda matmul: -matmul.time_s)


def rates_alone(log: RunLog, ceilings: Ceilings) -> dict[tuple[str, Product], float]:
    """TFLOP/s of each product of the run's model in its arithmetic; of a rank's share of the threads on a CPU."""
    return {
        (one.name, one.product): one.tflops * rank_share(log, ceilings)
        for one in ceilings.matmuls
        if one.model == log.config.model.name and one.arithmetic == arithmetic_of_run(log)
    }


def fits(product: Product, direction: str | None) -> bool:
    return direction is not None and (direction == "forward") == (product == "forward")

"""A named machine: which designs fit its cards, and what training them takes in hours, energy and money."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from mfubench.config import ConfigError, ModelConfig, Parallelism
from mfubench.hardware import find_gpu
from mfubench.planner.design import Design, PlanConfig, require_positive
from mfubench.planner.search import build_model, search
from mfubench.prediction.calibration import Calibration, shipped_calibration
from mfubench.prediction.memory import estimate_memory
from mfubench.prediction.predict import Prediction, plan_run, predict

TOKENS_PER_STEP = 2**19  # of the runs that are priced: half a million, as is usual at 1-2B parameters


@dataclass(frozen=True)
class Price:
    """What training a design takes on a named machine. Errors are half-widths of 95 % intervals."""

    gpu: str
    gpus: int
    mfu: float  # of the dense datasheet peak, palm convention
    mfu_source: str  # given, or predicted and on what basis
    error_fraction: float  # of hours, energy and money; 0 where the MFU was given
    tokens_per_s: float  # over all cards
    hours: float
    gpu_hours: float
    energy_kwh: float  # cards at their power limit; hosts and cooling come on top
    money: float | None  # gpu_hours times the price given
    micro_batch_size: int | None  # the largest that fits; null where the MFU was given


@dataclass(frozen=True)
class Machine:
    """Cards to plan for. `mfu` (palm) replaces the prediction; `price_per_gpu_hour` is in any currency."""

    gpu: str
    gpus: int = 8
    mfu: float | None = None
    price_per_gpu_hour: float | None = None
    parallelism: Parallelism | None = None
    calibration: Calibration = field(default_factory=shipped_calibration)

    def __post_init__(self) -> None:
        find_gpu(self.gpu)  # an unknown card stops here
        if self.price_per_gpu_hour is not None:
            require_positive(price_per_gpu_hour=self.price_per_gpu_hour)
        if self.mfu is not None and not 0 < self.mfu <= 1:
            raise ConfigError(f"mfu: found {self.mfu}; a fraction of the dense peak, above 0 and at most 1")

    def run_settings(self, seq_len: int) -> dict[str, Any]:
        settings: dict[str, Any] = {"seq_len": seq_len, "micro_batch_size": 1}
        return settings if self.parallelism is None else {**settings, "parallelism": self.parallelism}

    def fits(self, plan: PlanConfig, models: ModelConfig) -> Any:
        """Which of a grid of models (`shapes`, not empty) train on these cards with micro-batches of one sequence."""
        any_model = build_model(cast(SimpleNamespace, models), 0)
        prediction = self.predict(any_model, plan.seq_len)  # its config has `auto` resolved for this card
        config = prediction.config.model_copy(update={"micro_batch_size": 1})
        capacity = prediction.memory_capacity_gib
        return estimate_memory(config, capacity, models, self.calibration.memory).total_gib <= capacity

    def predict(self, model: ModelConfig, seq_len: int) -> Prediction:
        """The run with the largest micro-batch that fits, accumulated to about half a million tokens a step."""
        config = plan_run(model, self.gpus, **self.run_settings(seq_len))
        largest = predict(config, self.gpu, calibration=self.calibration).largest_micro_batch_size
        micro_batch_size = max(1, min(largest, 32))  # beyond that nothing gets faster
        accumulation = max(1, TOKENS_PER_STEP // (micro_batch_size * seq_len * self.gpus))
        sizes = {"micro_batch_size": micro_batch_size, "gradient_accumulation_steps": accumulation}
        return predict(config.model_copy(update=sizes), self.gpu, calibration=self.calibration)

    def price(self, design: Design) -> Price:
        """Hours, energy and money of a design's tokens."""
        prediction = self.predict(design.model, design.seq_len)
        if self.mfu is None:
            mfu, error, source = prediction.mfu["palm"], prediction.error_fraction, f"predicted. {prediction.basis}"
            micro_batch_size = prediction.config.micro_batch_size
        else:
            mfu, error, source, micro_batch_size = self.mfu, 0.0, "given", None
        tokens_per_s = self.gpus * prediction.peak_tflops * 1e12 * mfu / design.flops_per_token["palm"]
        gpu_hours = self.gpus * design.tokens / tokens_per_s / 3600
        return Price(
            gpu=prediction.gpu,
            gpus=self.gpus,
            mfu=mfu,
            mfu_source=source,
            error_fraction=error,
            tokens_per_s=tokens_per_s,
            hours=gpu_hours / self.gpus,
            gpu_hours=gpu_hours,
            energy_kwh=gpu_hours * find_gpu(self.gpu).power_limit_w / 1000,
            money=None if self.price_per_gpu_hour is None else gpu_hours * self.price_per_gpu_hour,
            micro_batch_size=micro_batch_size,
        )


def search_on_machine(plan: PlanConfig, machine: Machine, count: int = 5) -> list[Design]:
    """As `planner.search.search`, of models that fit the machine's memory."""
    return search(plan, count, lambda models: machine.fits(plan, models))


def compute_in_hours(plan: PlanConfig, machine: Machine, hours: float) -> float:
    """FLOPs by the plan's convention that the machine does in `hours` on the best design for them.

    The best design depends on the budget and its MFU on the design, but weakly: a few rounds settle it.
    """
    require_positive(hours=hours)
    compute = plan.compute
    for _ in range(4):
        best = search_on_machine(plan.model_copy(update={"compute": compute}), machine, count=1)[0]
        compute = 3600 * hours * machine.price(best).tokens_per_s * best.flops_per_token[plan.convention]
    return compute

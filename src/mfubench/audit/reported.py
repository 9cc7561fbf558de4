"""Figures as people report them: from a command line, a JSON file, or a legacy run log. Any of them may be missing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mfubench.config import ConfigError, ModelConfig
from mfubench.flops import Convention, FlopTerms, flop_terms
from mfubench.presets import load_model

ALIASES = {"gpu": "gpu_name", "gpus": "num_gpus", "world_size": "num_gpus", "dtype": "precision", "mfu": "mfu_percent"}
PRECISIONS = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half"), "float16"),
    **dict.fromkeys(("fp32", "float32", "float", "tf32"), "float32"),
    "fp8": "bfloat16",
}


class ReportedRun(BaseModel):
    """What a report says of one run. Rates and totals are over all GPUs unless the key says otherwise."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = "reported"
    gpu_name: str | None = None
    num_gpus: int = Field(1, ge=1)
    precision: str = "bfloat16"
    tf32: bool = True
    parallelism: str | None = None

    model: str | None = None  # a preset of config/models.yaml; fills what is not stated
    architecture: ModelConfig | None = None  # complete dimensions, where the source has them
    parameters: int | None = Field(None, gt=0)
    num_hidden_layers: int | None = Field(None, gt=0)
    num_attention_heads: int | None = Field(None, gt=0)
    head_dim: int | None = Field(None, gt=0)

    seq_len: int | None = Field(None, gt=0)
    micro_batch_size: int | None = Field(None, gt=0)
    gradient_accumulation_steps: int | None = Field(None, gt=0)  # per GPU
    config_gradient_accumulation_steps: int | None = Field(None, gt=0)  # over all GPUs, to be divided by them
    global_batch_size: int | None = Field(None, gt=0)  # sequences

    step_time_s: float | None = Field(None, gt=0)
    tokens_per_s: float | None = Field(None, gt=0)
    tokens_per_s_per_gpu: float | None = Field(None, gt=0)
    flops_per_token: float | None = Field(None, gt=0)
    flops_convention: Convention | None = None
    mfu_percent: float | None = Field(None, gt=0)
    hardware_peak_tflops: float | None = Field(None, gt=0)
    achieved_tflops: float | None = Field(None, gt=0)

    steps: int | None = Field(None, gt=0)  # done in total_time_s
    resumed_at_step: int | None = Field(None, ge=0)
    total_tokens: float | None = Field(None, gt=0)  # trained in total_time_s
    total_time_s: float | None = Field(None, gt=0)

    # By logged step, where the source has them.
    step_numbers: list[int] = []
    step_times_s: list[float] = []
    step_rates: list[float] = []  # tokens/s
    evaluation_interval: int | None = None  # steps
    checkpoint_interval: int | None = None

    @property
    def dtype(self) -> str:
        return PRECISIONS[self.precision.lower()]

    @property
    def tokens_per_micro_batch(self) -> int | None:
        return self.micro_batch_size * self.seq_len if self.micro_batch_size and self.seq_len else None

    def flop_terms(self) -> FlopTerms | None:
        """Terms of the FLOP formulas; without complete dimensions, all parameters count as matmul parameters."""
        if self.architecture and self.seq_len:
            return flop_terms(self.architecture, self.seq_len)
        if not (
            self.parameters and self.num_hidden_layers and self.num_attention_heads and self.head_dim and self.seq_len
        ):
            return None
        return FlopTerms(
            parameters=self.parameters,
            matmul_parameters=self.parameters,
            attention_mlp_parameters=self.parameters,
            num_hidden_layers=self.num_hidden_layers,
            attention_width=self.num_attention_heads * self.head_dim,
            seq_len=self.seq_len,
        )


def make_reported(values: dict[str, Any], where: str) -> ReportedRun:
    """Validate reported figures; `where` opens each complaint. Raises ConfigError for unknown keys and bad values."""
    values = {ALIASES.get(key, key): value for key, value in values.items()}
    unknown = [key for key in values if key not in ReportedRun.model_fields]
    if unknown:
        near = difflib.get_close_matches(unknown[0], ReportedRun.model_fields, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"{where}: unknown figure {unknown[0]!r}{hint}. Known: "
            + ", ".join(key for key in ReportedRun.model_fields if not key.startswith("step_"))
        )
    try:
        run = ReportedRun.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        path = ".".join(str(part) for part in fault["loc"])
        raise ConfigError(f"{where}: {path}: found {fault['input']!r}; {fault['msg']}") from None
    if run.precision.lower() not in PRECISIONS:
        raise ConfigError(f"{where}: precision {run.precision!r} is none of {', '.join(PRECISIONS)}")
    return fill_from_model(run)


def fill_from_model(run: ReportedRun) -> ReportedRun:
    """Take from the named preset what the report does not state; what it states stays, to be compared."""
    if run.model is None:
        return run
    architecture = run.architecture or load_model(run.model)
    filled: dict[str, Any] = {"architecture": architecture}
    for key in ("num_hidden_layers", "num_attention_heads", "head_dim"):
        if getattr(run, key) is None:
            filled[key] = getattr(architecture, key)
    return run.model_copy(update=filled)


def parse_figures(figures: Iterable[str]) -> ReportedRun:
    """`key=value` words of a command line as a report. Raises ConfigError for words of another form."""
    values: dict[str, Any] = {}
    for figure in figures:
        key, separator, value = figure.partition("=")
        if not separator or not key:
            raise ConfigError(
                f"--reported: {figure!r} is no figure; write key=value, as in gpu='NVIDIA B200' num_gpus=8"
            )
        values[key.strip().replace("-", "_")] = value.strip().replace(",", "") if key != "gpu" else value.strip()
    if not values:
        raise ConfigError("--reported: no figures given; write key=value, as in gpu='NVIDIA B200' num_gpus=8")
    return make_reported(values, "--reported")

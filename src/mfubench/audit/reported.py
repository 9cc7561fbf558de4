"""Figures as people report them: from a command line, a JSON file, or a legacy run log. Any of them may be missing."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mfubench.config import ConfigError, ModelConfig
from mfubench.flops import Convention, FlopTerms, count_parameters, flop_terms
from mfubench.presets import load_model
from mfubench.run_log import LARGEST, Count, Positive

ALIASES = {"gpu": "gpu_name", "gpus": "num_gpus", "world_size": "num_gpus", "dtype": "precision", "mfu": "mfu_percent"}
MOST_DIGITS = 25  # of a number that is looked at; 64 bits hold 19
PRECISIONS = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half"), "float16"),
    **dict.fromkeys(("fp32", "float32", "float", "tf32"), "float32"),
    "fp8": "bfloat16",
}
Figure = Annotated[float, Field(ge=1e-9, le=1e24)]  # whatever is reported; products of several stay finite


class ReportedRun(BaseModel):
    """What a report says of one run. Rates and totals are over all GPUs unless the key says otherwise."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = "reported"
    gpu_name: str | None = None
    num_gpus: Positive = 1
    precision: str = "bfloat16"
    tf32: bool = True
    parallelism: str | None = None

    model: str | None = None  # a preset of config/models.yaml; fills what is not stated
    architecture: ModelConfig | None = None  # complete dimensions, where the source has them
    parameters: Positive | None = None
    num_hidden_layers: Positive | None = None
    num_attention_heads: Positive | None = None
    head_dim: Positive | None = None

    seq_len: Positive | None = None
    micro_batch_size: Positive | None = None
    gradient_accumulation_steps: Positive | None = None  # per GPU
    config_gradient_accumulation_steps: Positive | None = None  # over all GPUs, to be divided by them
    global_batch_size: Positive | None = None  # sequences

    step_time_s: Figure | None = None
    tokens_per_s: Figure | None = None
    tokens_per_s_per_gpu: Figure | None = None
    flops_per_token: Figure | None = None
    flops_convention: Convention | None = None
    mfu_percent: Figure | None = None
    hardware_peak_tflops: Figure | None = None
    achieved_tflops: Figure | None = None

    steps: Positive | None = None  # done in total_time_s
    resumed_at_step: Count | None = None
    total_tokens: Figure | None = None  # trained in total_time_s
    total_time_s: Figure | None = None

    # By logged step, where the source has them.
    step_numbers: list[Count] = []
    step_times_s: list[Figure] = []
    step_rates: list[Figure] = []  # tokens/s
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
    values = without_aliases(percent_without_doubt(values, where), where)
    unknown = [key for key in values if key not in ReportedRun.model_fields]
    if unknown:
        near = difflib.get_close_matches(unknown[0], ReportedRun.model_fields, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{where}: unknown figure {unknown[0]!r}{hint}. Known: " + ", ".join(known_names()))
    try:
        run = ReportedRun.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        path = ".".join(str(part) for part in fault["loc"])
        found = textwrap.shorten(repr(fault["input"]), 80)
        raise ConfigError(f"{where}: {path}: found {found}; {fault['msg']}") from None
    if run.precision.lower() not in PRECISIONS:
        raise ConfigError(f"{where}: precision {run.precision!r} is none of {', '.join(PRECISIONS)}")
    run = fill_from_model(run)
    if run.architecture and count_parameters(run.architecture).total > LARGEST:
        raise ConfigError(f"{where}: the dimensions multiply to more parameters than 64 bits count")
    return run


def known_names() -> list[str]:
    """Names of the figures that stand on one line, each with its other names."""
    others: dict[str, list[str]] = {}
    for alias, name in ALIASES.items():
        others.setdefault(name, []).append(alias)
    return [
        f"{name} (or {', '.join(others[name])})" if name in others else name
        for name, field in ReportedRun.model_fields.items()
        if get_origin(field.annotation) is not list
    ]


def percent_without_doubt(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The figures with MFUs as percentages, without their sign: 60.4% is 60.4.

    `mfu_percent` says what it is. Of the name `mfu` a value up to 1 may be a fraction as well: raises ConfigError.
    """
    plain = dict(values)
    for key in ("mfu", "mfu_percent"):
        value = values.get(key)
        if isinstance(value, str) and value.rstrip().endswith("%"):
            plain[key] = value.rstrip()[:-1].rstrip()
        elif key == "mfu" and (number := as_number(value)) is not None and 0 < number <= 1:
            raise ConfigError(
                f"{where}: mfu: found {value}; give mfu_percent={float(100 * number):.10g} (or mfu_percent={value} if "
                "it is that low)"
            )
    return plain


def as_number(value: Any) -> Decimal | None:
    """A finite number, exactly as it is written; None for anything else."""
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def whole_number(text: str) -> int | str:
    """A whole number that is written with a point or an exponent (1.36e9) as what it is; any other text as it was."""
    number = as_number(text)
    if number is None or not 0 <= number.adjusted() <= MOST_DIGITS or number != number.to_integral_value():
        return text
    return int(number)


def is_whole(key: str) -> bool:
    """Whether a figure is one whole number."""
    field = ReportedRun.model_fields.get(ALIASES.get(key, key))
    return field is not None and field.annotation in (int, int | None, Positive | None, Count | None)


def without_aliases(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The figures by their own names. Raises ConfigError where one is given under two of its names."""
    renamed: dict[str, Any] = {}
    for key, value in values.items():
        name = ALIASES.get(key, key)
        if name in renamed:
            raise ConfigError(f"{where}: {name} is given twice, as {renamed[name]!r} and {value!r}; which is it?")
        renamed[name] = value
    return renamed


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
        key, value = key.strip().replace("-", "_"), value.strip()
        if key in values:
            raise ConfigError(f"--reported: {key} is given twice, as {values[key]!r} and {value!r}; which is it?")
        plain = value if key in ("gpu", "gpu_name") else value.replace(",", "")
        values[key] = whole_number(plain) if is_whole(key) else plain
    if not values:
        raise ConfigError("--reported: no figures given; write key=value, as in gpu='NVIDIA B200' num_gpus=8")
    return make_reported(values, "--reported")

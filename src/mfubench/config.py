"""The one schema: what a run is, from a YAML key to a tensor.

Every value of a run has one type, one name and one default, and all of them stand here. A study's YAML is
expanded into `RunConfig` objects when Snakemake parses the workflow (see `experiments/`), one of them is handed
to a training job as a JSON string, and the same JSON is embedded in the run log that the analysis reads.

No torch here: this module is imported wherever a workflow is parsed.
"""

from __future__ import annotations

import itertools
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field, model_validator

from mfubench.complaints import explain_all, place

LARGEST_INTEGER = 2**53  # that a JSON number holds exactly wherever it is read
Attention = Literal["auto", "fa4", "fa3", "fa2", "cudnn", "sdpa", "eager"]
Parallelism = Literal["none", "ddp", "zero1", "fsdp"]
Dtype = Literal["float32", "bfloat16", "float16"]

# What a run has in common with the one whose checkpoint it goes on from: shapes, order of the data, schedule
SAME_TO_CONTINUE = ("model", "dataset", "seq_len", "seed", "optimizer")
RUN_NAME = r"^[a-z0-9_-]+/[a-z0-9][a-z0-9.-]*$"
PROFILED_MICRO_STEPS = 64  # longest step that is profiled: some 1,500 kernels each, with all that surrounds them

# Settings that may fall back to something else on the machine at hand. A run may `require` some of them: it is then
# skipped, with the reason, rather than measured as something other than what its name says.
Fallible = Literal[
    "attention",
    "compile",
    "cuda_graphs",
    "loader",
    "loss",
    "parallelism",
    "dtype",
    "tf32",
    "fp8",
    "norm",
    "rope",
    "swiglu",
    "gelu",
    "cross_entropy",
    "weight_gradient",
    "adamw",
    "reduction",
]


class ConfigError(ValueError):
    """Bad input from a person. The message says where it stands, what was found and what is allowed."""


class Strict(BaseModel):
    """Frozen, no unknown keys, no silent conversions (YAML reads `1e-3` as a string: that is an error here)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelConfig(Strict):
    """Architecture of a decoder-only transformer; keys are those of a Hugging Face config.json where one exists."""

    name: str = Field(description="preset name, for people")
    vocab_size: int = Field(ge=2)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1, description="= num_attention_heads for MHA (the default), fewer for GQA")
    head_dim: int = Field(ge=1, description="default: hidden_size / num_attention_heads")
    max_position_embeddings: int = Field(ge=1)
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_position: Literal["pre", "post"] = "pre"
    position: Literal["learned", "rope", "none"] = "rope"
    mlp: Literal["gelu", "silu", "relu", "swiglu"] = Field("swiglu", description="gelu: tanh form, as in GPT-2")
    qk_norm: bool = Field(False, description="RMSNorm over head_dim of q and k before RoPE (Qwen3)")
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = Field(False, description="LayerNorm only")
    tie_word_embeddings: bool = False
    rope_theta: float = Field(10_000.0, gt=0)
    rms_norm_eps: float = Field(1e-5, gt=0, description="epsilon of every norm, LayerNorm's too")
    initializer_range: float = Field(0.02, gt=0)

    @model_validator(mode="before")
    @classmethod
    def fill_heads(cls, values: Any) -> Any:
        """Derive num_key_value_heads and head_dim where they are not stated."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
        if type(heads) is int and heads >= 1:
            values.setdefault("num_key_value_heads", heads)
            if "head_dim" not in values and type(hidden) is int:
                if hidden % heads:
                    raise ValueError(
                        f"hidden_size {hidden} is not divisible by num_attention_heads {heads}: "
                        "change one of them, or state head_dim"
                    )
                values["head_dim"] = hidden // heads
        return values

    @model_validator(mode="after")
    def check_shapes(self) -> ModelConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: RoPE rotates pairs, so it must be even")
        if self.norm == "rmsnorm" and self.norm_bias:
            raise ValueError("norm_bias needs norm: layernorm (RMSNorm has no bias)")
        return self

    def check_seq_len(self, seq_len: int) -> None:
        """Raises ConfigError for sequences longer than the learned positions; others have no end."""
        if self.position == "learned" and seq_len > self.max_position_embeddings:
            raise ConfigError(
                f"seq_len {seq_len} is above the model's {self.max_position_embeddings} learned "
                "positions (model.max_position_embeddings)"
            )


class OptimizerConfig(Strict):
    """AdamW; weight decay on tensors of two and more dimensions; linear warm-up, then cosine."""

    learning_rate: float = Field(3e-4, gt=0)
    min_learning_rate: float = Field(3e-5, ge=0)
    warmup_iters: int = Field(2000, ge=0, description="learning-rate warm-up; not the measurement's warm-up")
    lr_decay_iters: int = Field(25_000, ge=1)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    grad_clip: float = Field(1.0, ge=0, description="largest global gradient norm; 0 switches clipping off")

    @model_validator(mode="after")
    def check_schedule(self) -> OptimizerConfig:
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(f"min_learning_rate {self.min_learning_rate} is above learning_rate {self.learning_rate}")
        return self


class LoaderConfig(Strict):
    """How token batches reach the training loop. Both kinds give the same batches."""

    kind: Literal["memmap", "dataloader"] = "memmap"
    num_workers: int = Field(4, ge=1, description="dataloader only")
    prefetch_factor: int = Field(2, ge=1, description="batches each worker holds ready; dataloader only")


class CommunicationConfig(Strict):
    """How the ranks exchange gradients and weights."""

    bucket_mb: float = Field(100.0, gt=0, description="ddp, zero1: gradients reduced together, MB of float32")
    first_bucket_mb: float | None = Field(
        None, gt=0, description="ddp, zero1: the first bucket; smaller than the others, communication starts earlier"
    )
    reduction: Literal["auto", "collective", "exchange"] = Field(
        "auto",
        description="gradients are summed by a collective that adds, or by exchange: copies that take no "
        "multiprocessor from the matmuls, and a short sum on each rank; auto: by exchange between GPUs that can, but "
        "for fsdp, and not over PCIe or bridges",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field("float32", description="of gradients on their way")
    overlap_gather: bool = Field(
        True, description="zero1: gather updated weights while the next forward pass runs, not before it"
    )
    reshard_after_forward: Literal["auto", "always", "never"] = Field(
        "auto", description="fsdp: free gathered weights after each use; auto: where they do not fit"
    )
    prefetch_blocks: int = Field(1, ge=1, description="fsdp: blocks whose weights are gathered ahead")
    shard_ranks: int | None = Field(
        None, ge=1, description="fsdp: ranks among which weights are sharded, copies beyond them; null: all"
    )


class EvaluationConfig(Strict):
    """Loss on val.bin, timed apart from the training steps."""

    interval: int | None = Field(None, ge=1, description="steps between evaluations; null: none during training")
    iters: int = Field(20, ge=1, description="micro-batches per rank and evaluation")
    at_start: bool = False
    at_end: bool = False
    only: bool = Field(False, description="evaluate the checkpoint and stop")

    @property
    def asked_for(self) -> bool:
        """Whether there is any evaluation."""
        return self.interval is not None or self.at_start or self.at_end or self.only


class CheckpointConfig(Strict):
    """Checkpoints of model, optimizer, schedule, loader and random state."""

    interval: int | None = Field(None, ge=1, description="steps between checkpoints; null: none while training")
    at_end: bool = False
    keep: Literal["last", "all"] = "last"


class MeasurementConfig(Strict):
    """Which steps count, and when a measurement run has seen enough."""

    preheat_s: float = Field(0.0, ge=0, description="run unmeasured steps for this long first, so that clocks settle")
    warmup_steps: int = Field(3, ge=0, description="steps after the first one that are run and recorded, not judged")
    adaptive: bool = Field(False, description="stop before max_iters once the median is known well enough")
    min_steps: int = Field(20, ge=1, description="adaptive: measured steps at least")
    tolerance: float = Field(0.005, gt=0, lt=1, description="adaptive: half-width of the median's 95 % interval")
    profile: Literal["none", "kernels", "timeline"] = Field(
        "kernels",
        description="kernels: name those of one extra, unmeasured step in the run log; timeline: also keep a trace of "
        "a whole step of all ranks, taken after the last measured one",
    )
    gradient_interval: int | None = Field(None, ge=1, description="steps between per-layer gradient statistics")


class KernelsConfig(Strict):
    """Own kernels in place of torch's operators, each for itself; auto: where machine and model allow it.

    fused: Triton, one pass over memory. norm: a norm without bias and the residual addition before it; rope: q/k-norm,
    RoPE and the split into q, k and v (without RoPE the split alone, for attention kernels that write the gradients of
    all three as one tensor); swiglu: silu(gate) * up; gelu: GPT-2's, plain or in the matmuls beside it; cross_entropy:
    the softmax of `full` and `chunked` losses, its gradient in place of the logits; adamw: the update, with the weights
    rounded for the next step.
    weight_gradient accumulate: matmuls add to the float32 gradient of all micro-steps themselves.
    """

    norm: Literal["auto", "plain", "fused"] = "plain"
    rope: Literal["auto", "plain", "fused"] = "plain"
    swiglu: Literal["auto", "plain", "fused", "recompute", "matmul"] = Field(
        "plain",
        description="recompute: fused, and computed again in the backward pass: less memory; "
        "matmul: in the matmuls beside it (quack-kernels, Hopper), and computed again there",
    )
    gelu: Literal["auto", "plain", "matmul"] = "plain"
    cross_entropy: Literal["auto", "plain", "fused"] = "plain"
    weight_gradient: Literal["auto", "plain", "accumulate"] = "plain"
    adamw: Literal["auto", "plain", "fused"] = "plain"


class RunConfig(Strict):
    """One training run, complete: nothing that changes its numbers stands anywhere else.

    Batch: tokens per step = micro_batch_size x gradient_accumulation_steps x world_size x seq_len.
    """

    name: str = Field(pattern=RUN_NAME, description="stage/case")
    model: ModelConfig
    dataset: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="key under `datasets:`")
    continues: str | None = Field(
        None, pattern=RUN_NAME, description="run of the same study whose last checkpoint this one starts from"
    )

    seq_len: int = Field(ge=1)
    micro_batch_size: int = Field(ge=1, description="sequences per GPU and micro-step")
    gradient_accumulation_steps: int = Field(1, ge=1, description="micro-steps per GPU and step")
    max_iters: int = Field(ge=1, description="optimizer steps")

    world_size: int = Field(1, ge=1, description="processes, one a GPU")
    nnodes: int = Field(1, ge=1)
    parallelism: Parallelism = "ddp"
    device: Literal["auto", "cuda", "cpu"] = "auto"

    dtype: Dtype = Field("bfloat16", description="compute; masters and optimizer state stay float32")
    tf32: bool = Field(True, description="TF32 in float32 matmuls (CUDA); off means true float32")
    fp8: bool = Field(False, description="float8 matmuls in the blocks (torchao, Hopper and newer)")
    attention: Attention = "auto"
    contrast_attention: Attention | None = Field(
        None, description="skip this run where that backend ends in the same kernel as `attention`: no contrast"
    )
    loss: Literal["auto", "full", "chunked", "fused"] = Field(
        "auto", description="full: all logits at once; chunked: never all; fused: liger-kernel (CUDA)"
    )
    compile: Literal["none", "block", "model"] = "none"
    compile_mode: Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs"] = "default"
    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    cuda_graphs: bool = Field(False, description="capture the whole step: forward, backward, clip, optimizer")
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    kernels: KernelsConfig = KernelsConfig()
    communication: CommunicationConfig = CommunicationConfig()
    loader: LoaderConfig = LoaderConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    measurement: MeasurementConfig = MeasurementConfig()
    sample_tokens: int = Field(0, ge=0, description="tokens to sample from the model after training")
    memory_cap_gib: float | None = Field(None, gt=0, description="memory a process may take; more is out-of-memory")
    seed: int = Field(1234, ge=0)
    repeat: int = Field(0, ge=0, description="number of this repeat, where a case is measured several times")
    requires: tuple[Fallible, ...] = Field(
        (), strict=False, description="settings without which this run is skipped, not measured"
    )

    @computed_field  # type: ignore[prop-decorator]
    @property
    def global_batch_size(self) -> int:
        """Sequences per step over all GPUs."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step over all GPUs."""
        return self.global_batch_size * self.seq_len

    @property
    def stage(self) -> str:
        return self.name.split("/")[0]

    @property
    def case(self) -> str:
        return self.name.split("/")[1]

    @model_validator(mode="before")
    @classmethod
    def drop_derived(cls, values: Any) -> Any:
        """A run log holds the derived global_batch_size too; it is checked on the way back in, never taken."""
        if isinstance(values, dict) and "global_batch_size" in values:
            values = dict(values)
            stated = values.pop("global_batch_size")
            try:
                derived = (
                    values["micro_batch_size"]
                    * values.get("gradient_accumulation_steps", 1)
                    * values.get("world_size", 1)
                )
            except (KeyError, TypeError):
                return values
            if stated != derived:
                raise ValueError(
                    f"global_batch_size is derived (micro_batch_size x gradient_accumulation_steps x world_size "
                    f"= {derived}), but {stated} was given: leave it out and set the three factors"
                )
        return values

    @model_validator(mode="after")
    def check_run(self) -> RunConfig:
        if self.world_size % self.nnodes:
            raise ValueError(f"world_size {self.world_size} is not a multiple of nnodes {self.nnodes}")
        if self.communication.shard_ranks is not None and self.world_size % self.communication.shard_ranks:
            raise ValueError(
                f"world_size {self.world_size} is not a multiple of communication.shard_ranks "
                f"{self.communication.shard_ranks}"
            )
        if self.parallelism == "none" and self.world_size > 1:
            raise ValueError(f"parallelism: none runs one process, but world_size is {self.world_size}")
        self.model.check_seq_len(self.seq_len)
        if self.measurement.profile == "timeline" and self.gradient_accumulation_steps > PROFILED_MICRO_STEPS:
            raise ValueError(
                f"measurement.profile: timeline keeps a whole step, and one of {self.gradient_accumulation_steps} "
                f"micro-steps is too long (at most {PROFILED_MICRO_STEPS}): profile a case with fewer"
            )
        if self.continues == self.name:
            raise ValueError(f"continues: {self.name} cannot start from its own checkpoint (a resume does)")
        if self.fp8 and self.kernels.swiglu in ("recompute", "matmul"):
            raise ValueError(
                f"kernels.swiglu: {self.kernels.swiglu} has a matmul of its own, which fp8 cannot replace; use fused"
            )
        if self.fp8 and self.kernels.gelu == "matmul":
            raise ValueError("kernels.gelu: matmul has matmuls of its own, which fp8 cannot replace; use plain")
        if self.fp8 and self.dtype != "bfloat16":
            raise ValueError(f"fp8 needs dtype: bfloat16 for what stays outside the float8 matmuls, not {self.dtype}")
        return self

    def to_json(self) -> str:
        """One line, keys sorted: the form in which a run travels, and Snakemake's rerun trigger."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)


class MemorySearch(Strict):
    """Find the largest micro-batch that trains: try `candidates` in order, then bisect to the limit."""

    run: RunConfig
    candidates: tuple[int, ...] = Field(min_length=1, strict=False)
    bisect: bool = True
    comfort_fraction: float = Field(
        0.85, gt=0, le=1, description="share of the memory up to which a setting is called comfortable"
    )

    @model_validator(mode="after")
    def check_candidates(self) -> MemorySearch:
        if any(b <= a for a, b in itertools.pairwise(self.candidates)) or self.candidates[0] < 1:
            raise ValueError(f"candidates must be rising and at least 1, found {list(self.candidates)}")
        return self

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)


def parse(schema: type[Strict], values: Any, where: str) -> Any:
    """Validate plain YAML data as `schema`; `where` (file and key path) opens each complaint.

    Raises ConfigError with one line per fault: where, what was found, what is allowed.
    """
    try:
        check_plain(values, where)
        text = json.dumps(values, allow_nan=True)
    except ConfigError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: holds itself, or a key that is no text ({error})") from None
    try:
        return schema.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError("\n".join(explain_all(error.errors(), where, schema))) from None


def check_plain(values: Any, where: str, keys: tuple[str | int, ...] = ()) -> None:
    """Raises ConfigError for what JSON has no word for, and for an integer that no counter of the run holds."""
    if isinstance(values, (dict, list, tuple)):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            check_plain(value, where, (*keys, key))
    elif not isinstance(values, (str, int, float, type(None))):
        what = type(values).__name__
        raise ConfigError(f"{place(where, keys)}: found {values}, which YAML reads as a {what}; put it in quotes")
    elif isinstance(values, int) and abs(values) > LARGEST_INTEGER:
        raise ConfigError(
            f"{place(where, keys)}: found {values}; a whole number here is at most 2^53 = {LARGEST_INTEGER:,}"
        )

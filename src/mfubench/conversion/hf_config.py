"""The three Hugging Face architectures: names of their tensors, and config.json to and from ModelConfig."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mfubench.config import ConfigError, ModelConfig, parse

# GPT-2's names of activations, and ours; "gelu" alone is the exact form there, which the decoder has not
GPT2_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "silu": "silu", "swish": "silu", "relu": "relu"}


@dataclass(frozen=True)
class Layout:
    """Where a Decoder's parameters are in a Hugging Face model."""

    top: dict[str, str]  # module outside the blocks -> its name
    block: str  # prefix of block 0, 1, ...
    modules: dict[str, tuple[str, ...]]  # module of a block -> its name, or the names it is split into
    transposed: bool = False  # GPT-2 keeps the matrices of its blocks as [in, out] (Conv1D)
    always_biased: bool = False  # GPT-2 has every bias

    def tensor_names(self, parameter: str) -> list[str]:
        """Names of the tensors that make up one of our parameters, in the order of its rows."""
        module, _, kind = parameter.rpartition(".")
        if not module.startswith("blocks."):
            return [f"{self.top[module]}.{kind}"]
        _, layer, inner = module.split(".", 2)
        return [f"{self.block}.{layer}.{name}.{kind}" for name in self.modules[inner]]

    def is_transposed(self, parameter: str) -> bool:
        return self.transposed and is_block_matrix(parameter)

    def takes_bias(self, parameter: str) -> bool:
        """Whether a bias stands beside this weight in GPT-2: beside all but the embeddings and the head."""
        return parameter.endswith(".weight") and (parameter.startswith("blocks.") or parameter == "final_norm.weight")


def is_block_matrix(parameter: str) -> bool:
    return bool(re.fullmatch(r"blocks\.\d+\.(attention\.(qkv|output)|mlp\.(gate_up|up|down))\.weight", parameter))


GPT2 = Layout(
    top={
        "token_embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    block="transformer.h",
    modules={
        "attention_norm": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.output": ("attn.c_proj",),
        "mlp_norm": ("ln_2",),
        "mlp.up": ("mlp.c_fc",),
        "mlp.down": ("mlp.c_proj",),
    },
    transposed=True,
    always_biased=True,
)

LLAMA = Layout(  # and Qwen3: the same names, with the two q/k-norms
    top={"token_embedding": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"},
    block="model.layers",
    modules={
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.q_norm": ("self_attn.q_norm",),
        "attention.k_norm": ("self_attn.k_norm",),
        "attention.output": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    },
)

ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def layout_of(architecture: str) -> Layout:
    return GPT2 if architecture == "gpt2" else LLAMA


def architecture_of(model: ModelConfig) -> str:
    """Hugging Face's model_type for an architecture; raises ConfigError naming the keys that none of them has."""
    allowed: dict[str, list[Any]]
    if model.norm == "layernorm" or model.position == "learned":
        architecture = "gpt2"
        allowed = {"norm": ["layernorm"], "position": ["learned"], "qk_norm": [False]}
        allowed["mlp"] = sorted(set(GPT2_ACTIVATIONS.values()))
        allowed["num_key_value_heads"] = [model.num_attention_heads]
        allowed["head_dim"] = [model.hidden_size / model.num_attention_heads]
    else:
        architecture = "qwen3" if model.qk_norm else "llama"
        allowed = {"norm": ["rmsnorm"], "position": ["rope"], "mlp": ["swiglu"]}
        if architecture == "qwen3":
            allowed["mlp_bias"] = [False]
    allowed["norm_position"] = ["pre"]
    faults = [
        f"{key}: {getattr(model, key)} (there: {' or '.join(map(str, values))})"
        for key, values in allowed.items()
        if getattr(model, key) not in values
    ]
    if faults:
        raise ConfigError(f"model {model.name}: {ARCHITECTURES[architecture]} cannot express {'; '.join(faults)}")
    return architecture


def config_json(model: ModelConfig, end_of_text: int | None) -> dict[str, Any]:
    """The content of config.json. `end_of_text`: the token that ends generation, None for none."""
    architecture = architecture_of(model)
    common = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": model.initializer_range,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
    }
    if architecture == "gpt2":
        activation = next(theirs for theirs, ours in GPT2_ACTIVATIONS.items() if ours == model.mlp)
        return common | {
            "n_positions": model.max_position_embeddings,
            "n_embd": model.hidden_size,
            "n_layer": model.num_hidden_layers,
            "n_head": model.num_attention_heads,
            "n_inner": model.intermediate_size,
            "activation_function": activation,
            "layer_norm_epsilon": model.rms_norm_eps,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
    return (
        common
        | {
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": model.num_hidden_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_key_value_heads,
            "head_dim": model.head_dim,
            "max_position_embeddings": model.max_position_embeddings,
            "hidden_act": "silu",
            "rms_norm_eps": model.rms_norm_eps,
            "rope_theta": model.rope_theta,  # transformers 4
            "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},  # transformers 5
            "attention_bias": model.attention_bias,
            "attention_dropout": 0.0,
        }
        | ({"mlp_bias": model.mlp_bias} if architecture == "llama" else {})
    )


def read_config_json(directory: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder; raises ConfigError where it is missing or another model's."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); a Hugging Face checkpoint has one") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: is no valid JSON ({error})") from None
    if config.get("model_type") not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{path}: model_type {config.get('model_type')!r} is not supported; supported: {known}")
    return config


def model_config(config: Mapping[str, Any], directory: Path, tensors: Mapping[str, Tensor]) -> ModelConfig:
    """The ModelConfig of a config.json. What the file leaves out has transformers' default, as everywhere."""
    path = directory / "config.json"
    name = Path(config.get("_name_or_path") or directory.resolve()).name
    if config["model_type"] == "gpt2":
        return parse(ModelConfig, {"name": name} | gpt2_values(config, path, tensors), str(path))
    return parse(ModelConfig, {"name": name} | llama_values(config, path), str(path))


def gpt2_values(config: Mapping[str, Any], path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    activation = config.get("activation_function", "gelu_new")
    require(path, "activation_function", activation, tuple(GPT2_ACTIVATIONS))
    require(path, "scale_attn_weights", config.get("scale_attn_weights", True), (True,))
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        require(path, key, config.get(key, False), (False,))
    hidden = config.get("n_embd", 768)
    return {
        "vocab_size": config.get("vocab_size", 50257),
        "hidden_size": hidden,
        "intermediate_size": config.get("n_inner") or 4 * hidden,
        "num_hidden_layers": config.get("n_layer", 12),
        "num_attention_heads": config.get("n_head", 12),
        "max_position_embeddings": config.get("n_positions", 1024),
        "norm": "layernorm",
        "position": "learned",
        "mlp": GPT2_ACTIVATIONS[activation],
        "attention_bias": any_bias(tensors, r"attn\.c_(attn|proj)\.bias"),
        "mlp_bias": any_bias(tensors, r"mlp\.c_(fc|proj)\.bias"),
        "norm_bias": any_bias(tensors, r"ln_(1|2|f)\.bias"),
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
        "rms_norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "initializer_range": config.get("initializer_range", 0.02),
    }


def llama_values(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Llama and Qwen3."""
    qwen = config["model_type"] == "qwen3"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    require(path, "rope_parameters.rope_type", rope.get("rope_type", rope.get("type", "default")), ("default",))
    require(path, "hidden_act", config.get("hidden_act", "silu"), ("silu",))
    require(path, "use_sliding_window", config.get("use_sliding_window", False), (False,))
    values = {
        "norm": "rmsnorm",
        "position": "rope",
        "mlp": "swiglu",
        "qk_norm": qwen,
        "rope_theta": float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
    }
    if qwen:
        values["head_dim"] = 128
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
        "initializer_range",
    ):
        if config.get(key) is not None:
            values[key] = config[key]
    return values


def require(path: Path, key: str, found: Any, allowed: tuple[Any, ...]) -> None:
    if found not in allowed:
        raise ConfigError(f"{path}: {key} {found!r} is not supported; supported: {', '.join(map(str, allowed))}")


def any_bias(tensors: Mapping[str, Tensor], pattern: str) -> bool:
    """Whether a bias of this group is anything but zero, in any layer."""
    return any(bool(tensor.any()) for name, tensor in tensors.items() if re.search(rf"{pattern}$", name))


def is_buffer(name: str) -> bool:
    """Tensors of older checkpoints that hold no parameters: causal masks and RoPE frequencies."""
    return bool(re.search(r"\.attn\.(bias|masked_bias)$|rotary_emb\.inv_freq$", name))


def full_name(name: str, model_type: str) -> str:
    """GPT-2's own checkpoint was saved without the prefix of the head model."""
    return f"transformer.{name}" if model_type == "gpt2" and re.match(r"(wte|wpe|h|ln_f)\.", name) else name

"""Checkpoints in Hugging Face's format: GPT2LMHeadModel, LlamaForCausalLM, Qwen3ForCausalLM.

Hugging Face keeps q, k, v (but in GPT-2) and gate, up as matrices of their own: export splits ours, import merges
theirs. What differs between the architectures' configuration files stands in `hf_config.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mfubench.config import ConfigError, ModelConfig
from mfubench.conversion.hf_config import (
    Layout,
    architecture_of,
    config_json,
    full_name,
    is_buffer,
    layout_of,
    model_config,
    read_config_json,
)
from mfubench.conversion.new_folder import new_folder
from mfubench.model.attention_kernels import eager
from mfubench.model.decoder import Decoder
from mfubench.model.loss import full_loss

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def export_hf(
    state_dict: Mapping[str, Tensor],
    model: ModelConfig,
    out_dir: Path | str,
    tokenizer_dir: Path | str | None = None,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads: config.json, model.safetensors, tokenizer.

    `state_dict` holds a Decoder's parameters by name; they are written in the dtype they have. The folder appears
    whole or not at all. Raises ConfigError where Hugging Face has no architecture for the model (which key), where
    `out_dir` holds something already or cannot be written, or where parameters are missing.
    """
    out_dir = Path(out_dir)
    layout = layout_of(architecture_of(model))
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError(f"{out_dir}: exists already; remove it or name another folder")
    tensors = split_parameters(state_dict, model, layout)
    with new_folder(out_dir) as folder:
        end_of_text = copy_tokenizer(Path(tokenizer_dir), folder) if tokenizer_dir is not None else None
        config = folder / "config.json"
        config.write_text(json.dumps(config_json(model, end_of_text), indent=2) + "\n", encoding="utf-8")
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "model.safetensors").chmod(config.stat().st_mode)  # safetensors writes for the owner alone


def import_hf(directory: Path | str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read such a folder: the architecture, and the parameters by the names they have in a Decoder.

    GPT-2's biases become part of the model where any of their group (attention, MLP, norms) is not zero. Raises
    ConfigError for an architecture or a setting that the decoder has not, and for tensors that do not fit.
    """
    directory = Path(directory)
    config = read_config_json(directory)
    tensors = {
        full_name(name, config["model_type"]): tensor
        for name, tensor in read_tensors(directory).items()
        if not is_buffer(name)
    }
    model = model_config(config, directory, tensors)
    layout = layout_of(architecture_of(model))
    return model, merge_parameters(tensors, model, layout, directory)


def split_parameters(state_dict: Mapping[str, Tensor], model: ModelConfig, layout: Layout) -> dict[str, Tensor]:
    """Our parameters under Hugging Face's names, merged weights split; GPT-2's missing biases as zeros."""
    tensors: dict[str, Tensor] = {}
    for name, shape in parameter_shapes(model).items():
        if name not in state_dict:
            raise ConfigError(f"the checkpoint lacks the parameter {name} of model {model.name}")
        parameter = state_dict[name].detach().cpu()
        if parameter.shape != shape:
            raise ConfigError(f"{name} has shape {list(parameter.shape)}, model {model.name} wants {list(shape)}")
        names = layout.tensor_names(name)
        pieces = parameter.split(piece_sizes(name, model)) if len(names) > 1 else [parameter]
        for piece_name, piece in zip(names, pieces, strict=True):
            tensors[piece_name] = (piece.t() if layout.is_transposed(name) else piece).contiguous()
        if layout.always_biased and layout.takes_bias(name):
            for piece_name in layout.tensor_names(name.removesuffix("weight") + "bias"):
                tensors.setdefault(piece_name, torch.zeros(parameter.shape[0], dtype=parameter.dtype))
    return tensors


def merge_parameters(
    tensors: dict[str, Tensor], model: ModelConfig, layout: Layout, directory: Path
) -> dict[str, Tensor]:
    """Hugging Face's tensors under our names, q, k, v and gate, up merged."""
    parameters: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, shape in parameter_shapes(model).items():
        names = layout.tensor_names(name)
        missing = [piece for piece in names if piece not in tensors]
        if missing:
            raise ConfigError(f"{directory}: lacks the tensor {missing[0]}")
        used.update(names)
        pieces = [tensors[piece].t() if layout.is_transposed(name) else tensors[piece] for piece in names]
        parameters[name] = torch.cat(pieces).contiguous()
        if parameters[name].shape != shape:
            found = list(parameters[name].shape)
            raise ConfigError(f"{directory}: {', '.join(names)} make {found}, config.json says {list(shape)}")
    # a tied head may be stored beside the embedding; zero biases that import leaves out may be there too
    left_over = [
        name
        for name in sorted(set(tensors) - used)
        if not (model.tie_word_embeddings and name == layout.tensor_names("lm_head.weight")[0])
        and not (layout.always_biased and name.endswith(".bias"))
    ]
    if left_over:
        raise ConfigError(f"{directory}: {len(left_over)} tensors have no place in the model, first {left_over[0]}")
    return parameters


def parameter_shapes(model: ModelConfig) -> dict[str, torch.Size]:
    """Names and shapes of a Decoder's parameters, tied ones once."""
    with torch.device("meta"):
        decoder = Decoder(model, 1, eager, full_loss)
    return {name: parameter.shape for name, parameter in decoder.named_parameters()}


def piece_sizes(name: str, model: ModelConfig) -> list[int]:
    """Rows of q, k, v in a merged weight or bias, or of gate and up."""
    if "qkv" in name:
        kv_width = model.num_key_value_heads * model.head_dim
        return [model.num_attention_heads * model.head_dim, kv_width, kv_width]
    return [model.intermediate_size, model.intermediate_size]


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the shards that its index names."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        shards = ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        if not (directory / shard).is_file():
            raise ConfigError(f"{directory}: no {shard}; checkpoints are read in the safetensors format only")
        with safe_open(directory / shard, framework="pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 (no mapping)
    return tensors


def copy_tokenizer(tokenizer_dir: Path, out_dir: Path) -> int | None:
    """Copy a tokenizer's files; returns its end-of-text id, where the folder is one of mfubench's own (meta.json)."""
    if not (tokenizer_dir / "tokenizer.json").is_file():
        raise ConfigError(f"{tokenizer_dir}: holds no tokenizer.json")
    for name in TOKENIZER_FILES:
        if (tokenizer_dir / name).is_file():
            (out_dir / name).write_bytes((tokenizer_dir / name).read_bytes())
    meta = tokenizer_dir / "meta.json"
    return json.loads(meta.read_text(encoding="utf-8"))["eos_id"] if meta.is_file() else None

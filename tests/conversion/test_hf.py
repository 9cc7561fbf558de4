"""The decoder computes what transformers computes, through export and import of the same weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from model.small_models import ARCHITECTURES, GPT2, LLAMA, QWEN3, build, run_config, tokens
from tokenizers import Tokenizer, models, pre_tokenizers

from mfubench.config import ConfigError, ModelConfig
from mfubench.conversion.hf import export_hf, import_hf, parameter_shapes, split_parameters
from mfubench.conversion.hf_config import layout_of
from mfubench.model import build_model

transformers = pytest.importorskip("transformers")


def parameters_of(decoder: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_transformers(architecture: str, tmp_path: Path) -> None:
    """Logits, loss and every gradient, to 1e-5."""
    decoder = build(ARCHITECTURES[architecture])
    export_hf(parameters_of(decoder), decoder.config, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    expected_class = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    assert type(theirs).__name__ == expected_class[architecture.split("-")[0]]
    batch = tokens(2, 22)
    torch.testing.assert_close(decoder.logits(batch[:, :-1]), theirs(batch[:, :-1]).logits, rtol=1e-5, atol=1e-5)

    loss = decoder(batch[:, :-1], batch[:, 1:])
    their_loss = torch.nn.functional.cross_entropy(theirs(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
    torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    their_loss.backward()
    gradients = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    ours = split_parameters(gradients, decoder.config, layout_of(architecture.split("-")[0]))
    their_parameters = dict(theirs.named_parameters())
    assert set(their_parameters) == set(ours)
    for name, parameter in their_parameters.items():
        if name.endswith("bias") and architecture in ("gpt2", "gpt2-untied-relu"):
            continue  # there they exist, here they do not
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_import_of_a_model_transformers_made(architecture: str, tmp_path: Path) -> None:
    """Not our own export: a model that transformers configured, initialised and saved."""
    model = run_config(ARCHITECTURES[architecture]).model
    export_hf(parameters_of(build(model)), model, tmp_path / "ours")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    torch.manual_seed(3)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if architecture.endswith("biased"):
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_()
    theirs.save_pretrained(tmp_path / "theirs")
    imported, state = import_hf(tmp_path / "theirs")
    assert imported.model_dump(exclude={"name"}) == model.model_dump(exclude={"name"})
    decoder = build_model(run_config(imported), device="cpu")
    decoder.load_parameters(state)
    batch = tokens(2, 21)
    torch.testing.assert_close(decoder.logits(batch), theirs(batch).logits, rtol=1e-5, atol=1e-5)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    decoder = build(QWEN3)
    export_hf(parameters_of(decoder), decoder.config, tmp_path / "qwen")
    model, state = import_hf(tmp_path / "qwen")
    assert model == decoder.config.model_copy(update={"name": "qwen"})
    for name, parameter in decoder.named_parameters():
        assert torch.equal(state.pop(name), parameter)
    assert not state


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_the_weights_have_the_mode_of_other_files(umask: int, tmp_path: Path) -> None:
    decoder = build(LLAMA)
    earlier = os.umask(umask)
    try:
        export_hf(parameters_of(decoder), decoder.config, tmp_path / "hf")
    finally:
        os.umask(earlier)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "hf").iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors"), 0o666 & ~umask)


def test_original_gpt2_files_load(tmp_path: Path) -> None:
    """OpenAI's own checkpoint: names without the head model's prefix, causal masks beside the parameters."""
    decoder = build(ARCHITECTURES["gpt2-biased"])
    export_hf(parameters_of(decoder), decoder.config, tmp_path / "hf")
    from safetensors.torch import load_file, save_file

    tensors = {name.removeprefix("transformer."): t for name, t in load_file(tmp_path / "hf/model.safetensors").items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 40, 40)
    save_file(tensors, tmp_path / "hf/model.safetensors")
    model, state = import_hf(tmp_path / "hf")
    assert model.attention_bias and model.mlp_bias and model.norm_bias
    assert torch.equal(state["blocks.1.attention.qkv.bias"], decoder.blocks[1].attention.qkv.bias)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    decoder = build(LLAMA)
    export_hf(parameters_of(decoder), decoder.config, tmp_path / "whole")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert (tmp_path / "sharded/model.safetensors.index.json").exists()
    _, state = import_hf(tmp_path / "sharded")
    assert torch.equal(state["blocks.1.mlp.gate_up.weight"], decoder.blocks[1].mlp.gate_up.weight)


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    """As mfubench prepares one: tokenizer.json, tokenizer_config.json and meta.json."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocab = {symbol: index for index, symbol in enumerate(sorted(alphabet)[:95])} | {"<|endoftext|>": 95}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "meta.json").write_text(json.dumps({"eos_id": 95, "eos_token": "<|endoftext|>"}))
    return folder


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    decoder = build(LLAMA)
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json"):
        export_hf(parameters_of(decoder), decoder.config, tmp_path / "hf", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("architecture", ["gpt2", "llama-gqa", "qwen3"])
def test_exported_model_generates(architecture: str, tokenizer_dir: Path, tmp_path: Path) -> None:
    """As a user would: AutoModelForCausalLM and AutoTokenizer from the folder, greedy, equal to our own arg-max."""
    decoder = build(ARCHITECTURES[architecture])
    export_hf(parameters_of(decoder), decoder.config, tmp_path / "hf", tokenizer_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert model.config.eos_token_id == tokenizer.eos_token_id == 95
    prompt = tokenizer("AB", return_tensors="pt").input_ids
    assert prompt.tolist() == [Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json")).encode("AB").ids]
    found = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=95)
    expected = prompt
    for _ in range(6):
        expected = torch.cat((expected, decoder.logits(expected)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({**LLAMA, "norm_position": "post"}, "norm_position: post"),
        ({**LLAMA, "mlp": "relu"}, "mlp: relu"),
        ({**LLAMA, "position": "none"}, "position: none"),
        ({**QWEN3, "mlp_bias": True}, "mlp_bias: True"),
        ({**GPT2, "mlp": "swiglu"}, "mlp: swiglu"),
        ({**GPT2, "position": "rope"}, "position: rope"),
        ({**GPT2, "num_key_value_heads": 1}, "num_key_value_heads: 1"),
        ({**GPT2, "head_dim": 8}, "head_dim: 8"),
        ({**LLAMA, "norm": "layernorm"}, "norm: layernorm|position: rope"),
    ],
)
def test_what_hugging_face_cannot_express(model: dict, key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=key):
        export_hf({}, ModelConfig(**{"name": "odd", **model}), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_failed_export_leaves_nothing(tmp_path: Path) -> None:
    decoder = build(LLAMA)
    state = parameters_of(decoder)
    del state["final_norm.weight"]
    with pytest.raises(ConfigError, match="lacks the parameter final_norm"):
        export_hf(state, decoder.config, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def test_export_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/precious").write_text("x")
    decoder = build(LLAMA)
    with pytest.raises(ConfigError, match="exists already"):
        export_hf(parameters_of(decoder), decoder.config, tmp_path / "hf")
    assert (tmp_path / "hf/precious").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_type 'llama3'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_hidden_layers": 3}, "lacks the tensor model.layers.2"),
        ({"num_hidden_layers": 1}, "have no place in the model"),
        ({"intermediate_size": 81}, "config.json says"),
        ({"vocab_size": "96"}, "vocab_size"),
    ],
)
def test_import_complains(change: dict, message: str, tmp_path: Path) -> None:
    decoder = build(LLAMA)
    export_hf(parameters_of(decoder), decoder.config, tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        import_hf(tmp_path / "hf")


def test_shapes_without_memory() -> None:
    shapes = parameter_shapes(run_config(GPT2).model)
    assert "lm_head.weight" not in shapes  # tied: one parameter, under the embedding's name
    assert shapes["blocks.0.attention.qkv.weight"] == (144, 48)

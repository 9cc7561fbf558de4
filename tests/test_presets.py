"""Presets by name, with overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from mfubench import presets
from mfubench.config import ConfigError
from mfubench.presets import load_model, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid(name: str) -> None:
    model = load_model(name)
    assert model.name == name


def test_overrides_come_before_what_is_derived() -> None:
    assert load_model("llama2-tiny").head_dim == 32
    assert load_model("llama2-tiny", {"hidden_size": 64}).head_dim == 16
    assert load_model("llama2-tiny", {"num_attention_heads": 2}).num_key_value_heads == 2
    assert load_model("qwen3-tiny", {"hidden_size": 64}).head_dim == 64  # stated in the preset


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"no model preset 'lama2-1\.36b'; did you mean 'llama2-1\.36b'\?.*qwen3-tiny"
    ):
        load_model("lama2-1.36b")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"layers": 4}, r"model llama2-tiny\.layers: unknown key"),
        ({"hidden_size": 130}, "130 is not divisible by num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": "1e-6"}, r"write 1\.0e-3"),
    ],
)
def test_overrides_that_do_not_fit(overrides: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model("llama2-tiny", overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "MFUBENCH_CONFIG_DIR"), ("a: [", "no valid YAML"), ("- a", "must map"), ("a: 1", "must map")],
)
def test_damaged_file(text: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "CONFIG_DIR", tmp_path)
    if text is not None:
        (tmp_path / "models.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_model("llama2-tiny")

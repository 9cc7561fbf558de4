"""Files that people write by hand."""

from pathlib import Path

import pytest

from mfubench.config import ConfigError
from mfubench.yaml_files import load_yaml, read_within


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"a: 1\nb: 2\na: 3\n", "the key 'a' stands here a second time"),
        (b"x:\n  seq_len: 32\n  seq_len: 64\n", "the key 'seq_len' stands here a second time"),
        (b"cases:\n  1.10: {}\n", "line 2: the key 1.10 is no text, but 1.1; write it in quotes"),
        (b"010: {}\n", "line 1: the key 010 is no text, but 8; write it in quotes"),
        (b"a: {b: [{yes: 1}]}\n", "line 1: the key yes is no text, but True; write it in quotes"),
        (b"12:30: {}\n", "line 1: the key 12:30 is no text, but 750; write it in quotes"),
        (b"null: {}\n", "line 1: the key null is no text, but None; write it in quotes"),
        (b"? [a, b]\n: 1\n", "line 1: the key ['a', 'b'] is no text"),
        ("name: gro\u00dfe\n".encode("latin-1"), "is not UTF-8 text; save it as UTF-8"),
        (b"a: [1, 2\n", "is no valid YAML"),
        (b"a: !!python/object/apply:os.system [echo]\n", "is no valid YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(content, complaint, tmp_path):
    path = tmp_path / "study.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_yaml(path)
    assert str(caught.value).startswith(str(path)) and complaint in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_yaml(tmp_path / "none.yaml")


def test_anchors_and_merges_are_read_as_yaml_has_them(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("base: &base {a: 1, b: 2}\nother: {<<: *base, b: 3}\n")
    assert load_yaml(path)["other"] == {"a": 1, "b": 3}


ROOT = Path(__file__).parents[1]
SHIPPED = sorted(path for folder in ("config", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=[str(path.relative_to(ROOT)) for path in SHIPPED])
def test_all_files_of_this_project_are_read(path):
    assert isinstance(load_yaml(path), dict)


def test_keys_in_quotes_are_taken_as_they_are(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("'1.10': 1\n\"yes\": 2\n1.1-plain: 3\n")
    assert load_yaml(path) == {"1.10": 1, "yes": 2, "1.1-plain": 3}


def test_what_the_command_line_sets_is_read_as_in_a_file():
    """As Snakemake reads `--config 'a={gpus: 2, devices: [5, x], note: "b: c"}'`: everything within as text."""
    given = {"gpus": "2", "devices": ["5", "x"], "slurm": {"extra": "a: b: c", "rate": "0.5"}, "none": "null"}
    read = {"gpus": 2, "devices": [5, "x"], "slurm": {"extra": "a: b: c", "rate": 0.5}, "none": None}
    assert read_within(given) == read
    assert read_within("2") == "2" and read_within(3) == 3  # Snakemake's own reading of what stands alone


@pytest.mark.parametrize(
    "text", ["[SEP]", "{a}", "a: b", "- a", "# x", "x # y", "&a", "2024-12-05", "2024-13-45", "0b_"]
)
def test_a_text_of_the_command_line_that_had_quotes_stays_one(text):
    """They are gone when it comes here: `--config 'tokenizers={x: {eos_token: "[SEP]"}}'`."""
    assert read_within({"key": text, "list": [text]}) == {"key": text, "list": [text]}

"""Files that people write by hand."""

import pytest

from mfubench.config import ConfigError
from mfubench.yaml_files import load_yaml


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"a: 1\nb: 2\na: 3\n", "the key 'a' stands here a second time"),
        (b"x:\n  seq_len: 32\n  seq_len: 64\n", "the key 'seq_len' stands here a second time"),
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

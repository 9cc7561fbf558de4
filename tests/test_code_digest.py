"""The digest follows meaning: comments, docstrings, layout and Python's version do not count."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mfubench.code_digest import code_digest, file_digest

SOURCE = '''"""Module."""

import os  # a comment


def twice(x: int, *, label: str = "a") -> int:
    """Docstring."""
    message = f"{label!r}: {x:>{8}} {'nested'}"
    print(message, None, ...)
    return 2 * x
'''

SAME = {
    "comment": SOURCE.replace("# a comment", "# another"),
    "docstring": SOURCE.replace("Docstring.", "Says more."),
    "no docstring": SOURCE.replace('    """Docstring."""\n', ""),
    "blank lines": SOURCE.replace("\n\n\n", "\n\n\n\n\n"),
    "quotes": SOURCE.replace('"a"', "'a'"),
    "exploded call": SOURCE.replace("print(message, None, ...)", "print(\n    message,\n    None,\n    ...,\n    )"),
}
DIFFERENT = {
    "number": SOURCE.replace("2 * x", "3 * x"),
    "text": SOURCE.replace('"a"', '"b"'),
    "name": SOURCE.replace("message", "notice"),
    "f-string format": SOURCE.replace("{8}", "{9}"),
    "constant": SOURCE.replace("None", "True"),
    "one-tuple": SOURCE.replace("return 2 * x", "return (2 * x,)"),
}


def digest_of(tmp_path: Path, source: str) -> str:
    path = tmp_path / "module.py"
    path.write_text(source)
    return code_digest([path])


@pytest.mark.parametrize("change", SAME)
def test_layout_and_comments_do_not_count(tmp_path, change):
    assert SAME[change] != SOURCE
    assert digest_of(tmp_path, SAME[change]) == digest_of(tmp_path, SOURCE)


@pytest.mark.parametrize("change", DIFFERENT)
def test_meaning_counts(tmp_path, change):
    assert DIFFERENT[change] != SOURCE
    assert digest_of(tmp_path, DIFFERENT[change]) != digest_of(tmp_path, SOURCE)


def test_a_folder_is_all_its_modules_and_a_new_one_counts(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    before = code_digest([tmp_path])
    (tmp_path / "b.py").write_text("y = 1\n")
    assert code_digest([tmp_path]) != before
    with pytest.raises(FileNotFoundError):
        code_digest([tmp_path / "gone.py"])


def other_pythons():
    found = [shutil.which(f"python3.{minor}") for minor in (11, 12, 13, 14)]
    return [path for path in found if path and runs(path) and Path(path).resolve() != Path(sys.executable).resolve()]


def runs(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


@pytest.mark.skipif(not other_pythons(), reason="no other Python version on this machine")
def test_every_python_version_gives_the_same_digest():
    """Over the whole package, which uses what the language has."""
    package = Path(__file__).parents[1] / "src" / "mfubench"
    program = (
        f"import sys; sys.path.insert(0, {str(package)!r}); import code_digest; "
        f"print(code_digest.code_digest([{str(package)!r}]))"
    )
    for python in other_pythons():
        printed = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
        assert printed == code_digest([package]), python


def test_file_digest_is_of_the_bytes(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: 1\n")
    before = file_digest(path)
    path.write_text("a: 1 # changed\n")
    assert file_digest(path) != before

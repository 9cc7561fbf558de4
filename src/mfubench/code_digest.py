"""A digest of what code means, for Snakemake's rerun triggers.

Snakemake does not see an imported module, and takes a touched script for a changed one. Rules therefore carry a
digest of the code behind them as a parameter: a changed statement makes their results stale; comments, docstrings,
formatting, a fresh clone or another Python version do not.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

# What a training's numbers depend on beside its configuration and the machine: files and folders of this package
TRAINING = (
    "config.py",
    "run_log.py",
    "model",
    "train",
    "data/reader.py",
    "decisions.py",
    "kernel_families.py",
    "profiling/chrome_trace.py",
    "profiling/trace_file.py",
)
# Not part of the meaning: load/store context, the u of u"", type comments.
IGNORED_FIELDS = {"ctx", "kind", "type_comment", "type_ignores"}


def code_digest(paths: Iterable[Path | str]) -> str:
    """Digest of Python files and of all Python files below folders; 16 hexadecimal digits.

    Raises FileNotFoundError for a path that is not there, SyntaxError for a file that is not Python.
    """
    digest = hashlib.sha256()
    for path in sorted(python_files(paths), key=lambda path: path.as_posix()):
        digest.update(path.name.encode())
        digest.update(meaning(path.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:16]


def file_digest(*paths: Path | str) -> str:
    """Digest of the bytes of data files; 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:16]


def text_digest(text: str) -> str:
    """Digest of a text; 16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def python_files(paths: Iterable[Path | str]) -> Iterator[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            yield from path.rglob("*.py")
        elif path.is_file():
            yield path
        else:
            raise FileNotFoundError(path)


@cache  # most files are behind several rules
def meaning(source: str) -> str:
    """The syntax tree as text, without docstrings, positions and empty fields.

    Empty fields are left out because each Python version adds some (`type_params` in 3.12): the text of the same
    source is the same on all of them, which `ast.dump` does not give.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = without_docstring(node.body)
    return describe(tree)


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    is_docstring = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return body[1:] if is_docstring else body


def describe(value: object) -> str:
    if isinstance(value, ast.AST):
        fields = [
            f"{name}={describe(item)}"
            for name, item in ast.iter_fields(value)
            if name not in IGNORED_FIELDS and item is not None and item != []
        ]
        if isinstance(value, ast.Constant) and value.value is None:
            fields = ["value=None"]
        return f"{type(value).__name__}({','.join(fields)})"
    if isinstance(value, list):
        return f"[{','.join(map(describe, value))}]"
    return repr(value)

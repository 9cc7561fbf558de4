"""docs/faults.md names the tests of every fault, and every such test stands there: the table cannot rot."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "faults.md"


def named() -> set[str]:
    """`file::test` as the page names them."""
    return set(re.findall(r"`([\w/]+\.py::\w+)`", PAGE.read_text(encoding="utf-8")))


def marked(mark: str) -> set[str]:
    """`file::test`, below tests/, of every test with a mark, its own or its module's."""
    found = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        of_module = [ast.unparse(node) for node in body if isinstance(node, ast.Assign)]
        whole = any(line.startswith("pytestmark") and f"mark.{mark}" in line for line in of_module)
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                own = any(f"mark.{mark}" in ast.unparse(decorator) for decorator in node.decorator_list)
                if whole or own:
                    found.add(f"{path.relative_to(ROOT / 'tests')}::{node.name}")
    return found


def test_every_test_that_the_page_names_exists_and_is_run_by_test_faults():
    assert named() - marked("faults") - marked("cluster") == set()


def test_every_fault_that_is_tested_stands_on_the_page():
    assert marked("faults") - named() == set()


def test_every_row_says_what_is_seen_what_follows_and_where_it_is_tested():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    assert len(rows) > 25
    assert all(len(row) == 4 and all(row) for row in cells)

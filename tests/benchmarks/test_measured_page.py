"""docs/measured.md says what the shipped files say, and README nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import measured_page

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_shipped_files_make() -> None:
    page = measured_page.PAGE.read_text(encoding="utf-8")
    assert measured_page.fill(page, measured_page.TABLES) == page
    assert set(re.findall(r"<!-- table (\w+) -->", page)) == set(measured_page.TABLES)


def test_every_figure_of_readme_stands_on_the_page() -> None:
    readme, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/measured.md"))
    measured = re.search(r"^## Measured$(.*?)^## ", readme, re.DOTALL | re.MULTILINE)
    assert measured is not None
    words = re.sub(r"!\[.*?\]", "", measured[1])  # a picture's words are rounded
    figures = re.findall(r"[+−]?\d+\.\d+ %|\d+,\d{3}|\b1\.\d{3}\b", words)
    assert len(figures) > 40
    assert [figure for figure in figures if figure not in page] == []


def test_a_cell_says_where_auto_took_another_attention() -> None:
    """Qwen3's micro-batch 2 ran cuDNN's attention, its control FlashAttention-3: worth of both."""
    (row,) = (row for row in measured_page.claim_table().splitlines() if row.startswith("| micro-batch 2 instead of 6"))
    assert re.search(r"−10\.4 % \(.*?\), attention fa3 → cudnn <sup>[a-z]</sup>", row)


def test_rows_without_a_result_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran out of memory has no rate, and a comparison without a peer no ratio."""
    rows = measured_page.read_rows(measured_page.RESULTS / "peers-llama2-1.36b.json")
    own = next(row for row in rows if row["system"] == "mfubench")
    failed = [row | {"tokens_per_s_per_gpu": None, "status": "oom"} for row in rows if row is not own]
    (tmp_path / "peers-llama2-1.36b.json").write_text(json.dumps([own, *failed]))
    monkeypatch.setattr(measured_page, "RESULTS", tmp_path)
    lines = measured_page.peer_table().splitlines()[2:]
    assert len(lines) == 1 and "73,914" in lines[0]
    assert [cell.strip() for cell in lines[0].split("|")][-3:-1] == ["", ""]
    assert len(measured_page.scaling_table().splitlines()) == 2

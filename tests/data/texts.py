"""Made-up documents for the tests of this folder."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = "the of and to in a is that for it as was with be by on not he his but at are this have from".split()  # noqa: SIM905
ODD = [
    "naïve",
    "Größe",
    "日本語",
    "🦙",
    "x**2",
    "\t",
    "e\u0301",
    "don't",
    "1234567",
    "</s>",
    "<|endoftext|>",
    "▁",
    "\r\n",
]


def make_documents(count: int, seed: int = 0, words: int = 60) -> list[str]:
    """Documents that differ, with blanks, line breaks and scripts of every kind."""
    choose = random.Random(seed)
    vocabulary = WORDS * 4 + ODD + [f"{a}{b}" for a in WORDS for b in WORDS[:9]]
    return [
        " ".join(choose.choices(vocabulary, k=choose.randint(1, words))) + choose.choice(["", "\n", "  \n\n", "."])
        for _ in range(count)
    ]


def write_jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text(
        "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents), encoding="utf-8"
    )
    return path

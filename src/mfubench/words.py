"""Nouns beside numbers, as sentences need them."""

from __future__ import annotations


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("s") else "s")


def number_of(count: int, noun: str) -> str:
    """1 step, 1,200 steps."""
    return f"{count:,} {noun if count == 1 else plural(noun)}"

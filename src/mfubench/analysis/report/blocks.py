"""What a report consists of, independent of HTML and Markdown. Text may hold `code` and **bold**, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mfubench.analysis.figures.style import Draw


@dataclass(frozen=True)
class Text:
    text: str
    kind: str = "text"


@dataclass(frozen=True)
class Notice:
    """A sentence that must not be overlooked."""

    text: str
    tone: str = "warning"  # good | warning
    kind: str = "notice"


@dataclass(frozen=True)
class Command:
    """A line for a shell, to be copied."""

    command: str
    kind: str = "command"


@dataclass(frozen=True)
class Table:
    """Columns whose title ends in "|" hold text (to the left), the others numbers (to the right)."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    kind: str = "table"

    @property
    def headings(self) -> list[tuple[str, str]]:
        """(title, alignment) of each column."""
        return [(title.removesuffix("|"), "left" if title.endswith("|") else "right") for title in self.columns]


@dataclass(frozen=True)
class Figure:
    """A plot: `name` is its file under figures/, `alt` says in words what it shows."""

    name: str
    alt: str
    draw: Draw
    kind: str = "figure"


@dataclass(frozen=True)
class Card:
    """One recommendation."""

    title: str
    headline: str
    facts: Sequence[str]
    command: str


@dataclass(frozen=True)
class Cards:
    cards: Sequence[Card]
    kind: str = "cards"


@dataclass(frozen=True)
class Folded:
    """Blocks that are there for whoever wants them."""

    summary: str
    blocks: Sequence[Text | Table]
    kind: str = "folded"


Block = Text | Notice | Command | Table | Figure | Cards | Folded


@dataclass(frozen=True)
class Section:
    key: str  # anchor
    title: str
    blocks: list[Block] = field(default_factory=list)

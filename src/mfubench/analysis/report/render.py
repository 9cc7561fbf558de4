"""Blocks to HTML and Markdown."""

from __future__ import annotations

import argparse
import base64
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from mfubench.analysis.figures.style import DARK, LIGHT, png
from mfubench.analysis.findings import Findings
from mfubench.analysis.report.answer_section import answer_section
from mfubench.analysis.report.audit_section import audit_section
from mfubench.analysis.report.blocks import Figure, Section
from mfubench.analysis.report.closing_sections import (
    environment_section,
    extrapolation_section,
    left_out_section,
    reading_section,
    runs_section,
)
from mfubench.analysis.report.expectation_sections import contradictions_section, expected_section
from mfubench.analysis.report.head import head_facts
from mfubench.analysis.report.measured_sections import (
    effects_section,
    loss_section,
    memory_section,
    scaling_section,
    steps_section,
)
from mfubench.analysis.report.profile_section import profile_section
from mfubench.analysis.report.time_section import time_section
from mfubench.analysis.summary import summarize
from mfubench.run_log import write_bytes_atomically, write_json, write_text_atomically


def sections_of(found: Findings) -> list[Section]:
    """The report from the answer to the small print."""
    expectations = found.expectations
    return [
        answer_section(found),
        *([expected_section(found), contradictions_section(found, expectations)] if expectations else []),
        effects_section(found),
        scaling_section(found),
        memory_section(found),
        loss_section(found),
        steps_section(found),
        time_section(found),
        profile_section(found),
        left_out_section(found),
        extrapolation_section(found),
        runs_section(found),
        environment_section(found),
        audit_section(found),
        reading_section(),
    ]


def write_report(
    study_folder: Path | str,
    html: Path | str,
    markdown: Path | str | None = None,
    summary: Path | str | None = None,
    partial: bool = False,
    figures: Path | str | None = None,
) -> None:
    """Write the report of results/<study>. Raises ConfigError as `load_study` does.

    figures: folder for the report's pictures as PNG, to which the Markdown refers; without it, to those that the
    workflow has drawn in the study's folder.
    """
    found = Findings.of(study_folder, partial=partial)
    sections = sections_of(found)
    facts = head_facts(found)
    images = draw_figures(found, sections)
    if figures is not None:
        Path(figures).mkdir(parents=True, exist_ok=True)
        for name, by_theme in images.items():
            write_bytes_atomically(Path(figures) / f"{name}.png", by_theme[LIGHT.name])
    write_text_atomically(html, render_html(sections, facts, images))
    if markdown is not None:
        shown = Path(figures) if figures is not None else Path(study_folder) / "figures"
        write_text_atomically(markdown, render_markdown(sections, facts, shown, Path(markdown).parent))
    if summary is not None:
        write_json(summary, summarize(found))


def templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("mfubench.analysis.report"),
        autoescape=lambda name: bool(name and name.endswith(".html.j2")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["inline"] = inline_html
    environment.filters["cell"] = markdown_cell
    return environment


def inline_html(text: str) -> Markup:
    """Escaped text with `code` and **bold** as elements."""
    html = str(escape(text))
    parts = re.split(r"`([^`]+)`", html)  # text and code by turns
    for position, part in enumerate(parts):
        if position % 2:
            parts[position] = f"<code>{part}</code>"
        else:  # long file names may break after an underscore, a number never before its per cent
            parts[position] = re.sub(r"(?<=[a-z])_(?=[a-z])", "_<wbr>", part).replace(" %", "\u00a0%")
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", "".join(parts)))


def markdown_cell(text: str) -> str:
    """Text for one cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def draw_figures(found: Findings, sections: list[Section]) -> dict[str, dict[str, bytes]]:
    """PNG of each of the report's pictures, by its name and the theme's."""
    return {
        block.name: {theme.name: png(block.draw, found, theme) for theme in (LIGHT, DARK)}
        for section in sections
        for block in section.blocks
        if isinstance(block, Figure)
    }


def render_html(sections: list[Section], facts: dict[str, Any], images: dict[str, dict[str, bytes]]) -> str:
    """One self-contained page: pictures inside, nothing fetched."""
    inside = {name: {theme: data_uri(image) for theme, image in by_theme.items()} for name, by_theme in images.items()}
    return templates().get_template("report.html.j2").render(sections=sections, facts=facts, images=inside)


def data_uri(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode('ascii')}"


def render_markdown(sections: list[Section], facts: dict[str, Any], figures: Path, folder: Path) -> str:
    """The same in Markdown; pictures are those in the folder `figures`, by a path relative to the document."""
    drawn = {path.stem for path in figures.glob("*.png")}
    template = templates().get_template("report.md.j2")
    text = template.render(sections=sections, facts=facts, figures=os.path.relpath(figures, folder), drawn=drawn)
    return re.sub(r"\n{3,}", "\n\n", text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a study's report.")
    parser.add_argument("--study-dir", required=True, type=Path)
    parser.add_argument("--html", required=True, type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--summary", type=Path)
    parser.add_argument("--partial", action="store_true", help="include what failed and why")
    arguments = parser.parse_args(argv)
    write_report(
        arguments.study_dir,
        arguments.html,
        markdown=arguments.markdown,
        summary=arguments.summary,
        partial=arguments.partial,
    )
    return 0

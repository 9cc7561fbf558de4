"""The tables of docs/measured.md from the results that ship: `python -m benchmarks.measured_page`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from benchmarks.rows import is_own, markdown_table, spread_of
from mfubench.analysis.effects import Effect
from mfubench.analysis.findings import Findings
from mfubench.analysis.units import format_interval, format_percent, format_signed_percent
from mfubench.flops import flop_terms, flops_per_token
from mfubench.hardware import peak_for
from mfubench.planner.pages import fill
from mfubench.presets import load_model

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "measured.md"
RESULTS = ROOT / "benchmarks" / "results"
STUDIES = ROOT / "results" / "reference" / "h200"
MODELS = {"llama2-1.36b": "LLaMA-2 1.36B", "qwen3-1.8b": "Qwen3 1.8B"}
FOLLOWS = ("attention", "loss")  # `auto` may take another beside what an effect is about


@cache
def studies() -> dict[str, Findings]:
    """The studies that ship with effects, by folder name, in the order of their letters."""
    folders = sorted(path.parent for path in STUDIES.glob("*/study.json"))
    return {folder.name: Findings.of(folder, partial=True) for folder in folders}


def letters() -> dict[str, str]:
    return dict(zip(studies(), ascii_lowercase, strict=False))


def mark(folder: str) -> str:
    return f"<sup>{letters()[folder]}</sup>"


def study_table() -> str:
    """The studies behind the letters."""
    lines = []
    for folder, found in studies().items():
        environment = found.study.environment
        assert environment is not None, folder
        cards = f"{len(environment.gpus)} × {environment.gpus[0].name.removeprefix('NVIDIA ')}"
        attentions = sorted({log.used["attention"].used for log in found.study.runs.values()})
        link = f"[{folder}](../results/reference/h200/{folder}/report.md)"
        lines.append([letters()[folder], link, cards, f"{len(found.good)}", ", ".join(attentions)])
    return table(["", "study", "cards", "measured runs", "attention that ran"], lines)


def claim_table() -> str:
    """What each declared effect is worth, by model; of every study that measured it."""
    cells: dict[str, dict[str, list[str]]] = {}
    expected: dict[str, str] = {}
    for folder, found in studies().items():
        model = next(iter(found.study.runs.values())).config.model.name
        for effect in found.effects:
            if effect.difference is None:
                continue
            cells.setdefault(effect.name, {}).setdefault(model, []).append(f"{worth(effect)} {mark(folder)}")
            expected[effect.name] = effect.expected or ""
    lines = [
        [name, expected[name], *("<br>".join(by_model.get(model, [])) for model in MODELS)]
        for name, by_model in cells.items()
    ]
    return table(["setting", "expected", *MODELS.values()], lines)


def worth(effect: Effect) -> str:
    """The change and its interval, and what else `auto` took differently."""
    assert effect.difference is not None
    measured = effect.difference
    change = format_signed_percent(measured.change) if measured.is_difference else str(effect.verdict)
    others = [f"{key} {before} → {after}" for key, (before, after) in effect.differs_in.items() if key in FOLLOWS]
    words = f"{change} ({format_interval(measured.interval)})"
    return f"{words}, {', '.join(others)}" if others else words


def study_scaling_table() -> str:
    """Rates per GPU on two GPUs over those on one, of the same study."""
    lines = [
        [
            MODELS[next(iter(found.study.runs.values())).config.model.name],
            f"`{point.case}`",
            f"{point.tokens_per_s_per_gpu:,.0f}",
            f"{format_percent(point.efficiency)} ({format_percent(point.interval.low)} to "
            f"{format_percent(point.interval.high)}) {mark(folder)}",
        ]
        for folder, found in studies().items()
        for point in found.scaling
        if point.world_size > point.reference_world_size and point.efficiency is not None and point.interval
    ]
    return table(["model", "case on two GPUs", "tokens/s/GPU", "of one GPU's rate"], lines)


def peer_table() -> str:
    """Own systems of every comparison over its fastest peer with float32 masters."""
    lines = []
    for path in sorted(RESULTS.glob("peers-*.json")):
        rows = [row for row in read_rows(path) if row["tokens_per_s_per_gpu"]]
        peers = [row for row in rows if not is_own(row) and row["master_weights"] == "float32"]
        best = max(peers, key=rate_of, default=None)
        for row in sorted(filter(is_own, rows), key=rate_of, reverse=True):
            other, ratio = "", ""
            if best is not None:
                other = (
                    f"{named(best)}, {batch_of(best)}: {rate_of(best):,.0f} ({spread_of(best['tokens_per_s_per_gpu'])})"
                )
                ratio = f"{rate_of(row) / rate_of(best):.3f}"
            rate = f"{rate_of(row):,.0f} ({spread_of(row['tokens_per_s_per_gpu'])})"
            link = f"[{path.stem.removeprefix('peers-')}](../benchmarks/results/{path.stem}.md)"
            name = row["system"].removeprefix("mfubench").removeprefix("-")
            card = row["card"].removeprefix("NVIDIA ").split()[0]
            lines.append([link, name, card, batch_of(row), rate, format_percent(mfu_of(row)), other, ratio])
    header = ["comparison", "", "card", "batch", "mfubench, tokens/s", "MFU (palm)", "fastest other", "ratio"]
    return table(header, lines)


def scaling_table() -> str:
    """Joint jobs over the same cards by themselves, fewest cards first, then by model and batch."""
    found = [(path, row) for path in sorted(RESULTS.glob("scaling-*.json")) for row in read_rows(path)]
    measured = [(path, row) for path, row in found if row.get("efficiency") is not None]
    measured.sort(key=lambda item: [item[1][key] for key in ("world_size", "model", "gradient_accumulation_steps")])
    lines = []
    for path, row in measured:
        together = [share for share in row["alone_overlap"] if share is not None]
        lines.append(
            [
                f"{row['world_size']}",
                row["model"],
                batch_of(row),
                job_of(row),
                f"{rate_of(row):,.0f}",
                efficiency(row["efficiency"]),
                format_percent(row["efficiency_of_slowest"]["median"]),
                f"{min(together):.0%}" if together else "",
                f"[{path.stem.removeprefix('scaling-')}](../benchmarks/results/{path.stem}.md)",
            ]
        )
    header = ["GPUs", "model", "batch", "job", "tokens/s/GPU", "of the cards' own rate", "of the slowest's"]
    return table([*header, "alone at once", "comparison"], lines)


def job_of(row: Mapping[str, Any]) -> str:
    """System, parallelism and, of the own, what sums the gradients."""
    words = f"{row['system']}, {row['parallelism']}"
    return (
        f"{words}, by {row['settings'].get('communication', {}).get('reduction', 'collective')}"
        if is_own(row)
        else words
    )


def efficiency(found: Mapping[str, Any]) -> str:
    """The median over repeats, with their range where there are several."""
    median, values = format_percent(found["median"]), found["by_repeat"]
    if len(values) == 1:
        return median
    return f"{median} ({format_percent(min(values))} to {format_percent(max(values))}, {len(values)} repeats)"


def mfu_of(row: Mapping[str, Any]) -> float:
    """By the palm convention, of the dense peak of the dtype that its matmuls ran in."""
    peak = peak_for(row["card"], "bfloat16", False, fp8=bool(row["settings"].get("fp8")))
    flops = flops_per_token(flop_terms(load_model(row["model"]), row["seq_len"]), "palm")
    return rate_of(row) * flops / (peak.tflops * 1e12)


def rate_of(row: Mapping[str, Any]) -> float:
    return row["tokens_per_s_per_gpu"]["median"]


def batch_of(row: Mapping[str, Any]) -> str:
    return f"{row['micro_batch_size']} × {row['gradient_accumulation_steps']}"


def named(row: Mapping[str, Any]) -> str:
    version = row["version"] or ""
    return row["system"] if version.startswith("sha256") else f"{row['system']} {version.split(' ')[0]}"


def read_rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return markdown_table(header, lines).rstrip("\n")


TABLES: Mapping[str, Callable[[], str]] = {
    "studies": study_table,
    "claims": claim_table,
    "two": study_scaling_table,
    "peers": peer_table,
    "scaling": scaling_table,
}


def main() -> None:
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), TABLES), encoding="utf-8")


if __name__ == "__main__":
    main()

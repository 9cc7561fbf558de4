"""What `mfubench watch` shows: read from the files of a run, finished or not. No torch."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mfubench import result_files
from mfubench.config import ConfigError
from mfubench.result_files import is_run_log, study_of
from mfubench.run_log import RunLog, Step, read_run_log, read_steps
from mfubench.telemetry_record import CardTelemetry
from mfubench.train.arguments import result_of, work_by_hand
from mfubench.train.progress import describe, live_values, palm_mfu_of

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60  # columns of a sparkline, where the console has as many
GAP = 2  # columns of space between a table's
SILENT_AFTER_S = 60.0  # without news, a live run is said to be silent


@dataclass
class View:
    """What there is to show of a run at one moment."""

    name: str
    state: str
    finished: bool
    live: dict[str, Any] | None
    steps: list[Step]
    mfu_factor: float | None  # MFU (palm) of one token a second and GPU
    world_size: int
    cards: list[dict[str, Any]] = field(default_factory=list)  # last telemetry sample
    held_out_loss: float | None = None  # of the last evaluation, once the run has ended


def watch_run(path: Path, *, once: bool, interval_s: float, until: Callable[[], object] = lambda: None) -> None:
    """Show a run until it ends, or `until` says so (by anything true). Raises ConfigError where there is none."""
    console = Console()
    view = look(path)
    if once or view.finished:
        console.print(render(view, console.width))
        return
    with Live(render(view, console.width), console=console, auto_refresh=False) as display:
        while not view.finished and not until():
            time.sleep(interval_s)
            try:
                view = look(path)
            except (ConfigError, FileNotFoundError):  # started anew: its files are gone for a moment
                continue
            display.update(render(view, console.width), refresh=True)


def follow_study(folder: Path, *, interval_s: float) -> None:
    """Show the runs below a folder one after the other, each until it ends, until Ctrl-C.

    Raises ConfigError where there is none yet, in the end KeyboardInterrupt.
    """
    work: Path | None = newest_run(folder)
    shown = 0.0
    while True:
        if work is not None:
            began = modified_at(work / "partial.json")
            # one that was killed never ends: it is over once another begins
            superseded = functools.partial(begun_after, folder, began, but=work)
            watch_run(work, once=False, interval_s=interval_s, until=superseded)
            shown = max(began, modified_at(work / "partial.json"))
        time.sleep(interval_s)
        work = begun_after(folder, shown)


def begun_after(folder: Path, moment: float, but: Path | None = None) -> Path | None:
    """The work folder of the newest run below a folder, where it began after a moment and is not `but`."""
    try:
        work = newest_run(folder)
    except ConfigError:  # the only one is made anew: its files are gone for a moment
        return None
    return work if work != but and modified_at(work / "partial.json") > moment else None


def look(path: Path) -> View:
    """The present state of a run: its JSON, its work folder, or the newest of those in a folder above.

    In place of a run JSON that is not there yet its run's work folder is looked at.
    """
    if path.is_dir():
        return view_of_folder(newest_run(path))
    if not path.exists():
        work = next((folder for folder in work_folders(path) if folder.is_dir()), None)
        if work is None:
            raise ConfigError(f"{path}: does not exist (a run JSON is written when its run ends); no run is at it")
        return view_of_folder(newest_run(work))
    if not is_run_log(result_files.read_json(path)):
        raise ConfigError(f"{path}: is no run JSON (runs/<stage>/<case>.json); of a memory search watch a trial")
    return view_of_log(read_run_log(path))


def work_folders(run: Path) -> list[Path]:
    """Where a run that will write this JSON may be at work: of a study, and by hand."""
    study = study_of(run)
    of_study = [study / "work" / run.parent.name / run.stem] if study is not None else []
    return [*of_study, work_by_hand(run)]


def newest_run(folder: Path) -> Path:
    """The work folder itself, or of those below it (a case's, a study's) the one whose run began last."""
    if (folder / "partial.json").exists():
        return folder
    found = {path: modified_at(path) for path in folder.rglob("partial.json")}
    if not found:
        ended = "; of a run that has ended name its JSON" if next(folder.glob("runs/*/*.json"), None) else ""
        raise ConfigError(f"{folder}: no run is at work here yet (there is no partial.json below it){ended}")
    return max(found, key=lambda path: found[path]).parent


def modified_at(path: Path) -> float:
    """Seconds since the epoch; of a file that has gone meanwhile 0."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def view_of_log(log: RunLog) -> View:
    factor = palm_mfu_of(log)
    live = None
    if log.steps and log.memory:
        fullest = max(log.memory, key=lambda memory: memory.peak_reserved_gib or memory.peak_rss_gib)
        live = live_values(log, fullest, fullest.peak_allocated_gib, factor)
        live |= {"status": log.status, "stopped_early": log.stopped_early}
    state = f"{log.status}: {log.reason}" if log.reason else words_of_end(log.status, log.stopped_early)
    cards = [flatten_card(card) for card in log.telemetry.get("gpus", [])] if log.telemetry is not None else []
    held_out = log.evaluations[-1].loss if log.evaluations else None
    return View(log.name, state, True, live, log.steps, factor, log.config.world_size, cards, held_out)


def words_of_end(status: str, stopped_early: str | None) -> str:
    """How a run ended; `stopped_early`: why it did before max_iters, where it did."""
    if status != "ok":
        return status
    return "finished" if stopped_early is None else f"finished early: {stopped_early}"


def flatten_card(card: CardTelemetry) -> dict[str, Any]:
    """A card's summary as one sample: the median of every spread."""
    return {key: value.get("median") if isinstance(value, dict) else value for key, value in card.items()}


def view_of_folder(work: Path) -> View:
    """A run that goes on, or one that ended and left its last words in the folder."""
    partial = work / "partial.json"
    log = read_run_log(partial)
    if (result := result_of(work, log.name)) is not None:
        return view_of_log(read_run_log(result))
    live = read_json(work / "live.json")
    status = live["status"] if live is not None else None
    if (failure := read_json(work / "failure.json")) is not None:
        status, state = "failed", f"failed: {failure['reason']}"
    elif (stopped := read_json(work / "stopped.json")) is not None:
        status, state = "stopped", f"stopped after {stopped['step']} steps, to be resumed"
    elif live is not None and status is not None:
        state = words_of_end(status, live["stopped_early"])
    else:
        state = "running"
        silent_s = time.time() - (live["updated_at"] if live is not None else partial.stat().st_mtime)
        if silent_s > SILENT_AFTER_S:
            state = f"running? no news for {silent_s:.0f} s"
    steps = read_steps(work / "steps.jsonl")
    factor = palm_mfu_of(log)
    live = live | {"status": status} if live is not None else None
    return View(log.name, state, status is not None, live, steps, factor, log.config.world_size, last_cards(work))


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def last_cards(work: Path) -> list[dict[str, Any]]:
    """The cards of the last whole line of telemetry.jsonl."""
    path = work / "telemetry.jsonl"
    if not path.exists():
        return []
    with open(path, "rb") as stream:
        stream.seek(max(0, path.stat().st_size - 65_536))
        lines = stream.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        try:
            sample = json.loads(line)
        except json.JSONDecodeError:
            continue
        return sample.get("cards", []) if "time" in sample else []
    return []


def render(view: View, width: int) -> RenderableType:
    """What is shown of a run on a console of so many columns."""
    parts: list[RenderableType] = [Text.assemble((view.name, "bold"), f"  {view.state}")]
    if view.live is not None:
        parts.append(Text(describe(view.live)))
    if view.steps:
        parts.append(series_table(view, width))
    if view.held_out_loss is not None:
        parts.append(Text(f"validation loss {view.held_out_loss:.4f}"))
    if any(card.get("power_w") is not None for card in view.cards):
        parts.append(cards_table(view.cards))
    return Group(*parts)


def series_table(view: View, width: int) -> Table:
    """Sparklines over the steps: MFU (or tokens/s, where no peak is known), loss, gradient norm."""
    per_gpu = [step.tokens / step.step_time_s / view.world_size for step in view.steps]
    rows: list[tuple[str, Sequence[float | None], str]] = []
    if view.mfu_factor is not None:
        rates = [rate * view.mfu_factor for rate in per_gpu]
        rows.append(("MFU (palm)", rates, f"{rates[-1]:.1%}"))
    else:
        rows.append(("tokens/s a process", per_gpu, f"{per_gpu[-1]:,.0f}"))
    for name, values in (
        ("loss", [step.loss for step in view.steps]),
        ("gradient norm", [step.grad_norm for step in view.steps]),
    ):
        rows.append((name, values, f"{values[-1]:.4f}" if values[-1] is not None else "not finite"))
    beside = max(len(name) for name, _, _ in rows) + max(len(last) for _, _, last in rows) + 2 * GAP
    columns = max(1, min(WIDTH, width - beside))  # a longer line would lose its newest end
    table = Table.grid(padding=(0, GAP))
    for name, series, last in rows:
        table.add_row(name, sparkline(series, columns), last)
    return table


def cards_table(cards: list[dict[str, Any]]) -> Table:
    table = Table("card", "power W", "SM MHz", "°C", "busy %", box=None, padding=(0, 2))
    for index, card in enumerate(cards):
        values = (card.get(key) for key in ("power_w", "sm_clock_mhz", "temperature_c", "utilization_percent"))
        table.add_row(str(index), *("-" if value is None else f"{value:.0f}" for value in values))
    return table


def sparkline(values: Sequence[float | None], width: int = WIDTH) -> str:
    """The values as bars, averaged into `width` columns; a column without a finite value is blank."""
    columns = []
    for column in range(min(width, len(values))):
        start, end = (len(values) * edge // min(width, len(values)) for edge in (column, column + 1))
        part = [value for value in values[start:end] if value is not None and math.isfinite(value)]
        columns.append(sum(part) / len(part) if part else None)
    known = [value for value in columns if value is not None]
    if not known:
        return " " * len(columns)
    low, span = min(known), max(known) - min(known)
    heights = [None if v is None else round((v - low) / span * (len(BARS) - 1)) if span else 0 for v in columns]
    return "".join(" " if height is None else BARS[height] for height in heights)

from __future__ import annotations

import importlib
import io
import json
import re
import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
from analysis.example_study import declare, make_gpu_log, write_memory_search
from factories import make_run_log
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from mfubench.analysis.figures.style import (
    DARK,
    LIGHT,
    MARKERS,
    Theme,
    empty_figure,
    machine_label,
    peak_label,
    per_gpu,
    plain_axes,
    png,
    titled_figure,
)
from mfubench.analysis.findings import Findings
from mfubench.analysis.measures import measure
from mfubench.analysis.roofline import Point
from mfubench.run_log import read_run_log, write_run_log
from mfubench.run_plot import draw as draw_run

NAMES = ("throughput", "ladder", "effects", "scaling", "memory", "loss", "mfu_over_time", "waterfall", "roofline")
SCRIPTS = Path(__file__).parents[2] / "workflow" / "scripts"


def module(name: str):
    return importlib.import_module(f"mfubench.analysis.figures.{name}")


def texts(found: Findings, name: str) -> str:
    """All words that a figure shows."""
    with LIGHT.applied():
        figure = module(name).draw(found, LIGHT)
    words = [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]
    return "\n".join(words)


@pytest.fixture(scope="module")
def gpu(gpu_study: Path) -> Findings:
    return Findings.of(gpu_study)


@pytest.fixture(scope="module")
def cpu(cpu_study: Path) -> Findings:
    return Findings.of(cpu_study)


@pytest.fixture(scope="module")
def smoke_only(cpu_study: Path, tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """What exists after the first stage: nothing that most figures could show."""
    folder = Path(shutil.copytree(cpu_study, tmp_path_factory.mktemp("smoke") / "study"))
    for path in (folder / "runs").glob("*/*.json"):
        if path.parent.name != "smoke":
            path.unlink()
    return Findings.of(folder)


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_names_the_machine(gpu: Findings, name: str):
    shown = texts(gpu, name)
    assert "8× NVIDIA H100 80GB HBM3" in shown
    assert "Nothing to show" not in shown


@pytest.mark.parametrize("name", NAMES)
def test_a_study_with_smoke_tests_alone_gets_honest_panels(smoke_only: Findings, name: str):
    image = Image.open(io.BytesIO(png(module(name).draw, smoke_only, LIGHT)))
    assert image.width > 1000
    if name != "loss":  # a smoke test has a loss
        assert "Nothing to show" in texts(smoke_only, name)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_themes_paint_their_background(cpu: Findings, theme: Theme):
    image = Image.open(io.BytesIO(png(module("scaling").draw, cpu, theme))).convert("RGB")
    assert "#{:02x}{:02x}{:02x}".format(*image.getpixel((2, 2))) == theme.background


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_series_can_be_told_apart_in_grey(theme: Theme):
    """The first three colours differ in lightness from one another and from the background; markers differ anyway."""

    def lightness(color: str) -> float:
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    assert all(abs(lightness(color) - lightness(theme.background)) > 50 for color in theme.series[:3])
    assert len(set(MARKERS)) >= len(theme.series)


def test_units_convention_and_n(gpu: Findings, cpu: Findings):
    shown = texts(gpu, "throughput")
    assert "tokens/s/GPU" in shown and "palm" in shown and "n = 76" in shown and "989.4 TFLOP/s bf16" in shown
    shown = texts(cpu, "throughput")
    assert "tokens/s/process" in shown and "(measured)" in shown and "GPU" not in shown.replace("no GPU", "")


def test_effects_show_no_difference_and_what_was_expected(gpu: Findings):
    shown = texts(gpu, "effects")
    assert "no difference" in shown and "expected by the testing guide" in shown
    assert "FSDP" not in shown  # not measured: in the table, with the reason, and not in the plot


def test_scaling_with_one_world_size_says_so(cpu_study: Path, tmp_path: Path):
    folder = Path(shutil.copytree(cpu_study, tmp_path / "study"))
    (folder / "runs" / "scaling" / "2.1-plain-gpus2.json").unlink()
    assert "only world size 1 was measured" in texts(Findings.of(folder), "scaling")


def test_out_of_memory_is_told_in_the_throughput_figure(gpu: Findings):
    assert "out of memory" in texts(gpu, "throughput")


def test_memory_names_the_limit(gpu: Findings):
    shown = texts(gpu, "memory")
    assert "all of it: 79.2 GiB" in shown and "largest 30, out of memory at 31" in shown


def test_the_waterfall_falls_from_the_peak_to_the_measured_step(gpu: Findings):
    shown = texts(gpu, "waterfall")
    assert "FLOPs of the model at the peak" in shown and "MFU 100.0 %" in shown
    assert "matmuls: this card's ceiling" in shown and "attention: above the ceiling" in shown
    assert "MFU: causal, of 989.4 TFLOP/s bf16 (datasheet, dense)" in shown and "n = 76" in shown
    assert "tiers/tier3, world size 8, rank 1" in shown and "% causal" in shown


def test_the_roofline_has_both_roofs_and_every_group(gpu: Findings):
    shown = texts(gpu, "roofline")
    assert "datasheet: 989.4 TFLOP/s, 3,352 GB/s" in shown and "measured: 752 TFLOP/s, 2,960 GB/s" in shown
    for group in ("matmuls", "attention", "activation", "RoPE and head layout"):
        assert f"{group}, " in shown
    assert "gradient accumulation, 0.9 %" in shown


def test_no_label_of_the_roofline_lies_on_a_roof_and_no_line_crosses_another(gpu: Findings):
    """Matmuls of long names far from the slope, and, as on a CPU, slower groups beyond faster ones."""
    roofline = module("roofline")
    names = ("matmul: attention output", "matmul: MLP down", "matmul: qkv", "attention", "activation", "loss", "norms")
    kinds = ("matmul", "matmul", "matmul", "attention", "memory", "memory", "memory")
    figures = {
        "GPU": ((1100, 623), (1570, 684), (1620, 690), (597, 370), (1.1, 2.7), (0.9, 2.1), (0.8, 1.9)),
        "CPU": ((40, 0.9), (46, 0.2), (52, 0.6), (38, 0.4), (1.1, 0.01), (1.3, 0.03), (0.8, 0.02)),
    }
    for where, places in figures.items():
        points = [
            Point(name, kind, intensity * 1e9, 1e9, intensity * 1e9 / tflops / 1e12)
            for name, kind, (intensity, tflops) in zip(names, kinds, places, strict=True)
        ]
        roof = roofline.Roof("datasheet", *((989.4, 4800.0) if where == "GPU" else (1.0, 40.0)), "-", "k")
        figure = titled_figure(LIGHT, "", "", 4.2)
        axes = figure.subplots()
        roofline.draw_roofs(axes, [roof], points)
        roofline.draw_points(axes, points, [roof], SimpleNamespace(rank=SimpleNamespace(step_s=1.0)), LIGHT)
        axes.set(xscale="log", yscale="log")
        figure.draw_without_rendering()
        for text in axes.texts:
            box = text.get_window_extent().transformed(axes.transData.inverted())
            assert box.y1 < roof.at(box.x0), (where, text.get_text())
        placed = roofline.labels_of(points, 1.0, axes.get_xlim(), [roof])
        assert {label.point.label for label in placed} == set(names)
        lines = [
            [
                complex(*axes.transData.transform(end))
                for end in ((one.point.intensity, one.point.tflops), (one.x, one.y))
            ]
            for one in placed
        ]
        assert not any(roofline.cross(*one, *other) for one, other in combinations(lines, 2)), where


def drawn(found: Findings, name: str) -> Figure:
    with LIGHT.applied():
        figure = module(name).draw(found, LIGHT)
        figure.draw_without_rendering()
    return figure


def noisy(study: Path, folder: Path, stretched: float) -> Findings:
    """A copy of a study of whose measured steps every third takes `stretched` times of its time."""
    study = Path(shutil.copytree(study, folder / "study"))
    for path in (study / "runs").glob("*/*.json"):
        log = read_run_log(path)
        for step in log.measured_steps()[::3]:
            step.step_time_s *= stretched
        write_run_log(path, log)
    return Findings.of(study)


def test_steps_are_whole_numbers_and_no_mfu_is_below_0(cpu_study: Path, tmp_path: Path):
    """Runs of ten steps, whose axis would have a tick at 2.5, and steps that differ by more than they take."""
    study = Path(shutil.copytree(cpu_study, tmp_path / "steps"))
    for path in (study / "runs").glob("*/*.json"):
        log = read_run_log(path)
        ranks = [times[:10] for times in log.rank_step_times_s]
        write_run_log(path, log.model_copy(update={"steps": log.steps[:10], "rank_step_times_s": ranks}))
    found = noisy(study, tmp_path, 8.0)
    panels = [axes for axes in drawn(found, "mfu_over_time").axes if axes.get_title(loc="left")]
    assert len(panels) == 5
    for axes in panels:
        assert all(tick == round(tick) for tick in axes.get_xticks())
        assert axes.get_ylim()[0] == 0
    assert "start at 0" not in " ".join(texts(found, "mfu_over_time").split())
    run = draw_run(found.study.runs["baseline/1.1-plain"], LIGHT)
    assert all(tick == round(tick) for axes in run.axes for tick in axes.get_xticks())


def test_axes_say_that_they_do_not_start_at_0_only_where_it_is_true(gpu: Findings, cpu_study: Path, tmp_path: Path):
    told = {name: " ".join(texts(gpu, name).split()) for name in ("mfu_over_time", "ladder", "memory")}
    assert "axes do not start at 0" in told["mfu_over_time"]
    assert all("axis does not start at 0" in told[name] for name in ("ladder", "memory"))
    found = noisy(cpu_study, tmp_path, 8.0)
    (axes,) = drawn(found, "ladder").axes
    assert axes.get_ylim()[0] == 0 and "start at 0" not in " ".join(texts(found, "ladder").split())


def test_the_scaling_axis_says_that_it_does_not_start_at_0_only_where_it_is_true(
    gpu: Findings, cpu_study: Path, tmp_path: Path
):
    assert "axis does not start at 0" in texts(gpu, "scaling")
    found = noisy(cpu_study, tmp_path, 8.0)
    assert drawn(found, "scaling").axes[0].get_ylim()[0] == 0
    assert "start at 0" not in texts(found, "scaling")


def shaded(axes: Axes) -> list[tuple[float, float]]:
    """Ends of the spans over steps."""
    spans = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.zorder == 0]
    return [(span.get_x(), span.get_x() + span.get_width()) for span in spans]


def test_the_measured_steps_before_a_resume_are_not_shaded(changed_study: Path):
    """20 steps of a first process and those of a second, each with one that compiles and its warm-up."""
    before, after = make_run_log(name="tiers/tier3", step_count=20), make_run_log(name="tiers/tier3", first_step=20)
    log = after.model_copy(update={"steps": before.steps + after.steps, "rank_step_times_s": []})
    warm = sum(step.phase != "measured" for step in before.steps)
    spans = [(0.5, warm + 0.5), (20.5, 20 + warm + 0.5)]
    assert all(shaded(axes) == spans for axes in draw_run(log, LIGHT).axes)
    write_run_log(changed_study / "runs" / "tiers" / "tier3.json", log)
    panels = {axes.get_title(loc="left"): axes for axes in drawn(Findings.of(changed_study), "mfu_over_time").axes}
    assert shaded(panels["tiers/tier3  (1 GPU)"]) == spans


def test_crosses_are_the_outliers_of_the_table():
    """One step 1.5 % slower than the rest, within the share below which nothing is an outlier, and one 4 %."""
    log = make_run_log(max_iters=60)
    for step in log.measured_steps():
        step.step_time_s = 1.0 + 0.0001 * (step.step % 5)
    log.steps[30].step_time_s, log.steps[40].step_time_s = 1.015, 1.04
    judged = measure(log, None)
    axes = Figure().subplots()
    module("mfu_over_time").draw_steps(axes, judged, True, LIGHT)
    (crosses,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert list(crosses.get_xdata()) == [41] and judged.stability.outliers == 1


def test_warm_up_steps_beyond_the_axis_are_triangles():
    """One that took ten times as long as the measured ones and one a tenth."""
    log = make_run_log(max_iters=60)
    for step in log.steps:
        step.step_time_s = 1.0
    log.steps[0].step_time_s, log.steps[1].step_time_s = 10.0, 0.1
    assert all(step.phase != "measured" for step in log.steps[:2])
    axes = Figure().subplots()
    module("mfu_over_time").draw_steps(axes, measure(log, None), True, LIGHT)
    marks = {line.get_marker(): list(line.get_xdata()) for line in axes.lines if line.get_marker() in ("v", "^")}
    assert marks == {"v": [1], "^": [2]}


@pytest.mark.parametrize("stretched", [0.6, 0.1], ids=["within", "beyond"])
def test_no_bar_of_the_ladder_runs_through_a_label(cpu_study: Path, tmp_path: Path, stretched: float):
    """Bars up to 1.7 times of a point, and beyond the axis."""
    figure = drawn(noisy(cpu_study, tmp_path, stretched), "ladder")
    (axes,) = figure.axes
    bars = [bar for container in axes.containers for bar in container[2]]
    segments = [axes.transData.transform(segment) for bar in bars for segment in bar.get_segments()]
    labels = [text for text in axes.texts if "MFU" in text.get_text()]
    assert len(labels) == len(segments) == 2
    for label in labels:
        box = label.get_window_extent()
        assert not any(box.x0 <= x <= box.x1 and low < box.y1 and high > box.y0 for (x, low), (_, high) in segments)
        assert box.y1 <= axes.bbox.y1


def test_a_bar_of_the_ladder_that_goes_beyond_the_axis_has_an_arrow(cpu_study: Path, tmp_path: Path, gpu: Findings):
    found = noisy(cpu_study, tmp_path, 0.1)
    (axes,) = drawn(found, "ladder").axes
    assert [line.get_marker() for line in axes.lines].count("^") == 2
    shown = " ".join(texts(found, "ladder").split())
    assert "to 106,300" in shown and "arrows: beyond the axis" in shown
    assert "arrows" not in texts(gpu, "ladder")


def test_a_rung_that_was_left_out_stands_at_its_place(changed_study: Path):
    path = changed_study / "runs" / "tiers" / "tier2.json"
    log = read_run_log(path)
    write_run_log(path, log.model_copy(update={"status": "skipped", "steps": [], "rank_step_times_s": []}))
    declared = json.loads((changed_study / "study.json").read_text())
    declared["skipped"]["tiers/tier4"] = "needs cuda_graphs"
    (changed_study / "study.json").write_text(json.dumps(declared))
    axes = drawn(Findings.of(changed_study), "ladder").axes[1]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["tier1", "tier2", "tier3", "tier4"]
    assert [text.get_position()[0] for text in axes.texts if text.get_text() == "skipped"] == [1, 3]
    assert [text.get_position()[0] for text in axes.texts if "…" in text.get_text()] == [1]  # tier3 over tier1


def test_no_label_of_the_ladder_lies_on_its_line(gpu: Findings):
    for axes in drawn(gpu, "ladder").axes:
        (line,) = [line for line in axes.lines if line.is_dashed()]
        path = line.get_path().transformed(axes.transData)
        labels = [text for text in axes.texts if "MFU" in text.get_text()]
        assert len(labels) == 3
        assert not any(path.intersects_bbox(label.get_window_extent(), filled=False) for label in labels)


def test_effects_beyond_the_axis_have_an_arrow_and_a_number(changed_study: Path):
    path = changed_study / "runs" / "baseline" / "1.1-plain.json"
    log = read_run_log(path)
    for step in log.measured_steps():
        step.step_time_s *= 24.49
    write_run_log(path, log)
    (axes,) = drawn(Findings.of(changed_study), "effects").axes
    arrows = [line for line in axes.lines if line.get_marker() == ">"]
    assert 0 in [int(arrow.get_ydata()[0]) for arrow in arrows]  # the largest change stands first
    assert any(re.fullmatch(r"\+2,\d\d\d %", text.get_text()) for text in axes.texts)


def test_the_box_of_what_was_expected_is_whole(gpu: Findings):
    (axes,) = drawn(gpu, "effects").axes
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_hatch()]
    left, right = axes.get_xlim()
    assert len(boxes) == 5
    assert all(left < box.get_x() and box.get_x() + box.get_width() < right for box in boxes)


def test_the_box_of_what_was_expected_is_the_range_it_is_judged_by(gpu: Findings):
    """The testing guide's "20 %" for torch.compile is a single figure: 17 to 23 % is as expected."""
    (axes,) = drawn(gpu, "effects").axes
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_hatch()]
    ranges = [(round(box.get_x(), 4), round(box.get_x() + box.get_width(), 4)) for box in boxes]
    assert (0.17, 0.23) in ranges and (0.05, 0.15) in ranges


def test_numbers_of_micro_batches_stand_clear_of_the_line(cpu_study: Path, tmp_path: Path):
    """A slow trial among faster ones: the line runs above its point on both sides."""
    study = Path(shutil.copytree(cpu_study, tmp_path / "study"))
    write_memory_search(study)
    path = study / "memory" / "5.1-limit.json"
    limit = json.loads(path.read_text())
    for trial in limit["trials"]:
        if trial["micro_batch_size"] == 16:
            trial["tokens_per_s_per_gpu"] = 20_000
    path.write_text(json.dumps(limit))
    (axes,) = drawn(Findings.of(study), "memory").axes
    curve = axes.lines[0].get_path().transformed(axes.transData)
    numbers = [text for text in axes.texts if text.get_text().isdigit()]
    assert "16" in [number.get_text() for number in numbers]
    assert not any(curve.intersects_bbox(number.get_window_extent(), filled=False) for number in numbers)


def test_a_panel_without_a_figure_holds_its_whole_reason():
    figure = empty_figure(LIGHT, "title", "subtitle", "; ".join(f"tiers/tier{n} has not been run" for n in range(40)))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    box = axes.texts[0].get_bbox_patch().get_window_extent()
    assert box.y0 >= 0 and box.y1 <= min(text.get_window_extent().y0 for text in figure.texts)


def test_the_loss_figure_explains_only_what_it_shows(gpu: Findings, changed_study: Path):
    shown = " ".join(texts(gpu, "loss").split())
    assert "moving median of 15 steps in runs of 60 or more; marks: held-out text" in shown
    assert "gradient norm (logarithmic)" in shown
    path = changed_study / "runs" / "training" / "pretrain.json"
    log = read_run_log(path)
    changes = {"steps": log.steps[:20], "rank_step_times_s": [times[:20] for times in log.rank_step_times_s]}
    write_run_log(path, log.model_copy(update=changes | {"evaluations": []}))
    shown = " ".join(texts(Findings.of(changed_study), "loss").split())
    assert "line: every step ·" in shown and "held-out" not in shown and "moving" not in shown


def test_peaks_of_one_precision_are_of_shares_of_the_machine():
    """A CPU's, of one process and of two that share its cores."""
    peaks = [SimpleNamespace(tflops=tflops, dtype="fp32", measured=True) for tflops in (0.35, 0.175)]
    words = module("throughput").mfu_words([SimpleNamespace(peak=peak) for peak in peaks])
    assert words.startswith("MFU of the peak of each case's share of the machine: 0.35 TFLOP/s fp32 (measured) or 0.1")


def test_the_number_of_a_lower_curve_is_clear_of_the_line_above(gpu: Findings):
    _, right = drawn(gpu, "scaling").axes
    curves = [line.get_path().transformed(right.transData) for line in right.lines if not line.is_dashed()]
    boxes = [text.get_window_extent() for text in right.texts]
    assert len(boxes) == len(curves) > 1
    assert not any(
        curve.intersects_bbox(box, filled=False)
        for number, curve in enumerate(curves)
        for other, box in enumerate(boxes)
        if number != other
    )


def test_slow_rates_of_a_roofline_are_in_the_unit_of_the_tables():
    """A CPU's, below 0.1 TFLOP/s."""
    roofline = module("roofline")
    axes = Figure().subplots()
    point = Point("matmuls", "matmul", 40e9, 1e9, 1.0)
    roofline.draw_roofs(axes, [roofline.Roof("fastest matmul measured", 0.04721, 30.0, "-", "k")], [point])
    (label,) = axes.get_legend().get_texts()
    assert label.get_text() == "fastest matmul measured: 47.21 GFLOP/s, 30 GB/s"
    assert roofline.unit_of_axis([point]) == ("GFLOP/s", 1000.0)


def test_titles_name_what_a_cpu_study_counts(gpu: Findings, cpu: Findings):
    assert "What is left of a process's rate" in texts(cpu, "scaling")
    assert "What is left of a GPU's rate" in texts(gpu, "scaling")
    assert "tiers/tier1  (8 GPUs)" in texts(gpu, "mfu_over_time")
    assert "baseline/1.1-plain  (1 process)" in texts(cpu, "mfu_over_time")


def test_a_mark_of_held_out_text_at_step_0_is_whole(changed_study: Path):
    path = changed_study / "runs" / "training" / "pretrain.json"
    log = read_run_log(path)
    first = log.evaluations[0].model_copy(update={"step": 0})
    write_run_log(path, log.model_copy(update={"evaluations": [first, *log.evaluations]}))
    (marks,) = [line for line in drawn(Findings.of(changed_study), "loss").axes[0].lines if line.get_marker() == "o"]
    assert marks.get_xdata()[0] == 0 and not marks.get_clip_on()


def test_ticks_have_separators_of_thousands(gpu: Findings):
    (axes,) = drawn(gpu, "waterfall").axes
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert "1,000" in ticks and "1000" not in ticks
    axes = Figure().subplots()
    plain_axes(axes, "y")
    axes.plot([0, 70_000], [0.0, 0.0003])
    assert "60,000" in axes.xaxis.get_major_formatter().format_ticks([20_000, 60_000])
    assert axes.yaxis.get_major_formatter().format_ticks([0.0001, 0.00015, 0.0003])[1] == "0.00015"


def test_every_peak_is_named(gpu: Findings):
    """Three precisions in one study."""
    peaks = ((989.4, "bf16"), (494.7, "tf32"), (1978.9, "fp8"))
    measures = [SimpleNamespace(peak=SimpleNamespace(tflops=t, dtype=d, measured=False)) for t, d in peaks]
    assert peak_label(measures) == (
        "1,979 TFLOP/s fp8 (datasheet, dense), 989.4 TFLOP/s bf16 (datasheet, dense) or "
        "494.7 TFLOP/s tf32 (datasheet, dense)"
    )
    assert "MFU of the peak of each case's precision: 989.4" in " ".join(texts(gpu, "throughput").split())


def test_an_efficiency_that_cannot_be_is_named_and_not_drawn(changed_study: Path):
    path = changed_study / "runs" / "scaling" / "2.1-plain-gpus8.json"
    log = read_run_log(path)
    for step in log.measured_steps():
        step.step_time_s /= 3
    write_run_log(path, log)
    found = Findings.of(changed_study)
    shown = " ".join(texts(found, "scaling").split())
    assert re.search(r"left out as no scaling \(more than 105 %\): 2.1-plain at 8 \(28\d\.\d %\)", shown)
    assert "2.1-plain: 98." in shown and "tokens/s in all (logarithmic; dotted: ideal)" in shown
    left, _ = drawn(found, "scaling").axes
    assert max(left.lines[0].get_ydata()) == 1 and left.get_ylim()[1] < 1.1
    for other in (changed_study / "runs" / "scaling").glob("2.2-*"):
        other.unlink()
    (changed_study / "runs" / "scaling" / "2.1-plain-gpus4.json").unlink()
    shown = " ".join(texts(Findings.of(changed_study), "scaling").split())
    assert "Nothing to show: left out as no scaling" in shown


def test_an_interval_of_an_efficiency_that_goes_beyond_the_axis_has_an_arrow(cpu_study: Path, tmp_path: Path):
    found = noisy(cpu_study, tmp_path, 8.0)
    left, _ = drawn(found, "scaling").axes
    assert [line.get_marker() for line in left.lines].count("^") == 1
    shown = texts(found, "scaling")
    assert "arrows: beyond the axis" in " ".join(shown.split()) and "too noisy to tell" in shown


def test_a_single_micro_batch_size_is_told_in_words(cpu_study: Path, tmp_path: Path):
    study = Path(shutil.copytree(cpu_study, tmp_path / "study"))
    write_memory_search(study)
    path = study / "memory" / "5.1-limit.json"
    limit = json.loads(path.read_text())
    limit["trials"] = [trial for trial in limit["trials"] if trial["micro_batch_size"] in (4, 32)]
    path.write_text(json.dumps(limit))
    shown = " ".join(texts(Findings.of(study), "memory").split())
    assert "Nothing to show: a curve needs two micro-batch sizes, and one was measured: micro-batch 4 " in shown
    assert "(59,800 tokens/s/process, 32.9 GiB)" in shown


@pytest.mark.parametrize("share", [1.2, 1.0, 0.7, 0.55, 0.45, 0.2, 0.05])
def test_the_measured_step_is_named_within_its_bar_or_beside_it(gpu: Findings, share: float):
    """Where the profiled step took longer, the bar is short. share: of the profiled step's time."""
    (profiled, *_), missing = gpu.profiles
    short = replace(profiled, measured_step_s=share * profiled.rank.step_s)
    changed = replace(gpu)
    changed.__dict__["profiles"] = ([short], missing)
    figure = drawn(changed, "waterfall")
    (axes,) = figure.axes
    (words,) = [text for text in axes.texts if text.get_text().endswith(" causal")]
    bar = next(patch for patch in axes.patches if to_hex(patch.get_facecolor()) == to_hex(LIGHT.text))
    box, black = words.get_window_extent(), bar.get_window_extent()
    inside = box.x0 >= black.x0 and box.x1 <= black.x1
    assert inside or (box.x0 >= black.x1 and box.x1 <= figure.bbox.x1)
    assert words.get_color() == (LIGHT.background if inside else LIGHT.text)


@pytest.mark.parametrize("name", ["waterfall", "roofline"])
def test_without_a_profile_a_figure_says_how_to_get_one(cpu: Findings, name: str):
    assert "profile: timeline" in texts(cpu, name)


def test_the_loss_figures_legend_covers_no_curve(changed_study: Path):
    """As many runs as it shows, with names as long as they come, whose loss stays where it began."""
    log = make_gpu_log("training/pretrain", 1)
    flat = [step.model_copy(update={"loss": 10.4}) for step in log.steps]
    for number in range(4):
        name = f"training/pretrain-with-a-long-name-{number}"
        changes = {"name": name, "config": log.config.model_copy(update={"name": name}), "steps": flat}
        write_run_log(changed_study / "runs" / f"{name}.json", log.model_copy(update=changes))
        declare(changed_study, name)
    with LIGHT.applied():
        figure = module("loss").draw(Findings.of(changed_study), LIGHT)
        figure.draw_without_rendering()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 5
    box = legend.get_window_extent()
    assert all(not box.overlaps(axes.get_tightbbox()) for axes in figure.axes)
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_its_script(name: str):
    source = (SCRIPTS / f"plot_{name}.py").read_text(encoding="utf-8")
    assert f"from mfubench.analysis.figures.{name} import main" in source


def test_a_script_writes_its_file(cpu_study: Path, tmp_path: Path):
    output = tmp_path / "figures" / "ladder.png"
    assert module("ladder").main(["--study-dir", str(cpu_study), "--output", str(output)]) == 0
    assert Image.open(output).format == "PNG"


def test_labels(gpu: Findings, cpu: Findings):
    assert machine_label(cpu) == "AMD EPYC 7B13, no GPU"
    assert (per_gpu(gpu), per_gpu(cpu)) == ("tokens/s/GPU", "tokens/s/process")


def test_eight_series_of_a_scaling_figure_are_told_apart():
    """As many as a shipped study has; ends that lie together are named once."""
    found = Findings.of(Path(__file__).parents[2] / "results/reference/h200/llama2-1.36b-scaling", partial=True)
    left, right = drawn(found, "scaling").axes
    lines = [line for line in left.get_lines() if " at 2" in line.get_label()]
    looks = [(line.get_color(), line.get_marker(), line.get_markerfacecolor()) for line in lines]
    assert len(looks) == len(set(looks)) == 8
    assert [text.get_text() for text in right.texts] == ["146k", "112k"]

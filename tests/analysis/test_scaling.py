from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from factories import make_run_log
from matplotlib.text import Text

from mfubench.analysis.figures import scaling
from mfubench.analysis.figures.style import LIGHT
from mfubench.analysis.findings import Findings
from mfubench.analysis.measures import measure
from mfubench.analysis.report.blocks import Notice, Table
from mfubench.analysis.report.measured_sections import scaling_section
from mfubench.analysis.scaling import scaling_points
from mfubench.analysis.tables import scaling_table
from mfubench.run_log import Choice


def test_series_of_the_example(gpu_study: Path):
    points = Findings.of(gpu_study).scaling
    assert [(point.series, point.world_size) for point in points] == [
        (series, size) for series in ("2.1-plain", "2.2-compile") for size in (2, 4, 8)
    ]
    last = points[2]
    assert last.efficiency == pytest.approx(53_000 / 55_000, abs=0.003)
    assert last.interval is not None and last.interval.low < last.efficiency < last.interval.high < 1
    assert last.tokens_per_s == pytest.approx(8 * last.tokens_per_s_per_gpu)
    assert points[0].efficiency == 1 and points[0].interval is None and points[0].reference_world_size == 2


def test_runs_of_other_stages_join_their_series(gpu_study: Path):
    """Tier 1 is the setting of 2.2-compile-gpus8: the point is of all of its processes."""
    found = Findings.of(gpu_study)
    alone = {name: judged for name, judged in found.measures.items() if judged.log.config.stage == "scaling"}
    rates = [point.tokens_per_s_per_gpu for point in scaling_points(alone)]
    joined = [point.tokens_per_s_per_gpu for point in found.scaling]
    assert joined[:3] != rates[:3] or joined[5] != rates[5]
    assert joined[5] == pytest.approx(rates[5], rel=0.005)


def test_one_process_without_parallelism_is_the_start_of_the_ddp_series():
    logs = [
        make_run_log(name="scaling/2.1-plain-gpus1", parallelism="none"),
        make_run_log(name="scaling/2.1-plain-gpus2", world_size=2, parallelism="ddp"),
    ]
    points = scaling_points({log.name: measure(log, None) for log in logs})
    assert [point.world_size for point in points] == [1, 2]
    assert points[1].reference_world_size == 1


def test_one_process_is_the_start_of_every_parallelism():
    def log(parallelism, world_size, step_time_s, **settings):
        case = f"scaling/a-{parallelism}-gpus{world_size}"
        more = {"world_size": world_size, "parallelism": parallelism, "step_time_s": step_time_s}
        return make_run_log(name=case, **more, **settings)

    logs = [log("none", 1, 1.0)]
    logs += [log(parallelism, 2, step) for parallelism, step in (("ddp", 1.25), ("zero1", 2.0), ("fsdp", 4.0))]
    logs += [log("none", 1, 0.5, micro_batch_size=4), log("fsdp", 4, 1.0, micro_batch_size=4)]  # no ddp here
    found = {
        (point.series, point.world_size): (point.efficiency, point.reference_world_size)
        for point in scaling_points({f"{log.name} {log.config.micro_batch_size}": measure(log, None) for log in logs})
    }
    a_half = pytest.approx(0.5, rel=0.03)
    assert found == {
        ("a-ddp", 1): (1, 1),
        ("a-ddp", 2): (pytest.approx(0.8, rel=0.03), 1),
        ("a-zero1", 1): (1, 1),
        ("a-zero1", 2): (a_half, 1),
        ("a-fsdp (micro_batch_size 8)", 1): (1, 1),
        ("a-fsdp (micro_batch_size 8)", 2): (pytest.approx(0.25, rel=0.03), 1),
        ("a-fsdp (micro_batch_size 4)", 1): (1, 1),
        ("a-fsdp (micro_batch_size 4)", 4): (a_half, 1),
    }


def test_how_gradients_are_summed_is_a_series_and_one_process_starts_both():
    logs = {}
    for reduction, step_time_s in (("collective", 1.25), ("exchange", 1.0)):
        more = {"communication": {"reduction": reduction}, "step_time_s": step_time_s}
        log = make_run_log(name=f"scaling/{reduction}-gpus2", world_size=2, parallelism="ddp", **more)
        log.used["reduction"] = Choice(requested=reduction, used=reduction)
        logs[reduction] = log
    alone = make_run_log(name="scaling/a-gpus1", parallelism="none", step_time_s=1.0)
    alone.used["reduction"] = Choice(requested="auto", used="collective", reason="one process")
    points = scaling_points({name: measure(log, None) for name, log in {**logs, "alone": alone}.items()})
    found = {(point.series, point.world_size): point.efficiency for point in points if point.world_size == 2}
    assert found == {("collective", 2): pytest.approx(0.8, rel=0.03), ("exchange", 2): pytest.approx(1.0, rel=0.03)}


def test_auto_that_sums_otherwise_on_several_nodes_is_one_series():
    logs = [make_run_log(name="scaling/a-gpus1", parallelism="none", step_time_s=1.0)]
    for nodes, reduction in ((1, "exchange"), (2, "collective")):
        name, size = f"scaling/a-gpus{8 * nodes}", {"world_size": 8 * nodes, "nnodes": nodes}
        log = make_run_log(name=name, parallelism="ddp", step_time_s=1.0 + nodes / 10, **size)
        log.used["reduction"] = Choice(requested="auto", used=reduction)
        logs.append(log)
    points = scaling_points({log.name: measure(log, None) for log in logs})
    assert [(point.series, point.world_size) for point in points] == [("a", 1), ("a", 8), ("a", 16)]


def test_series_of_runs_that_asked_for_collectives_are_named_by_what_both_have():
    """Two cards joined by another stage's run, whose reduction is not today's usual; `auto` chose another attention."""

    def log(name, world_size, attention):
        asked = {"communication": {"reduction": "collective"}, "attention": "auto"}
        made = make_run_log(name=name, world_size=world_size, parallelism="ddp", step_time_s=1.0, **asked)
        made.used["attention"] = Choice(requested="auto", used=attention, reason="measured")
        made.used["reduction"] = Choice(requested="collective", used="collective")
        return made

    logs = [log("scaling/a-gpus1", 1, "cudnn"), log("scaling/a-gpus2", 2, "fa3"), log("baseline/b", 2, "cudnn")]
    points = scaling_points({log.name: measure(log, None) for log in logs})
    found = sorted((point.series, point.world_size) for point in points)
    assert found == [("a (attention cudnn)", 1), ("a (attention cudnn)", 2), ("a (attention fa3)", 2)]


def test_fsdp_starts_with_the_process_that_captures_what_it_cannot():
    alone = make_run_log(name="scaling/a-gpus1", parallelism="none", cuda_graphs=True, step_time_s=1.0)
    sharded = make_run_log(
        name="scaling/a-gpus2-x", world_size=2, parallelism="fsdp", cuda_graphs=True, step_time_s=1.25
    )
    sharded.used["cuda_graphs"] = Choice(requested="true", used="false", reason="fsdp allocates")
    points = scaling_points({log.name: measure(log, None) for log in (alone, sharded)})
    assert [(point.series, point.world_size) for point in points] == [("a-x", 1), ("a-x", 2)]


def test_a_case_of_one_process_makes_no_series_of_other_stages_runs():
    logs = [make_run_log(name="scaling/a-gpus1", parallelism="none", step_time_s=1.0)]
    for name, parallelism, communication in (
        ("baseline/a", "ddp", {}),
        ("ablations/sharded", "fsdp", {}),
        ("ablations/small-buckets", "ddp", {"bucket_mb": 25.0}),
    ):
        more = {"parallelism": parallelism, "communication": communication, "step_time_s": 1.25}
        logs.append(make_run_log(name=name, world_size=2, **more))
    points = scaling_points({log.name: measure(log, None) for log in logs})
    assert [(point.series, point.world_size, point.processes) for point in points] == [("a", 1, 1), ("a", 2, 1)]


def test_another_micro_batch_is_another_series():
    logs = [
        make_run_log(name="scaling/a-gpus1", parallelism="none"),
        make_run_log(name="scaling/b-gpus2", world_size=2, parallelism="ddp", micro_batch_size=4),
    ]
    points = scaling_points({log.name: measure(log, None) for log in logs})
    assert [(point.series, point.efficiency) for point in points] == [("a", None), ("b", None)]


def test_cases_of_one_name_that_ran_otherwise_are_two_series():
    """`auto` may choose one attention on one GPU and another on two: their rates are not set against each other."""

    def log(case, attention, world_size, step_time_s):
        made = make_run_log(name=case, world_size=world_size, parallelism="ddp", step_time_s=step_time_s)
        made.used["attention"] = Choice(requested="auto", used=attention, reason="measured")
        return made

    logs = [
        log("scaling/a-gpus1", "cudnn", 1, 1.0),
        log("scaling/a-gpus2", "fa3", 2, 1.0),
        log("baseline/same", "cudnn", 2, 1.25),
    ]
    points = scaling_points({log.name: measure(log, None) for log in logs})
    found = {(point.series, point.world_size): point.efficiency for point in points}
    assert found == {
        ("a (attention cudnn)", 1): 1.0,
        ("a (attention cudnn)", 2): pytest.approx(0.8, rel=0.02),
        ("a (attention fa3)", 2): None,
    }


def cpu_points(*sizes: tuple[int, int], cores: int):
    """Points of a CPU series of (processes, threads of each) on so many cores."""
    logs = []
    for world_size, threads in sizes:
        parallelism = "none" if world_size == 1 else "ddp"
        log = make_run_log(
            name=f"scaling/a-gpus{world_size}", device="cpu", world_size=world_size, parallelism=parallelism
        )
        log.environment.cpu_threads, log.environment.cpu_count = threads, cores
        logs.append(log)
    return scaling_points({log.name: measure(log, None) for log in logs})


def test_processes_on_the_same_cores_are_no_scaling_of_hardware(cpu_study: Path):
    one, two, four = cpu_points((1, 2), (2, 1), (4, 1), cores=2)
    assert (one.shares_cores, two.shares_cores, four.shares_cores) == (False, True, True)
    found = replace(Findings.of(cpu_study), scaling=[one, two, four])
    blocks = scaling_section(found).blocks
    (notice,) = [block for block in blocks if isinstance(block, Notice)]
    words = "the processes share the same cores (threads a process: 2, 1, 1)"
    assert notice.text == f"a: {words}, so that the efficiency is no scaling of hardware."
    (rows,) = [block.rows for block in blocks if isinstance(block, Table)]
    assert [row[4].endswith("(same cores)") for row in rows] == [False, True, True]
    table = scaling_table([one, two, four])
    assert list(table.threads_per_process) == [2, 1, 1] and list(table.same_cores) == [False, True, True]
    with LIGHT.applied():
        figure = scaling.draw(found, LIGHT)
    shown = " ".join(" ".join(text.get_text() for text in figure.findobj(Text)).split())
    assert words in shown


def test_processes_with_cores_of_their_own_are_scaling(gpu_study: Path):
    assert not any(point.shares_cores for point in cpu_points((1, 1), (2, 1), cores=2))
    found = Findings.of(gpu_study)
    assert not any(isinstance(block, Notice) for block in scaling_section(found).blocks)
    assert scaling_table(found.scaling)[["threads_per_process", "same_cores"]].isna().all(axis=None)


def test_more_processes_than_cores_are_no_scaling_of_hardware_either():
    points = cpu_points((1, 1), (2, 1), (4, 1), cores=2)
    assert [point.shares_cores for point in points] == [False, False, True]


def test_efficiency_is_the_ratio_of_the_rates_shown():
    """However far apart the runs of one world size are."""
    logs = [
        make_run_log(name="scaling/a-gpus1", parallelism="none", step_time_s=0.5),
        make_run_log(name="baseline/same", parallelism="none", step_time_s=4.0),
        make_run_log(name="scaling/a-gpus2", world_size=2, parallelism="ddp", step_time_s=2.0),
    ]
    one, two = scaling_points({log.name: measure(log, None) for log in logs})
    assert (one.processes, two.processes) == (2, 1)
    assert two.efficiency == pytest.approx(two.tokens_per_s_per_gpu / one.tokens_per_s_per_gpu)
    assert two.efficiency == pytest.approx((0.5 * 4.0) ** 0.5 / 2.0, rel=0.05)

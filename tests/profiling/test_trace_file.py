"""The kept trace: what is written is what is read, small enough, and readable as a Chrome trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from factories import make_run_log
from profiling.kineto import BASE_NS, one_step
from typer.testing import CliRunner

from mfubench.cli import app
from mfubench.config import ConfigError
from mfubench.profiling.breakdown import break_down
from mfubench.profiling.chrome_trace import CutStep, cut_step
from mfubench.profiling.keep import keep_trace
from mfubench.profiling.trace_file import (
    REDUCTIONS,
    Trace,
    make_trace,
    pack_rank,
    read_trace,
    trace_of_reason,
    write_trace,
)
from mfubench.run_log import write_run_log


def cut(rank: int = 0, base_ns: int = BASE_NS) -> CutStep:
    trace = one_step().trace() | {"baseTimeNanoseconds": base_ns}
    step = cut_step(trace, rank)
    assert step is not None
    return step


def parts(trace: Trace) -> list[dict[str, float]]:
    found = break_down(trace)
    assert found is not None
    return [{name: round(1e6 * s, 3) for name, s in rank.parts.items()} for rank in found.ranks]


def test_what_is_written_is_what_is_read(tmp_path: Path):
    path = tmp_path / "traces" / "two.json.gz"
    before = make_trace("scaling/two", [cut(0), cut(1, BASE_NS + 250_000)])  # the second rank's clock counts from later
    expected = parts(before)
    write_trace(path, before)
    after = read_trace(path)
    assert parts(after) == expected
    assert (after.name, after.left_out, after.profiled_step_s) == ("scaling/two", "nothing", pytest.approx(1e-3))
    assert [rank.window for rank in after.ranks] == [(0.0, 1000.0), (250.0, 1250.0)]
    found = break_down(after)
    assert found is not None
    assert [(one.shape, one.count) for one in found.ranks[0].matmuls] == [((4096, 2048, 6144), 1)]
    assert list(path.parent.iterdir()) == [path]  # no temporary file is left


def test_the_file_is_a_chrome_trace_with_one_process_a_rank_and_side(tmp_path: Path):
    path = tmp_path / "trace.json.gz"
    write_trace(path, make_trace("scaling/two", [cut(0), cut(1)]))
    values = json.loads(gzip.decompress(path.read_bytes()))
    names = {event["args"]["name"] for event in values["traceEvents"] if event["name"] == "process_name"}
    assert names == {"rank 0: host", "rank 0: GPU", "rank 1: host", "rank 1: GPU"}
    spans = [event for event in values["traceEvents"] if event["ph"] == "X"]
    assert all({"ts", "dur", "pid", "tid", "cat", "name"} <= event.keys() for event in spans)
    assert {event["ph"] for event in values["traceEvents"]} == {"M", "X", "s", "f"}


def test_only_the_step_is_kept():
    names = [event["name"] for event in cut().events if event["cat"] == "kernel"]
    assert len(names) == 6  # not the kernel of the step before


@pytest.mark.parametrize(("level", "left_out"), list(enumerate(REDUCTIONS[:3])))
def test_a_large_trace_loses_detail_and_says_so_and_keeps_its_sums(tmp_path: Path, level: int, left_out: str):
    path = tmp_path / "trace.json.gz"
    trace = make_trace("baseline/large", [cut(0), cut(1)])
    expected = parts(trace)
    needed = sum(len(pack_rank(rank, trace.ranks[0], level)) for rank in trace.ranks)
    write_trace(path, trace, limit_mib=needed / 2**20)
    assert path.stat().st_size <= needed
    found = read_trace(path)
    assert found.left_out == left_out and len(found.ranks) == 2
    assert parts(found) == expected


def test_a_trace_that_cannot_be_small_enough_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="is over the limit"):
        write_trace(tmp_path / "trace.json.gz", make_trace("baseline/large", [cut()]), limit_mib=0.0001)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_of_torch_profiler_is_read_as_it_is(tmp_path: Path):
    path = tmp_path / "exported.json"
    path.write_text(json.dumps(one_step().trace()))
    assert parts(read_trace(path))[0]["attention"] == 100


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"events": []}', b"\x1f\x8bbroken"])
def test_what_is_no_trace_is_told_in_a_sentence(tmp_path: Path, content: bytes):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="trace"):
        read_trace(path)


def test_a_run_without_a_profile_is_told_from_a_trace(tmp_path: Path):
    path = tmp_path / "run.json"
    write_run_log(path, make_run_log())
    told = f"{path}: this run was made without a profile; run it again with measurement.profile=timeline"
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, ["profile", str(path)], catch_exceptions=False)
    assert str(refused.value) == told


def test_a_finished_runs_trace_is_kept_and_a_missing_one_explained(tmp_path: Path):
    run, work, output = tmp_path / "run.json", tmp_path / "work", tmp_path / "traces" / "one.json.gz"
    write_run_log(run, make_run_log())
    assert "holds none any more" in keep_trace(run, work, output)
    assert "holds none any more" in (read_trace(output).reason or "")
    write_trace(work / "trace.json.gz", make_trace("baseline/one-gpu", [cut()]))
    assert "MiB" in keep_trace(run, work, output)
    assert output.read_bytes() == (work / "trace.json.gz").read_bytes()
    (work / "trace.json.gz").unlink()
    write_run_log(run, make_run_log().model_copy(update={"status": "oom", "reason": "rank 0: out of memory"}))
    assert "the run ended as oom (rank 0: out of memory)" in keep_trace(run, work, output)


def test_the_command_shows_a_trace_and_finds_that_of_a_run(tmp_path: Path):
    trace = tmp_path / "traces" / "baseline" / "one.json.gz"
    write_trace(trace, make_trace("baseline/one", [cut(0), cut(1)]))
    run = tmp_path / "runs" / "baseline" / "one.json"
    write_run_log(run, make_run_log())
    for path in (trace, run):
        shown = CliRunner().invoke(app, ["profile", str(path)])
        assert shown.exit_code == 0, shown.output
        assert "matmul" in shown.output and "50.0 %" in shown.output and "0.500" in shown.output
    assert CliRunner().invoke(app, ["profile", str(trace), "--kernels", "-3"]).exit_code == 2
    by_hand = tmp_path / "by-hand" / "run.json"
    write_run_log(by_hand, make_run_log())
    write_trace(by_hand.parent / "run-work" / "trace.json.gz", make_trace("by-hand/run", [cut()]))
    assert "by-hand/run" in CliRunner().invoke(app, ["profile", str(by_hand)]).output
    run = tmp_path / "runs" / "baseline" / "two.json"
    with pytest.raises(ConfigError, match="no trace of it"):
        CliRunner().invoke(app, ["profile", str(run)], catch_exceptions=False)
    write_trace(trace, trace_of_reason("baseline/one", "out of memory"))
    with pytest.raises(ConfigError, match="holds no step: out of memory"):
        CliRunner().invoke(app, ["profile", str(trace)], catch_exceptions=False)

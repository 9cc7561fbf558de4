"""A run as it is watched and drawn, live and finished, on any machine."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from factories import make_run_log
from rich.console import Console
from train.train_runs import run_here, tiny_config
from typer.testing import CliRunner

from mfubench.analysis.figures.style import LIGHT
from mfubench.cli import app
from mfubench.config import ConfigError
from mfubench.run_log import Evaluation, append_step, write_json, write_run_log, write_text_atomically
from mfubench.run_plot import draw, plot_run
from mfubench.train.progress import Display, describe, describe_end, live_values, palm_mfu_of
from mfubench.watching import BARS, look, render, sparkline, watch_run


def shown(view, width: int = 160) -> str:
    console = Console(record=True, width=width, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(view, console.width))
    return console.export_text()


def live_of(log):
    return live_values(log, log.memory[0], 40.0, palm_mfu_of(log))


def test_a_line_has_loss_mfu_rate_memory_and_time_left():
    log = make_run_log(max_iters=5000, step_count=100)
    line = describe(live_of(log))
    assert "step 100/5000" in line
    assert "MFU 6" in line and "(palm)" in line
    assert "tokens/s" in line and "memory 40.0 GiB (peak 41.3, reserved 46.8)" in line
    assert ":" in line.split(", ")[-1] and "left" in line


def test_no_time_left_is_made_of_the_steps_that_compile():
    log = make_run_log(max_iters=50, step_count=4)
    times_s = (("compile", 30.0), ("warmup", 2.0), ("measured", 0.5), ("measured", 0.5))
    for step, (phase, time_s) in zip(log.steps, times_s, strict=True):
        step.phase, step.step_time_s = phase, time_s
    steps = log.steps
    log.steps = steps[:1]
    assert describe(live_of(log)).startswith("step 1/50, compile") and " left" not in describe(live_of(log))
    log.steps = steps[:2]
    assert live_of(log)["step_time_s"] == 2 and " left" not in describe(live_of(log))
    for count in (3, 4):
        log.steps = steps[:count]
        assert live_of(log)["step_time_s"] == 0.5
        assert describe(live_of(log)).endswith(f", 0:00:{round((50 - count) * 0.5)} left")


def test_the_end_of_a_run_names_first_and_last_losses_and_the_sample_on_a_line():
    losses = [4.0, None, *(3.5 - step / 100 for step in range(2, 9))]
    evaluations = [Evaluation(step=10 * n, loss=loss, tokens=64) for n, loss in enumerate(losses)]
    log = make_run_log().model_copy(update={"evaluations": evaluations, "sample": "Once\n upon" + " a time" * 100})
    unmeasured = log.model_copy(update={"steps": [step for step in log.steps if step.phase != "measured"]})
    assert describe_end(log)[0] == f"{log.name}: ok" and "no step was measured: all" in describe_end(unmeasured)[0]
    *_, loss, sample = describe_end(log)
    assert loss == (
        "  validation loss: 4.0000 after 0 steps, …, 3.4500 after 50 steps, 3.4400 after 60 steps, "
        "3.4300 after 70 steps, 3.4200 after 80 steps"
    )
    assert sample.startswith("  sample: Once upon a time a time") and sample.endswith("…") and len(sample) < 220
    two = describe_end(log.model_copy(update={"evaluations": evaluations[:2], "sample": None}))
    assert two[-1] == "  validation loss: 4.0000 after 0 steps, not finite after 10 steps"


def test_a_finished_run_is_shown_at_once(tmp_path, capsys):
    write_run_log(tmp_path / "run.json", make_run_log())
    watch_run(tmp_path / "run.json", once=False, interval_s=0.1)
    text = capsys.readouterr().out
    assert "MFU (palm)" in text and "loss" in text and "finished" in text and "left" not in text


def test_a_folder_above_shows_its_latest_run_and_what_is_no_run_is_said(tmp_path, capsys):
    work = tmp_path / "work" / "tiers" / "tier1" / "0a1b2c3d"
    for folder, name in ((tmp_path / "work" / "tiers" / "tier0", "tiers/tier0"), (work, "tiers/tier1")):
        folder.mkdir(parents=True)
        write_run_log(folder / "partial.json", make_run_log(name=name))
    os.utime(tmp_path / "work" / "tiers" / "tier0" / "partial.json", (1, 1))
    for folder in (tmp_path, work.parent, work):
        assert look(folder).name == "tiers/tier1"
    assert look(tmp_path / "runs" / "tiers" / "tier1.json").name == "tiers/tier1"  # it will be written there
    by_hand = tmp_path / "run-work"
    write_run_log(by_hand / "partial.json", make_run_log(name="by-hand/run"))
    assert look(tmp_path / "run.json").name == "by-hand/run" and not look(tmp_path / "run.json").finished
    write_json(tmp_path / "memory" / "5.1-limit.json", {"trials": []})
    with pytest.raises(ConfigError, match="is no run JSON"):
        look(tmp_path / "memory" / "5.1-limit.json")


def test_a_run_without_steps_has_finished_once_its_json_is_there(tmp_path, capsys):
    log = make_run_log(name="training/evaluate", steps=[], evaluations=[Evaluation(step=4, loss=5.25, tokens=64)])
    work = tmp_path / "work" / "training" / "evaluate"
    write_run_log(work / "partial.json", log)
    assert not look(work).finished
    write_run_log(tmp_path / "runs" / "training" / "evaluate.json", log)
    for path in (work, tmp_path):
        watch_run(path, once=False, interval_s=0.1)
        assert "finished" in (shown := capsys.readouterr().out) and "validation loss 5.2500" in shown


def test_a_trial_of_a_memory_search_that_did_not_fit_has_ended(tmp_path, capsys):
    """It leaves its run JSON in its work folder and, where no step came to an end, nothing else."""
    work = tmp_path / "work" / "memory" / "limit" / "0a1b2c3d" / "micro-batch8"
    log = make_run_log(name="memory/limit", steps=[], status="oom", reason="no memory")
    write_run_log(work / "partial.json", log.model_copy(update={"status": "failed", "reason": "did not finish"}))
    assert look(tmp_path).state == "running"
    write_run_log(work / "run.json", log)
    watch_run(tmp_path, once=False, interval_s=0.1)
    assert "memory/limit  oom: no memory" in capsys.readouterr().out


ADAPTIVE = {"adaptive": True, "warmup_steps": 1, "min_steps": 4, "tolerance": 0.99}


def test_a_run_that_knew_enough_is_finished_with_the_reason_and_no_time_is_left(data, tmp_path, capsys):
    """From its work folder and from its run JSON, and in the lines that it printed itself."""
    log = run_here(tiny_config(max_iters=5000, measurement=ADAPTIVE), data, tmp_path)
    assert log.stopped_early is not None and len(log.steps) < 1000
    printed = capsys.readouterr().err.splitlines()
    assert "left" not in printed[-2] and log.stopped_early in printed[-1]
    for path in (tmp_path, tmp_path / "run.json"):
        watch_run(path, once=False, interval_s=0.1)
        text = " ".join(capsys.readouterr().out.split())
        assert f"finished early: {log.stopped_early}" in text
        assert f"{len(log.steps)} steps of at most 5000" in text and " left" not in text


def test_a_live_run_is_read_from_its_work_folder(tmp_path):
    log = make_run_log()
    steps, log.steps = log.steps, []
    with pytest.raises(ConfigError, match="no run is at work here"):
        look(tmp_path)
    write_run_log(tmp_path / "partial.json", log)
    assert not look(tmp_path).finished
    for step in steps:
        append_step(tmp_path / "steps.jsonl", step)
    log.steps = steps
    write_json(tmp_path / "live.json", live_of(log))
    card = {"power_w": 612.0, "sm_clock_mhz": 1755, "temperature_c": 61, "utilization_percent": 100}
    (tmp_path / "telemetry.jsonl").write_text(json.dumps({"time": 1.0, "cards": [card]}) + '\n{"time": 2.0, "car')
    view = look(tmp_path)
    assert not view.finished and view.state == "running"
    text = shown(view)
    assert "612" in text and "1755" in text and "█" in text
    write_json(tmp_path / "live.json", live_of(log) | {"updated_at": time.time() - 600})
    assert "no news for 600 s" in look(tmp_path).state
    write_json(tmp_path / "live.json", live_of(log) | {"status": "diverged"})
    assert look(tmp_path).finished and look(tmp_path).state == "diverged"


def test_a_study_is_followed_from_run_to_run_until_ctrl_c(tmp_path, monkeypatch, capsys):
    """The first run is killed and says nothing any more, the second one ends."""
    began = time.time()

    def begin(name: str, status: str | None) -> None:
        folder = tmp_path / "work" / name
        folder.mkdir(parents=True)
        write_run_log(folder / "partial.json", make_run_log().model_copy(update={"name": f"tiers/{name}"}))
        os.utime(folder / "partial.json", (began + len(name), began + len(name)))
        write_json(folder / "live.json", live_of(make_run_log()) | {"status": status, "updated_at": began - 600})

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 1:
            begin("tier22", "ok")
        elif len(naps) == 3:
            raise KeyboardInterrupt

    naps: list[float] = []
    begin("tier1", None)
    monkeypatch.setattr("mfubench.watching.time.sleep", sleep)
    result = CliRunner().invoke(app, ["watch", str(tmp_path), "--follow", "--interval", "0.5"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert text.index("tiers/tier1 running? no news for") < text.index("tiers/tier22 finished")
    assert naps == [0.5] * 3

    refused = CliRunner().invoke(app, ["watch", str(tmp_path), "--follow", "--once"])
    assert isinstance(refused.exception, ConfigError)


def test_a_failed_run_says_why(tmp_path):
    write_run_log(tmp_path / "partial.json", make_run_log(steps=[]))
    write_json(tmp_path / "live.json", live_of(make_run_log()))
    write_json(tmp_path / "failure.json", {"reason": "ValueError: a shape is wrong"})
    view = look(tmp_path)
    assert view.finished and view.state == "failed: ValueError: a shape is wrong"
    assert "step 30/30" in shown(view) and "left" not in shown(view)


def test_a_real_run_can_be_watched_and_drawn(data, tmp_path):
    log = run_here(tiny_config(evaluation={"interval": 5, "iters": 1}), data, tmp_path)
    assert look(tmp_path).state == "finished" and look(tmp_path).finished
    assert "tokens/s a process" in shown(look(tmp_path / "run.json"))
    plot_run(log, tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 20_000


def test_plot_of_a_gpu_run_and_of_one_without_steps(tmp_path):
    plot_run(make_run_log(world_size=4, parallelism="ddp"), tmp_path / "run.png")
    assert (tmp_path / "run.png").exists()
    with pytest.raises(ConfigError, match="has no steps to draw"):
        plot_run(make_run_log(steps=[], status="skipped"), tmp_path / "none.png")
    with pytest.raises(ConfigError, match=r"it ended with status oom \(no memory\)$"):
        plot_run(make_run_log(steps=[], status="oom", reason="no memory"), tmp_path / "none.png")
    with pytest.raises(ConfigError, match=r"status ok \(evaluation\.only: it was to evaluate a checkpoint\)$"):
        plot_run(make_run_log(steps=[], evaluation={"only": True}), tmp_path / "none.png")


def test_a_picture_goes_where_it_is_said_to(tmp_path, refusal):
    run, folder = tmp_path / "run.json", tmp_path / "pictures"
    write_run_log(run, make_run_log())
    folder.mkdir()

    def written(*words) -> str:
        result = CliRunner().invoke(app, ["plot", str(run), *map(str, words)], catch_exceptions=False)
        path = result.output.strip()
        assert Path(path).read_bytes().startswith(b"\x89PNG")
        return path

    assert written() == str(tmp_path / "run.png")
    assert written("--output", folder) == str(folder / "run.png")
    assert written("--output", folder / "v1.PNG") == str(folder / "v1.PNG")
    assert written("--output", tmp_path / "noext") == str(tmp_path / "noext.png")
    assert not (tmp_path / "noext").exists()
    complaint = "pictures are written as .png; found the ending .xyz"
    assert refusal("plot", run, "--output", "a.xyz") == f"error: --output a.xyz: {complaint}"


def test_what_is_no_file_is_never_replaced_by_one(tmp_path, refusal):
    run, pipe, folder, link = (tmp_path / name for name in ("run.json", "pipe.png", "folder.png", "link.png"))
    write_run_log(run, make_run_log())
    os.mkfifo(pipe)
    folder.mkdir()
    link.symlink_to(tmp_path / "drawn.png")
    said = f"error: {pipe}: is no regular file but a device or a pipe; name a file that is to be written"
    assert refusal("plot", run, "--output", pipe) == said and pipe.is_fifo()
    with pytest.raises(ConfigError, match="is a folder; name a file"):
        write_text_atomically(folder, "")
    pipes_link = tmp_path / "pipes.png"
    pipes_link.symlink_to(pipe)
    assert refusal("plot", run, "--output", pipes_link) == said.replace(str(pipe), str(pipes_link))
    for one, other in (("a.png", "b.png"), ("b.png", "a.png")):  # a circle
        (tmp_path / one).symlink_to(tmp_path / other)
    plot_run(make_run_log(), tmp_path / "a.png")
    assert (tmp_path / "a.png").is_file()
    plot_run(make_run_log(), link)
    assert link.is_symlink() and (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.faults
def test_a_picture_that_cannot_be_written_is_one_line_and_the_earlier_one_stays(tmp_path, full_disk, refusal):
    run = tmp_path / "run.json"
    write_run_log(run, make_run_log())
    target = full_disk / "run.png"
    full = "No space left on device; make room, or name another folder"
    assert refusal("plot", run, "--output", target) == f"error: {target}: {full}"
    assert [path.name for path in full_disk.iterdir()] == ["somebody-elses"]
    below = run / "pictures" / "run.png"
    assert refusal("plot", run, "--output", below).endswith("Not a directory; name another file or folder")


def test_nothing_there_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist .* no run is at it"):
        look(tmp_path / "missing")


def test_sparklines():
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, None, float("nan"), 2.0]) == "▁  █"
    assert len(sparkline(list(range(1000)))) == 60
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([None]) == " "


@pytest.mark.parametrize("width", [50, 80, 160])
def test_no_sparkline_is_cut_by_a_narrow_console(tmp_path, width):
    log = make_run_log(step_count=300, max_iters=300)
    write_run_log(tmp_path / "run.json", log)
    lines = shown(look(tmp_path / "run.json"), width).splitlines()
    (loss,) = [line for line in lines if line.startswith("loss ")]
    assert loss.rstrip().endswith(f"  {log.steps[-1].loss:.4f}") and "…" not in loss
    assert sum(letter in BARS for letter in loss) == min(60, width - len("gradient norm") - len("9.9999") - 4)


def test_a_runs_ticks_can_be_told_apart():
    """Rates of less than a percent of each other, and a learning rate that warms up."""
    log = make_run_log(step_count=60)
    for step in log.steps:
        step.step_time_s, step.learning_rate = 1.0 + 1e-5 * (step.step % 7), 1e-9 * step.step
    with LIGHT.applied():
        figure = draw(log, LIGHT)
        figure.draw_without_rendering()
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    for title in ("MFU (palm)", "learning rate, millionths"):
        ticks = [label.get_text() for label in panels[title].get_yticklabels()]
        assert len(set(ticks)) == len(ticks) > 2 and max(map(len, ticks)) < 12


def test_plain_lines_come_every_few_seconds_and_at_the_end(capfd):
    log = make_run_log()
    display = Display(log.config)
    display.update(live_of(log))
    display.update(live_of(log))
    assert capfd.readouterr().err.count("tokens/s") == 1
    display.close()
    assert capfd.readouterr().err.count("tokens/s") == 1

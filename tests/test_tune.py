"""The tuner finds the fastest setting of a machine it cannot look into, within its limits, and never repeats a run."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train.train_runs import write_dataset
from typer.testing import CliRunner

from mfubench.cli import app
from mfubench.config import ConfigError, KernelsConfig
from mfubench.experiments import build_run, parse_overrides
from mfubench.run_log import read_run_log
from mfubench.tune import trials
from mfubench.tune.search import GAIN, LARGEST_ACCUMULATION, Search, Setting, Space, Trial
from mfubench.tune.table import command, format_trials
from mfubench.tune.trials import Request, check_request, fingerprint, run_of

PARALLELISMS = ("ddp", "zero1", "fsdp")
CHECKPOINTINGS = ("none", "selective", "full")
STATES_GIB = {"none": 20.0, "ddp": 20.0, "zero1": 12.0, "fsdp": 8.0}
ACTIVATIONS_GIB = {"none": 3.0, "selective": 1.5, "full": 0.2}  # a sequence
RECOMPUTED = {"none": 1.0, "selective": 1.08, "full": 1.3}  # time of a token


class Machine:
    """A made-up machine: speed and memory by formula, and a clock that each trial moves on."""

    def __init__(self, card_gib, half_speed=2.0, sharding_cost=0.02, step_cost=0.5, estimate_error=1.0, trial_s=60.0):
        self.card_gib, self.half_speed, self.sharding_cost = card_gib, half_speed, sharding_cost
        self.step_cost, self.estimate_error, self.trial_s = step_cost, estimate_error, trial_s
        self.clock_s = 0.0
        self.tried: list[Setting] = []

    def memory(self, setting: Setting) -> float:
        activations = ACTIVATIONS_GIB[setting.activation_checkpointing] * setting.micro_batch_size
        return STATES_GIB[setting.parallelism] + activations

    def rate(self, setting: Setting) -> float:
        """tokens/s: a micro-batch that fills the card, over what recomputing, sharding and the optimizer's step add."""
        filled = setting.micro_batch_size / (setting.micro_batch_size + self.half_speed)
        sharded = 1 + self.sharding_cost * (setting.parallelism not in ("none", "ddp"))
        sequences = setting.micro_batch_size * setting.gradient_accumulation_steps
        return (
            1e5 * filled / (RECOMPUTED[setting.activation_checkpointing] * sharded * (1 + self.step_cost / sequences))
        )

    def estimate(self, setting: Setting) -> float:
        """Wrong about the activations."""
        states = STATES_GIB[setting.parallelism]
        return states + (self.memory(setting) - states) * self.estimate_error

    def try_setting(self, setting: Setting) -> Trial:
        self.tried.append(setting)
        self.clock_s += self.trial_s
        if self.memory(setting) > self.card_gib:
            return Trial(setting, "oom", "out of memory", 0.0, None, None, self.trial_s)
        return Trial(setting, "ok", None, self.rate(setting), None, self.memory(setting), self.trial_s)

    def search(self, space: Space, budget_s: float = 1e9) -> tuple[Search, Trial | None]:
        search = Search(space, self.estimate, self.try_setting, lambda: budget_s - self.clock_s)
        return search, search.run()


def space(usable_gib, **changes) -> Space:
    return replace(Space(PARALLELISMS, CHECKPOINTINGS, usable_gib), **changes)


@settings(max_examples=100, deadline=None)
@given(
    card_gib=st.floats(30, 200),
    half_speed=st.floats(0.1, 8),
    sharding_cost=st.floats(0, 0.2),
    estimate_error=st.floats(0.7, 1.4),
)
def test_the_answer_is_near_the_best_of_all_settings(card_gib, half_speed, sharding_cost, estimate_error):
    """With the step given, so that all settings can be listed: 48 sequences in micro-batches that divide them."""
    machine = Machine(card_gib, half_speed, sharding_cost, estimate_error=estimate_error)
    usable_gib = 0.9 * card_gib
    _, best = machine.search(space(usable_gib, sequences=48))
    everything = [
        Setting(parallelism, checkpointing, size, 48 // size)
        for parallelism, checkpointing, size in itertools.product(
            PARALLELISMS, CHECKPOINTINGS, (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)
        )
    ]
    fitting = [setting for setting in everything if machine.memory(setting) <= usable_gib]
    assert best is not None
    assert best.peak_memory_gib <= usable_gib
    assert best.tokens_per_s >= (1 - 3 * GAIN) * max(map(machine.rate, fitting))


def test_no_setting_is_tried_twice_and_few_are_tried():
    machine = Machine(80.0)
    machine.search(space(72.0))
    assert len(machine.tried) == len(set(machine.tried))
    assert len(machine.tried) <= 25


def test_layouts_are_compared_at_the_same_step_and_the_step_grows_only_while_it_gains():
    machine = Machine(80.0, step_cost=4.0)
    search, best = machine.search(space(72.0))
    steps = {setting.micro_batch_size * setting.gradient_accumulation_steps for setting in machine.tried}
    assert len(steps) > 2  # the given one (rounded for some sizes), and its doublings at the end
    accumulation = best.setting.gradient_accumulation_steps
    twice = replace(best.setting, gradient_accumulation_steps=2 * accumulation)
    assert machine.rate(twice) <= machine.rate(best.setting) * (1 + GAIN)
    half = replace(best.setting, gradient_accumulation_steps=accumulation // 2)
    assert machine.rate(half) * (1 + GAIN) < machine.rate(best.setting)
    assert any("accumulation" in note for note in search.notes)


def test_the_step_stops_growing_somewhere():
    _, best = Machine(80.0, step_cost=1e9).search(space(72.0))
    assert best.setting.gradient_accumulation_steps <= LARGEST_ACCUMULATION


def test_a_given_batch_is_kept():
    machine = Machine(80.0)
    _, best = machine.search(space(72.0, sequences=30))
    assert {s.micro_batch_size * s.gradient_accumulation_steps for s in machine.tried} == {30}
    assert best.setting.micro_batch_size in (10, 15)


def test_checkpointing_is_tried_where_memory_is_short_and_left_out_with_its_reason_where_not():
    short = Machine(30.0, half_speed=8.0)
    _, best = short.search(space(27.0))
    assert best.setting.activation_checkpointing != "none"
    plenty = Machine(500.0, half_speed=0.1)
    search, best = plenty.search(space(450.0))
    assert {setting.activation_checkpointing for setting in plenty.tried} == {"none"}
    assert "selective activation checkpointing was left out" in search.notes[0]


def test_the_margin_stays_free_even_where_a_larger_setting_trains():
    machine = Machine(80.0, estimate_error=0.5)  # the estimate promises far too much
    _, best = machine.search(space(40.0))
    assert best.peak_memory_gib <= 40.0
    assert any(machine.memory(setting) > 40.0 for setting in machine.tried)


def test_a_model_that_fits_nowhere_has_no_answer():
    machine = Machine(5.0)
    search, best = machine.search(space(4.5))
    assert best is None
    assert {setting.parallelism for setting in machine.tried} == set(PARALLELISMS)
    assert all(trial.status == "oom" for trial in search.trials.values())


@given(trials_in_budget=st.integers(0, 12))
@settings(deadline=None)
def test_the_budget_is_kept_and_always_allows_a_first_trial(trials_in_budget):
    machine = Machine(80.0)
    search, best = machine.search(space(72.0), budget_s=machine.trial_s * trials_in_budget)
    assert len(machine.tried) == max(1, trials_in_budget) or len(machine.tried) < trials_in_budget
    assert (best is None) == (not any(trial.fits(72.0) for trial in search.trials.values()))
    if machine.clock_s + machine.trial_s > machine.trial_s * trials_in_budget:
        assert "the budget ended" in search.notes[-1]


def test_a_wish_to_stop_keeps_what_was_found():
    machine = Machine(80.0)

    def try_thrice(setting):
        if len(machine.tried) == 3:
            raise KeyboardInterrupt
        return machine.try_setting(setting)

    search = Search(space(72.0), machine.estimate, try_thrice, lambda: 1e9)
    assert search.run() is not None
    assert "stopped on request" in search.notes[-1]


# --- requests, table, command ----------------------------------------------------------------------------------------


def make_request(tmp_path, **changes) -> Request:
    request = Request(
        model="llama2-tiny",
        data=write_dataset(tmp_path / "tiny"),
        folder=tmp_path / "tune",
        minutes=1.0,
        gpus=1,
        on_cards=False,
        memory_gib=None,
        margin=0.1,
        global_batch_size=None,
        parallelisms=(),
        checkpointings=(),
        overrides={},
    )
    return replace(request, **changes)


BAD_REQUESTS = [
    ({"overrides": {"micro_batch_size": 4}}, "micro_batch_size is what is tuned"),
    ({"overrides": {"world_size": 4}}, "world_size is what is tuned.*--gpus"),
    ({"overrides": {"atention": "sdpa"}}, "atention: unknown key"),
    ({"gpus": 3, "global_batch_size": 8}, "--global-batch-size 8 is not a multiple of 3 GPUs: the nearest are 6 and 9"),
    ({"overrides": {"continues": "training/pretrain"}}, "continues: leave it out; trials start anew"),
    ({"gpus": 2, "parallelisms": ("none",)}, "--parallelism none runs one process"),
    ({"gpus": 10_000}, "--gpus 10000: this machine holds \\d+ processes"),
    ({"parallelisms": ("dpp",)}, "parallelism: found 'dpp'"),
    ({"checkpointings": ("some",)}, "activation_checkpointing: found 'some'"),
    ({"model": "llama2-tinny"}, "did you mean 'llama2-tiny'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_REQUESTS, ids=[message for _, message in BAD_REQUESTS])
def test_a_request_that_cannot_be_met_is_refused_before_any_run(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        check_request(make_request(tmp_path, **changes))


def test_missing_data_are_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere: holds no prepared dataset"):
        check_request(make_request(tmp_path, data=tmp_path / "nowhere"))


@pytest.mark.faults
def test_a_folder_that_cannot_be_written_to_is_one_line_before_any_trial(tmp_path, full_disk, refusal):
    data, folder = write_dataset(tmp_path / "tiny"), full_disk / "trials"
    folder.mkdir()
    words = ("tune", "llama2-tiny", "device=cpu", "--gpus", "1", "--data", data, "--output")
    full = "No space left on device; make room, or name another folder"
    assert refusal(*words, folder) == f"error: {folder}: {full}"
    assert list(folder.iterdir()) == []
    below = tmp_path / "tiny" / "meta.json" / "trials"
    assert refusal(*words, below) == f"error: {below}: Not a directory; name another file or folder"


def test_on_cards_own_kernels_are_taken_where_they_run_unless_one_is_refused(tmp_path):
    request = make_request(tmp_path, on_cards=True, overrides=parse_overrides(["kernels.norm=plain"]))
    run = run_of(request, Setting("none", "none", 4, 2))
    assert (run.kernels.norm, run.kernels.rope, run.kernels.adamw) == ("plain", "auto", "auto")
    words = shlex.split(command(run, request))
    assert "kernels.rope=auto" in words and "kernels.norm=plain" not in words  # which is the default
    assert run_of(make_request(tmp_path), Setting("none", "none", 4, 2)).kernels == KernelsConfig()


def test_trials_share_the_given_keys_and_state_the_cap(tmp_path):
    request = make_request(
        tmp_path, memory_gib=2.0, overrides=parse_overrides(["seq_len=16", "measurement.min_steps=3"])
    )
    run = run_of(request, Setting("none", "full", 4, 2))
    assert (run.seq_len, run.micro_batch_size, run.gradient_accumulation_steps) == (16, 4, 2)
    assert run.activation_checkpointing == "full"
    assert run.memory_cap_gib == 2.0
    assert run.measurement.adaptive
    assert run.measurement.min_steps == 3


def test_the_command_sets_the_best_setting(tmp_path):
    request = make_request(tmp_path, gpus=2, overrides={"seq_len": 32})
    best = run_of(request, Setting("zero1", "selective", 4, 2))
    words = shlex.split(command(best, request))
    assert words[:5] == ["mfubench", "train", "llama2-tiny", "--data", str(request.data)]
    again = build_run(({"name": "by-hand/run", "model": words[2], "dataset": "tiny"}, parse_overrides(words[5:])), "t")
    for key in ("micro_batch_size", "gradient_accumulation_steps", "parallelism", "activation_checkpointing"):
        assert getattr(again, key) == getattr(best, key)
    assert (again.world_size, again.seq_len) == (2, 32)


def test_the_table_shows_the_fastest_first_and_why_others_are_none():
    trials = [
        Trial(Setting("ddp", "none", 16, 2), "oom", "rank 0", 0.0, None, None, 20.0),
        Trial(Setting("ddp", "none", 8, 4), "ok", None, 61_000.0, 0.55, 71.0, 60.0),
        Trial(Setting("ddp", "none", 12, 3), "ok", None, 63_000.0, 0.57, 79.0, 60.0),
        Trial(Setting("zero1", "none", 8, 4), "ok", None, 60_000.0, 0.54, 60.0, 60.0),
        Trial(Setting("fsdp", "none", 8, 4), "failed", "exit code 1, see work", 0.0, None, None, 5.0),
    ]
    header, *rows = format_trials(trials, trials[1], usable_gib=72.0).splitlines()
    assert header.split()[:4] == ["parallelism", "checkpointing", "micro-batch", "accumulation"]
    assert [row.split()[0] for row in rows] == ["ddp", "zero1", "ddp", "ddp", "fsdp"]
    assert rows[0].endswith("61,000     55.0%       71.00  best")
    assert rows[2].endswith("into the margin")
    assert rows[3].endswith("out of memory")
    assert rows[4].endswith("failed: exit code 1, see work")


# --- real runs -------------------------------------------------------------------------------------------------------

TINY = [
    *(
        "seq_len=16",
        "max_iters=6",
        "measurement.min_steps=3",
        "measurement.warmup_steps=1",
        "measurement.tolerance=0.9",
    ),
    *("model.num_hidden_layers=1", "model.hidden_size=32", "model.num_attention_heads=2", "model.head_dim=16"),
    *("model.num_key_value_heads=2", "model.vocab_size=97", "model.intermediate_size=32", "device=cpu"),
]


def tune(*words):
    result = CliRunner().invoke(app, ["tune", "llama2-tiny", *TINY, *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_one_real_trial_is_made_once(tmp_path, monkeypatch):
    """The only setting there is; the second time it is known, and takes no time."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    data, folder = write_dataset(tmp_path / "tiny"), tmp_path / "tune"
    only_one = ("--data", data, "--output", folder, "--checkpointing", "none", "--global-batch-size", 1)
    first = tune(*only_one, "--minutes", 10)
    assert first.exit_code == 0, first.output
    assert "1 trials" in first.output
    (run,) = (folder / "runs").glob("*.json")
    log, written = read_run_log(run), run.stat().st_mtime_ns
    assert log.config.name == "tune/none-none-micro-batch1-accumulation1"
    assert log.environment.cpu_threads == 1

    again = tune(*only_one, "--minutes", 0)
    assert again.exit_code == 0, again.output
    assert "1 known from earlier runs" in again.output
    assert run.stat().st_mtime_ns == written
    result = json.loads((folder / "tune.json").read_text())
    assert result["trials"][0]["cached"]
    assert result["best"]["setting"]["micro_batch_size"] == 1

    write_dataset(data, seed=1)
    other = tune(*only_one, "--minutes", 10)
    assert other.exit_code == 0 and "0 known from earlier runs" in other.output
    assert len(list((folder / "runs").glob("*.json"))) == 2


def test_a_trial_of_other_threads_or_power_limits_is_none_of_this_search(tmp_path, monkeypatch):
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    on_cpu, on_cards = make_request(tmp_path), make_request(tmp_path, on_cards=True)

    def places(request, change, values) -> list[str]:
        found = []
        for value in values:
            change(value)
            found.append(fingerprint(request))
        return found

    one, two, again = places(on_cpu, lambda threads: monkeypatch.setenv("OMP_NUM_THREADS", threads), ("1", "2", "1"))
    assert one == again != two
    monkeypatch.setattr(trials, "visible_cards", lambda: ["0"])
    limits = (600.0, 700.0, None, 600.0)
    changed = places(on_cards, lambda watts: monkeypatch.setattr(trials, "power_limit_w", lambda card: watts), limits)
    assert len(set(changed)) == 3 and changed[0] == changed[-1]


def test_a_trial_ends_with_the_budget_and_nothing_is_said_to_fit_or_not(tmp_path):
    data, folder = write_dataset(tmp_path / "tiny"), tmp_path / "tune"
    result = tune("--data", data, "--output", folder, "--minutes", 0)
    assert result.exit_code == 1
    assert "the budget ended before everything was tried" in result.output
    assert " (within none-none-micro-batch" in result.output and " steps); a longer one" in result.output
    assert "Nothing was measured: give it more --minutes." in result.output
    assert not list((folder / "runs").glob("*.json"))


def test_ctrl_c_as_a_trial_ends_is_the_end_of_the_search(tmp_path):
    data, folder = write_dataset(tmp_path / "tiny"), tmp_path / "tune"
    words = ["tune", "llama2-tiny", *TINY, "--data", data, "--output", folder, "--gpus", 1]
    program = "import sys; from mfubench.cli import app; app(sys.argv[1:])"
    command = [sys.executable, "-c", program, *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not list(folder.glob("runs/*.json")) and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert "stopped on request before everything was tried" in output, output
    assert len(list(folder.glob("runs/*.json"))) == 1


@pytest.mark.slow
def test_a_trial_that_is_stopped_leaves_no_checkpoint(tmp_path, monkeypatch):
    """A run that is stopped writes one, as large as model and optimizer; a trial never goes on from it."""
    changed = {"max_iters=6": "max_iters=100000", "measurement.min_steps=3": "measurement.min_steps=90000"}
    monkeypatch.setattr(sys.modules[__name__], "TINY", [changed.get(word, word) for word in TINY])
    data, folder = write_dataset(tmp_path / "tiny"), tmp_path / "tune"
    result = tune("--data", data, "--output", folder, "--minutes", 0.5)
    done = re.search(r"which had done (\d+) of up to 100000 steps", result.output)
    assert done and int(done[1]) > 0, result.output
    assert not list(folder.rglob("step-*"))


@pytest.mark.slow
def test_a_real_search_over_two_processes_ends_with_a_command(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    data, folder = write_dataset(tmp_path / "tiny"), tmp_path / "tune"
    options = ("--gpus", 2, "--global-batch-size", 8, "--checkpointing", "none", "--minutes", 3)
    result = tune("--data", data, "--output", folder, *options)
    assert result.exit_code == 0, result.output
    found = json.loads((folder / "tune.json").read_text())
    assert {trial["setting"]["parallelism"] for trial in found["trials"]} == {"ddp", "zero1", "fsdp"}
    assert all(
        trial["setting"]["micro_batch_size"] * trial["setting"]["gradient_accumulation_steps"] == 4
        for trial in found["trials"]
    )
    assert found["config"]["global_batch_size"] == 8
    line = next(line for line in result.output.splitlines() if line.startswith("mfubench train"))
    assert f"--data {data}" in line
    assert "world_size=2" in line

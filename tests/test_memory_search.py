"""The search finds the exact limit, with few trials, and says what it knows."""

import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from factories import make_run_log
from hypothesis import given
from hypothesis import strategies as st
from train.train_runs import environment, tiny_config, write_dataset

from mfubench.config import KernelsConfig, MemorySearch
from mfubench.experiments import expand_study
from mfubench.memory_search import (
    describe_trial,
    find_limit,
    limit_words,
    one_that_ran,
    predict_limit,
    run_trial,
    summarize,
)
from mfubench.prediction.measured_runs import read_memory_searches
from mfubench.run_log import Choice, write_json

SCRIPT = Path(__file__).parents[1] / "workflow" / "scripts" / "search_memory.py"
DEFAULT_STUDY = Path(__file__).parents[1] / "config" / "config.yaml"
SEARCH = next(iter(expand_study(yaml.safe_load(DEFAULT_STUDY.read_text()), "f.yaml", 2).searches.values()))


def ran_on(memory_gib, on_gpu=True):
    """The log of a trial, on a card (or a CPU) of which a rank may take so much memory."""
    log = make_run_log()
    changes = {"config": log.config.model_copy(update={"memory_cap_gib": memory_gib})}
    if not on_gpu:
        changes["environment"] = log.environment.model_copy(update={"gpus": []})
    return log.model_copy(update=changes)


CARD = ran_on(100.0)


def machine_that_holds(limit, calls=None):
    def try_micro_batch(size):
        if calls is not None:
            calls.append(size)
        return {
            "micro_batch_size": size,
            "status": "ok" if size <= limit else "oom",
            "peak_memory_gib": float(size),
            "reason": None,
            "tokens_per_s_per_gpu": 1.0,
        }

    return try_micro_batch


@given(limit=st.integers(0, 80), predicted=st.none() | st.integers(0, 100))
def test_the_limit_is_exact_below_the_largest_candidate(limit, predicted):
    calls = []
    trials = find_limit(SEARCH, machine_that_holds(limit, calls), lambda: predicted)
    result = summarize(SEARCH, trials, CARD)
    largest_candidate = max(SEARCH.candidates)
    assert result["largest"] == (min(limit, largest_candidate) or None)
    assert result["largest_is_exact"] == (limit < largest_candidate)
    assert len(calls) == len(set(calls))
    assert len(calls) <= len(SEARCH.candidates) + 6 + (predicted is not None) * 2


def test_a_trial_says_what_other_processes_took_from_it():
    host = {"cpu_percent": {"median": 100.0}, "run_cores": {"median": 0.6}}
    disturbed = describe_trial(make_run_log(device="cpu", telemetry={"host": host}))["contention"]
    assert disturbed == {"others": pytest.approx(1.4), "cores": 2, "used": 0.6, "wanted": 2}
    assert describe_trial(make_run_log(device="cpu"))["contention"] is None


def test_a_run_that_diverged_has_fitted_and_one_that_is_skipped_ends_the_search():
    def ending(status):
        change = {"status": status, "reason": "no fa3"}
        return lambda size: machine_that_holds(20)(size) | (change if size <= 20 else {})

    diverged = summarize(SEARCH, find_limit(SEARCH, ending("diverged")), CARD)
    assert (diverged["largest"], diverged["largest_is_exact"]) == (20, True)
    skipped = find_limit(SEARCH, ending("skipped"))
    assert [trial["micro_batch_size"] for trial in skipped] == [SEARCH.candidates[0]]
    assert limit_words(summarize(SEARCH, skipped, CARD)) == "not searched: no fa3"


def test_comfort_is_below_the_stated_share():
    trials = find_limit(SEARCH, machine_that_holds(20))
    result = summarize(SEARCH, trials, ran_on(20.0))
    assert result["largest"] == 20
    assert result["largest_comfortable"] == max(
        trial["micro_batch_size"] for trial in trials if trial["peak_memory_gib"] <= SEARCH.comfort_fraction * 20
    )
    assert [trial["micro_batch_size"] for trial in result["trials"]] == sorted(
        trial["micro_batch_size"] for trial in result["trials"]
    )


def test_a_limit_is_exact_on_a_gpu_alone():
    """On a CPU the same search finds one more or one less another time: a process's memory is not the same twice."""
    trials = find_limit(SEARCH, machine_that_holds(20))
    on_gpu, on_cpu = (summarize(SEARCH, trials, ran_on(100.0, on_gpu)) for on_gpu in (True, False))
    assert (on_gpu["largest"], on_gpu["largest_is_exact"]) == (20, True)
    assert (on_cpu["largest"], on_cpu["largest_is_exact"]) == (20, False)
    assert limit_words(on_gpu) == "largest micro-batch that trained: 20, exactly; 21 ran out of memory"
    assert "21 ran out of memory. Not exact: a process's memory on a CPU differs" in limit_words(on_cpu)


def test_a_search_that_did_not_close_in_says_so():
    search = SEARCH.model_copy(update={"bisect": False})
    for limit, said in (
        (0, "no micro-batch of those tried trains"),
        (20, "trained: 16; 32 ran out of memory, and none between the two was tried"),
        (99, "trained: 32; none of those tried ran out of memory"),
    ):
        trials = find_limit(search, machine_that_holds(limit))
        assert limit_words(summarize(search, trials, CARD)).endswith(said)


@given(limit=st.integers(1, 126))
def test_a_right_prediction_takes_two_trials_at_most_and_a_bisection_more(limit):
    search = SEARCH.model_copy(update={"candidates": (128,)})
    calls = []
    find_limit(search, machine_that_holds(limit, calls), lambda: limit)
    assert calls == [128, limit, limit + 1]
    calls.clear()
    find_limit(search, machine_that_holds(limit, calls))
    assert len(calls) == 8


def test_the_limit_of_a_card_is_predicted_with_the_settings_that_ran():
    log = make_run_log()
    predicted = predict_limit(log)
    assert predicted is not None and predicted > 0
    plain = Choice(requested="block", used="none", reason="no compiler")
    not_compiled = log.model_copy(update={"used": {**log.used, "compile": plain}})
    assert 0 < predict_limit(not_compiled) < predicted
    on_a_cpu = log.model_copy(update={"environment": log.environment.model_copy(update={"gpus": []})})
    assert predict_limit(on_a_cpu) is None


def test_what_ran_is_recorded_and_read_as_the_searchs_settings(tmp_path):
    """`auto` says nothing: the trials do, and what is known of the limit is known of them."""
    run = SEARCH.run.model_copy(update={"kernels": KernelsConfig(**dict.fromkeys(KernelsConfig.model_fields, "auto"))})
    search = SEARCH.model_copy(update={"run": run})
    in_matmuls = Choice(requested="auto", used="matmul")
    log = CARD.model_copy(update={"used": {**CARD.used, "swiglu": in_matmuls}})
    trials = find_limit(search, machine_that_holds(20))
    write_json(tmp_path / "limit.json", summarize(search, trials, log))
    observations, (limit,) = read_memory_searches([tmp_path])
    assert {one.config.kernels.swiglu for one in [*observations, limit]} == {"matmul"}
    assert predict_limit(log) > predict_limit(CARD) > 0  # which keeps no product


def test_a_trial_is_taken_again_where_its_data_are_the_same(tmp_path):
    run = tiny_config(max_iters=1)
    search, data = MemorySearch(run=run, candidates=(2,)), tmp_path / "data"
    arguments = Namespace(data=data, tokenizer=None, ceilings=None, work=tmp_path / "work")

    def first_loss(seed):
        write_dataset(data, seed=seed)
        log = run_trial(search, 2, arguments)
        return log.wall.started_at, log.steps[0].loss

    first = first_loss(seed=0)
    assert first_loss(seed=0) == first
    assert first_loss(seed=1)[1] != first[1]


def test_a_search_that_is_asked_to_stop_as_a_trial_ends_makes_no_other(tmp_path):
    data, work = write_dataset(tmp_path / "data"), tmp_path / "work"
    search = MemorySearch(run=tiny_config(max_iters=1), candidates=(1, 2))
    words = ("--search", search.model_dump_json(), "--data", data, "--work", work, "--output", tmp_path / "limit.json")
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    while not list(work.glob("*/run.json")) and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1 and "error: stopped on request after the trial with micro-batch 1" in stderr
    assert [path.parent.name for path in work.glob("*/run.json")] == ["micro-batch1"]


def test_what_ran_is_what_a_trial_that_trained_says():
    lost = CARD.model_copy(update={"status": "oom"})
    assert one_that_ran([lost, CARD]) is CARD and one_that_ran([lost]) is lost

"""The search finds the exact limit, with few trials, and says what it knows."""

from pathlib import Path

import yaml
from hypothesis import given
from hypothesis import strategies as st

from mfubench.experiments import expand_study
from mfubench.memory_search import find_limit, summarize

DEFAULT_STUDY = Path(__file__).parents[1] / "config" / "config.yaml"
SEARCH = next(iter(expand_study(yaml.safe_load(DEFAULT_STUDY.read_text()), "f.yaml", 2).searches.values()))


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


@given(limit=st.integers(0, 80))
def test_the_limit_is_exact_below_the_largest_candidate(limit):
    calls = []
    trials = find_limit(SEARCH, machine_that_holds(limit, calls))
    result = summarize(SEARCH, trials, 100.0)
    largest_candidate = max(SEARCH.candidates)
    assert result["largest"] == (min(limit, largest_candidate) or None)
    assert result["largest_is_exact"] == (limit < largest_candidate)
    assert len(calls) == len(set(calls))
    assert len(calls) <= len(SEARCH.candidates) + 6


def test_comfort_is_below_the_stated_share():
    trials = find_limit(SEARCH, machine_that_holds(20))
    result = summarize(SEARCH, trials, 20.0)
    assert result["largest"] == 20
    assert result["largest_comfortable"] == max(
        trial["micro_batch_size"] for trial in trials if trial["peak_memory_gib"] <= SEARCH.comfort_fraction * 20
    )
    assert [trial["micro_batch_size"] for trial in result["trials"]] == sorted(
        trial["micro_batch_size"] for trial in result["trials"]
    )

"""The shipped studies: every test of the guides is a case with the guide's settings, and every run fits its card."""

import json
from functools import cache
from pathlib import Path

import pytest
import yaml

from mfubench.analysis.expectations import load_expectations
from mfubench.analysis.study import base_name
from mfubench.experiments import Study, expand_study, resolve_extends
from mfubench.prediction.memory import MemoryFit, estimate_memory
from mfubench.prediction.resolved_settings import resolve_loss, resolve_reduction

FOLDER = Path(__file__).parents[1] / "config" / "studies"
STUDIES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
MODELS = ("gpt2-1.36b", "llama2-1.36b", "llama3-1.5b", "llama3-2.2b", "qwen3-1.8b")

# Memory that a process finds free, GiB: a B200 of "192 GB", an H100 of 80, an A6000 of 48.
FREE_GIB = {"192": 178.0, "80": 79.2, "48": 47.5}
WRITTEN_FOR = {"llama2-1.36b": "192", "qwen3-1.8b": "192", "gpt2-1.36b": "48"}
# What measured peaks reserved beyond the count, rounded up; a study keeps 4 % of the card free on top.
CAUTIOUS = MemoryFit(reserve_gib=2.0)
USABLE_FRACTION = 0.96


@cache
def load_study(name: str) -> Study:
    values = resolve_extends(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()), FOLDER, name)
    return expand_study(values, name, 8)


def settings(run) -> dict:
    """A run as flat plain data: `loader.kind` beside `micro_batch_size`."""
    flat = {}
    for key, value in json.loads(run.to_json()).items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            flat[key] = value
    return flat


# --- the guides, test by test ----------------------------------------------------------------------------------------
# guide's test -> (case, the settings that its command line states)

PLAIN = {"compile": "none", "parallelism": "ddp", "cuda_graphs": False, "loader.kind": "memmap", "dtype": "bfloat16"}
COMPILED = PLAIN | {"compile": "block"}
LOADED = COMPILED | {"loader.kind": "dataloader", "loader.num_workers": 4, "loader.prefetch_factor": 2}
GRAPHED = LOADED | {"cuda_graphs": True}


def batch(micro_batch_size, accumulation, world_size, max_iters):
    return {
        "micro_batch_size": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "world_size": world_size,
        "max_iters": max_iters,
        "seq_len": 2048,
    }


ZERO1 = {"parallelism": "zero1", "compile": "block", "attention": "fa2"}
FA2 = {"attention": "fa2"}

LLAMA2_GUIDE = {
    "1.1": ("baseline/1.1-plain", FA2 | PLAIN | batch(24, 8, 2, 200) | {"measurement.gradient_interval": 50}),
    "1.2": ("baseline/1.2-compile", FA2 | COMPILED | batch(24, 8, 2, 200)),
    "1.3": ("baseline/1.3-dataloader", FA2 | LOADED | batch(24, 8, 2, 200)),
    "2.1": ("scaling/2.1-plain-gpus8", FA2 | PLAIN | batch(24, 8, 8, 200)),
    "2.2": ("scaling/2.2-compile-gpus8", FA2 | COMPILED | batch(24, 8, 8, 200)),
    "tier 1": ("tiers/tier1", FA2 | COMPILED | batch(24, 8, 8, 200)),
    "tier 2": ("tiers/tier2", FA2 | LOADED | batch(24, 8, 8, 200)),
    "tier 3": ("tiers/tier3", FA2 | GRAPHED | batch(24, 8, 8, 200)),
    "4.1": ("ablations/4.1-sdpa", COMPILED | batch(24, 8, 8, 200) | {"attention": "sdpa"}),
    "4.2": ("ablations/4.2-float32", COMPILED | batch(24, 8, 8, 100) | {"dtype": "float32"}),
    "4.2, control": ("ablations/4.2-bfloat16-control", COMPILED | batch(24, 8, 8, 100)),
    "4.3 A": ("ablations/4.3-accumulation1", FA2 | COMPILED | batch(24, 1, 8, 200)),
    "4.3 B": ("ablations/4.3-accumulation16", FA2 | COMPILED | batch(24, 16, 8, 200)),
    "4.4 small": ("ablations/4.4-micro-batch8", FA2 | COMPILED | batch(8, 8, 8, 200)),
    "4.4 large": ("ablations/4.4-micro-batch32", FA2 | COMPILED | batch(32, 8, 8, 200)),
    "5.1": ("memory/5.1-limit", COMPILED | batch(32, 8, 8, 20)),
    "5.2 conservative": ("memory/5.2-micro-batch16", COMPILED | batch(16, 8, 8, 200)),
    "5.2 balanced": ("memory/5.2-micro-batch24", COMPILED | batch(24, 8, 8, 200)),
    "5.2 aggressive": ("memory/5.2-micro-batch32", COMPILED | batch(32, 8, 8, 200)),
    "training guide, 3": ("smoke/llama2-1.36b", {"compile": "none", "max_iters": 10, "world_size": 1}),
    "training guide, 4": ("baseline/mfu-test", ZERO1 | batch(6, 32, 2, 100)),
    "training guide, 5": ("training/pretrain", ZERO1 | batch(6, 32, 2, 2000)),
    "training guide, 7": ("training/pretrain", {"evaluation.at_end": True}),
    "training guide, 8": ("memory/5.1-limit-fsdp", batch(12, 8, 8, 10) | {"parallelism": "fsdp", "compile": "block"}),
}

QWEN3_GUIDE = {
    "1.1": ("baseline/1.1-plain", PLAIN | batch(20, 8, 2, 200)),
    "1.2": ("baseline/1.2-compile", COMPILED | batch(20, 8, 2, 200)),
    "2.1": ("scaling/2.1-plain-gpus8", PLAIN | batch(20, 8, 8, 200)),
    "2.2": ("scaling/2.2-compile-gpus8", COMPILED | batch(20, 8, 8, 200)),
    "tier 1": ("tiers/tier1", COMPILED | batch(20, 8, 8, 100)),
    "tier 2": ("tiers/tier2", LOADED | batch(20, 8, 8, 1000)),
    "tier 3": ("tiers/tier3", GRAPHED | batch(20, 8, 8, 1000)),
    "4 attention": ("ablations/4.1-sdpa", COMPILED | batch(20, 8, 8, 200) | {"attention": "sdpa"}),
    "4 few steps": ("ablations/4.3-accumulation1", COMPILED | batch(20, 1, 8, 200)),
    "4 many steps": ("ablations/4.3-accumulation16", COMPILED | batch(20, 16, 8, 200)),
    "4 small": ("ablations/4.4-micro-batch8", COMPILED | batch(8, 8, 8, 200)),
    "4 large": ("ablations/4.4-micro-batch32", COMPILED | batch(32, 8, 8, 200)),
    "5": ("memory/5.1-limit", COMPILED | batch(24, 8, 8, 20)),
    "training guide, 3": ("smoke/qwen3-1.8b", {"compile": "none", "max_iters": 10, "world_size": 1}),
    "training guide, 4": ("baseline/mfu-test", ZERO1 | batch(6, 32, 2, 100)),
    "training guide, 5": ("training/pretrain", ZERO1 | batch(2, 96, 2, 2000)),
    "training guide, 7": ("training/pretrain", {"evaluation.at_end": True}),
    "training guide, 8": ("memory/5.1-limit-fsdp", batch(12, 8, 8, 10) | {"parallelism": "fsdp", "compile": "block"}),
}


def training_guide(model, micro_batch_size, accumulation, smoke=None):
    return {
        "smoke test": (f"smoke/{model}", {"compile": "none", "max_iters": 10} | (smoke or {"world_size": 1})),
        "MFU test": ("baseline/mfu-test", ZERO1 | batch(micro_batch_size, accumulation, 2, 100)),
        "full training": ("training/pretrain", ZERO1 | batch(micro_batch_size, accumulation, 2, 2000)),
        "evaluation": ("training/pretrain", {"evaluation.at_end": True}),
        "tuning, nproc 1": ("scaling/mfu-test-gpus1", batch(micro_batch_size, accumulation, 1, 100)),
        "tuning, nproc 8": ("scaling/mfu-test-gpus8", batch(micro_batch_size, accumulation, 8, 100)),
        "tuning, compile": ("ablations/tuning-plain", {"compile": "none"}),
        "tuning, batch size": ("ablations/tuning-micro-batch1", {"micro_batch_size": 1}),
        "tuning, accumulation": ("ablations/tuning-accumulation128", {"gradient_accumulation_steps": 128}),
        "tuning, block size": ("ablations/tuning-seq-len1024", {"seq_len": 1024}),
        "tuning, float16": ("ablations/tuning-float16", {"dtype": "float16"}),
        "tuning, float32": ("ablations/tuning-float32", {"dtype": "float32"}),
        "tuning, sdpa": ("ablations/tuning-sdpa", {"attention": "sdpa"}),
        "tuning, manual": ("ablations/tuning-eager-micro-batch1", {"attention": "eager"}),
        "tuning, no ZeRO-1": ("ablations/tuning-ddp", {"parallelism": "ddp"}),
        "tuning, FSDP": ("ablations/tuning-fsdp", {"parallelism": "fsdp"}),
    }


TWO_GPU_SMOKE = batch(2, 64, 2, 10) | {"parallelism": "zero1"}
GUIDES = {
    "llama2-1.36b": LLAMA2_GUIDE,
    "qwen3-1.8b": QWEN3_GUIDE,
    "gpt2-1.36b": training_guide("gpt2-1.36b", 4, 32),
    "llama3-1.5b": training_guide("llama3-1.5b", 8, 24),
    "llama3-2.2b": training_guide("llama3-2.2b", 4, 32, smoke=TWO_GPU_SMOKE),
}
GUIDE_TESTS = [(study, test) for study, tests in GUIDES.items() for test in tests]


@pytest.mark.parametrize(("name", "test"), GUIDE_TESTS, ids=[f"{name}: {test}" for name, test in GUIDE_TESTS])
def test_every_test_of_the_guides_is_a_case_with_its_settings(name, test):
    study = load_study(name)
    case, stated = GUIDES[name][test]
    found = settings(study.runs[case] if case in study.runs else study.searches[case].run)
    assert {key: found[key] for key in stated} == stated


def test_memory_limits_are_sought_where_the_guides_seek_them():
    llama2, qwen3 = load_study("llama2-1.36b").searches, load_study("qwen3-1.8b").searches
    assert llama2["memory/5.1-limit"].candidates == (32, 48, 64, 96, 128)
    assert llama2["memory/5.1-limit-fsdp"].candidates == (12, 16, 20, 24, 28, 32)
    assert qwen3["memory/5.1-limit"].candidates == (24, 32, 48, 64, 96)
    assert qwen3["memory/5.1-limit-fsdp"].candidates == (12, 16, 20, 24)
    assert all(search.bisect for study in (llama2, qwen3) for search in study.values())


# --- what a study promises -------------------------------------------------------------------------------------------


def card_of(name):
    for memory in FREE_GIB:
        if name.endswith(f"-{memory}gb"):
            return memory
    return WRITTEN_FOR.get(name, "80")


@pytest.mark.parametrize("name", STUDIES)
def test_every_run_fits_the_card_that_the_study_is_for(name):
    capacity = FREE_GIB[card_of(name)]
    totals = {
        case: estimate_memory(resolve_reduction(resolve_loss(run), capacity), capacity, fit=CAUTIOUS).total_gib
        for case, run in load_study(name).runs.items()
    }
    too_large = {case: f"{total:.1f} GiB" for case, total in totals.items() if total > USABLE_FRACTION * capacity}
    assert too_large == {}


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_every_machine_measures_what_it_can_and_names_the_rest(name, gpus):
    values = resolve_extends(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()), FOLDER, name)
    study, whole = expand_study(values, name, gpus), load_study(name)
    assert study.runs
    assert set(study.runs) | set(study.searches) | set(study.skipped) == set(whole.runs) | set(whole.searches)
    assert all(
        str(whole.runs[case].world_size) in reason for case, reason in study.skipped.items() if case in whole.runs
    )


# A number at the end of a case's name is the value of this setting.
NAMED_VALUES = {
    "gpus": "world_size",
    "micro-batch": "micro_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "seq-len": "seq_len",
}


@pytest.mark.parametrize("name", STUDIES)
def test_a_value_in_a_name_is_the_value_of_the_run(name):
    for case, run in load_study(name).runs.items():
        for word, key in NAMED_VALUES.items():
            _, found, rest = base_name(case).rpartition(f"-{word}")
            if found and rest.isdigit():
                assert getattr(run, key) == int(rest), case


# What two cases of an effect may differ in beside what its name says: how long they run, and what they are called.
BESIDE = {"name", "max_iters", "repeat", "requires", "contrast_attention", "global_batch_size"}
BESIDE |= {"measurement.gradient_interval", "measurement.profile"}


def differing(study, effect):
    arm, control = (settings(study.runs[case]) for case in (effect.arm, effect.control))
    keys = {key for key in arm if arm[key] != control[key] and key not in BESIDE}
    return {"kernels" if effect.name.startswith("own kernels") and key.startswith("kernels.") else key for key in keys}


@pytest.mark.parametrize("name", STUDIES)
def test_an_effect_differs_in_one_thing(name):
    """In one setting; or in how a batch is cut into micro-batches, which goes along where memory is spent."""
    study = load_study(name)
    assert study.config.effects
    for effect in study.config.effects:
        found = differing(study, effect)
        changed = found - {"micro_batch_size", "gradient_accumulation_steps"}
        if effect.arm.endswith("-again"):
            assert found == set(), effect
        elif not changed:
            assert found, f"{effect.name}: both cases are the same"
        elif changed == {"seq_len"} or "the micro-batch" in effect.name:
            assert found > changed, effect
            assert len(changed) == 1, effect
        else:
            assert found == changed, (effect, found)
            assert len(changed) == 1, (effect, found)


@pytest.mark.parametrize("name", STUDIES)
def test_values_in_an_effects_name_are_those_of_its_cases(name):
    """`micro-batch 16 instead of 12`: the arm has 16, the control 12."""
    study = load_study(name)
    keys = {
        "micro-batch": "micro_batch_size",
        "accumulation": "gradient_accumulation_steps",
        "sequence length": "seq_len",
    }
    for effect in study.config.effects:
        for word, key in keys.items():
            if effect.name.startswith(f"{word} ") and " instead of " in effect.name:
                values = effect.name.removeprefix(f"{word} ").split(" instead of ")
                found = [getattr(study.runs[case], key) for case in (effect.arm, effect.control)]
                assert found == [int(value) for value in values], effect


@pytest.mark.parametrize("name", [name for name in STUDIES if name != "short"])
def test_measurements_stop_when_they_know_and_training_does_all_its_steps(name):
    """But for the short study, whose lengths are fixed so that it takes 20 minutes."""
    for case, run in load_study(name).runs.items():
        if run.stage in ("smoke", "training"):
            assert not run.measurement.adaptive, case
            assert run.measurement.preheat_s == 0, case
        else:
            assert run.measurement.adaptive, case
            assert run.measurement.min_steps == (6 if "x80gb" in name else 20), case  # rented by the half hour
            assert run.measurement.preheat_s > 0, case
    assert not any(search.run.measurement.adaptive for search in load_study(name).searches.values())


@pytest.mark.parametrize("model", MODELS)
def test_every_expectation_finds_its_case(model):
    study, expected = load_study(model), load_expectations(model)
    assert study.config.expectations == model
    waiting = {item.case for item in expected.expectations if item.case is not None}
    waiting |= {case for effect in expected.effects for case in (effect.arm, effect.control) if case is not None}
    assert waiting <= set(study.runs)


# --- beyond the guides -----------------------------------------------------------------------------------------------

OPTIMISATIONS = ("compile", "attention", "loss", "dataloader", "cuda-graphs")


@pytest.mark.parametrize("model", MODELS)
def test_the_second_file_goes_beyond_the_guides(model):
    study = load_study(f"{model}-beyond")
    runs = {case.removeprefix("ablations/"): run for case, run in study.runs.items()}
    for parallelism in ("none", "zero1", "fsdp"):
        assert runs[f"parallelism-{parallelism}"].parallelism == parallelism
    assert runs["control"].parallelism == "ddp"
    assert {run.activation_checkpointing for run in runs.values()} == {"none", "selective", "full"}
    assert {"auto", "cudnn", "fa4", "sdpa", "eager"} <= {run.attention for run in runs.values()}
    assert len({run.seq_len for run in runs.values()}) >= 3
    arms = {(effect.arm, effect.control) for effect in study.config.effects}
    for optimisation in OPTIMISATIONS:
        assert (f"ablations/alone-{optimisation}", "ablations/plain") in arms
        assert (f"ablations/without-{optimisation}", "ablations/all") in arms


@pytest.mark.parametrize("model", MODELS)
def test_the_second_file_repeats_every_comparison_three_times(model):
    study = load_study(f"{model}-beyond")
    for effect in study.config.effects:
        for case in (effect.arm, effect.control):
            repeats = [run.repeat for name, run in study.runs.items() if base_name(name) == case]
            assert sorted(repeats) == [0, 1, 2], case


@pytest.mark.parametrize("model", MODELS)
def test_what_changes_the_batch_keeps_the_tokens_of_a_step(model):
    runs = load_study(f"{model}-beyond").runs
    tokens = runs["ablations/control"].tokens_per_step // 4
    assert {run.tokens_per_step // run.world_size for run in runs.values() if run.stage != "smoke"} == {tokens}


def test_the_list_of_studies_is_complete():
    listed = (FOLDER / "README.md").read_text()
    for name in STUDIES:
        model, _, suffix = name.rpartition("-")
        assert name in listed or (model in listed and f"-{suffix}" in listed), name

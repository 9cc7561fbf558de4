"""The study schema: what a YAML becomes, and that bad input is told in a sentence."""

import copy
import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mfubench.config import ConfigError, RunConfig
from mfubench.experiments import STAGES, expand_study, merge, nest, parse_overrides, resolve_extends, warn_of_cpu

ROOT = Path(__file__).parents[1]
DEFAULT = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
STUDIES = sorted((ROOT / "config" / "studies").glob("*.yaml"))


def small_study(**experiments):
    return {**copy.deepcopy(DEFAULT), "experiments": experiments, "effects": []}


def test_default_study_has_every_stage():
    study = expand_study(DEFAULT, "config.yaml", 2)
    assert {run.stage for run in study.runs.values()} | {name.split("/")[0] for name in study.searches} == set(STAGES)
    assert study.skipped == {}


@pytest.mark.parametrize("path", STUDIES, ids=[path.stem for path in STUDIES])
@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_shipped_studies_expand_on_machines_of_several_sizes(path, gpus):
    values = resolve_extends(yaml.safe_load(path.read_text()), path.parent, str(path))
    study = expand_study(values, str(path), gpus)
    assert study.runs
    assert all(run.world_size <= gpus for run in study.runs.values())
    if gpus == 8:
        assert study.skipped == {}


def test_cases_differ_from_the_base_and_from_nothing_else():
    study = expand_study(small_study(baseline={"cases": {"a": {"micro_batch_size": 2}, "b": {}}}), "f.yaml", 1)
    assert study.runs["baseline/a"].micro_batch_size == 2
    assert study.runs["baseline/b"].micro_batch_size == DEFAULT["base"]["micro_batch_size"]


def test_a_ladder_inherits_the_step_before():
    ladder = {
        "tier1": {"compile": "block"},
        "tier2": {"loader": {"kind": "dataloader"}},
        "tier3": {"cuda_graphs": True},
    }
    study = expand_study(small_study(tiers={"ladder": ladder}), "f.yaml", 1)
    tier3 = study.runs["tiers/tier3"]
    assert (tier3.compile, tier3.loader.kind, tier3.cuda_graphs) == ("block", "dataloader", True)
    assert not study.runs["tiers/tier2"].cuda_graphs


def test_a_grid_of_switches_names_its_points():
    grid = {"graphs": {"cuda_graphs": [False, True], "communication.first_bucket_mb": [None, 1.5]}}
    study = expand_study(small_study(scaling={"grid": grid}), "f.yaml", 2)
    assert study.cases("scaling") == [
        f"graphs-cuda-graphs-{graphs}-communication.first-bucket-mb{size}"
        for graphs in ("false", "true")
        for size in ("-null", "1.5")
    ]


def test_a_grid_is_a_product_and_names_its_points():
    grid = {"2.1-plain": {"world_size": [1, 2], "loader.kind": ["memmap", "dataloader"], "dtype": "bfloat16"}}
    study = expand_study(small_study(scaling={"grid": grid}), "f.yaml", 2)
    assert set(study.runs) == {
        f"scaling/2.1-plain-gpus{gpus}-loader.kind{kind}" for gpus in (1, 2) for kind in ("memmap", "dataloader")
    }
    run = study.runs["scaling/2.1-plain-gpus2-loader.kinddataloader"]
    assert (run.world_size, run.loader.kind, run.dtype) == (2, "dataloader", "bfloat16")


def test_repeats_are_runs_of_their_own():
    study = expand_study(small_study(baseline={"cases": {"a": {}}, "repeats": 3}), "f.yaml", 1)
    assert [study.runs[name].repeat for name in ("baseline/a", "baseline/a-repeat1", "baseline/a-repeat2")] == [0, 1, 2]


def test_a_preset_is_overridden_key_by_key():
    cases = {"a": {"model": {"num_hidden_layers": 2}}, "b": {"model": {"preset": "qwen3-tiny", "rope_theta": 5.0}}}
    study = expand_study(small_study(baseline={"cases": cases}), "f.yaml", 1)
    assert len(study.models()) == 2
    assert study.runs["baseline/a"].model.num_hidden_layers == 2
    assert study.runs["baseline/a"].model.name == "llama2-tiny"
    assert study.runs["baseline/b"].model.qk_norm
    assert study.runs["baseline/b"].model.rope_theta == 5.0


def test_two_models_need_two_names():
    """A gate, a ceiling or an answer for `llama2-tiny` must not be of another depth."""
    cases = {"a": {}, "b": {"model": {"num_hidden_layers": 3}}}
    with pytest.raises(ConfigError, match=r"b: model\.num_hidden_layers: found 3.*give .* another model\.name"):
        expand_study(small_study(baseline={"cases": cases}), "f.yaml", 1)
    cases["b"]["model"]["name"] = "llama2-tiny-3"
    study = expand_study(small_study(baseline={"cases": cases}), "f.yaml", 1)
    assert study.models() == ["llama2-tiny", "llama2-tiny-3"]
    search = {"c": {"candidates": [2, 4], "model": {"num_hidden_layers": 5}}}
    with pytest.raises(ConfigError, match=r"memory/c: model\.num_hidden_layers: found 5"):
        expand_study(small_study(baseline={"cases": cases}, memory={"search": search}), "f.yaml", 1)


def test_a_run_travels_as_json_unchanged():
    for run in expand_study(DEFAULT, "f.yaml", 2).runs.values():
        assert RunConfig.model_validate_json(run.to_json()) == run
        assert json.loads(run.to_json())["global_batch_size"] == run.global_batch_size


def test_key_order_of_the_yaml_changes_nothing():
    case = {"loader": {"kind": "dataloader", "num_workers": 2}, "micro_batch_size": 2}
    turned = {"micro_batch_size": 2, "loader": {"num_workers": 2, "kind": "dataloader"}}
    one, other = (
        expand_study(small_study(baseline={"cases": {"a": values}}), "f.yaml", 1).runs["baseline/a"].to_json()
        for values in (case, turned)
    )
    assert one == other


def test_too_large_a_run_is_left_out_with_its_reason_or_stops():
    values = small_study(scaling={"grid": {"2.1-plain": {"world_size": [1, 8]}}})
    study = expand_study(values, "f.yaml", 4)
    assert list(study.runs) == ["scaling/2.1-plain-gpus1"]
    assert study.skipped == {"scaling/2.1-plain-gpus8": "needs 8 processes a node, this machine holds 4"}
    values["machine"]["when_too_small"] = "stop"
    with pytest.raises(ConfigError, match=r"2\.1-plain-gpus8: world_size 8 needs 8 processes"):
        expand_study(values, "f.yaml", 4)


BAD_INPUT = [
    ({"bogus": 1}, r"f\.yaml: bogus: unknown key"),
    ({"base": {**DEFAULT["base"], "micro_batchsize": 4}}, r"f\.yaml: base\.micro_batchsize: unknown key"),
    ({"base": {**DEFAULT["base"], "micro_batch_size": 0}}, r"micro_batch_size: found 0; .*greater than or equal to 1"),
    ({"base": {**DEFAULT["base"], "optimizer": {"learning_rate": "1e-3"}}}, r"found '1e-3'.*write 1\.0e-3"),
    ({"base": {**DEFAULT["base"], "model": {"preset": "llama2-tiny", "hidden_size": 130}}}, "not divisible"),
    ({"base": {**DEFAULT["base"], "model": "llama2-tinny"}}, r"base\.model: .*did you mean 'llama2-tiny'"),
    ({"base": {**DEFAULT["base"], "attention": "flash"}}, r"attention: found 'flash'; .*'sdpa'"),
    ({"base": {**DEFAULT["base"], "dataset": "nowhere"}}, r"found 'nowhere'; datasets of this study: stdlib"),
    ({"base": {**DEFAULT["base"], "world_size": 2, "parallelism": "none"}}, "world_size is 2"),
    ({"base": {**DEFAULT["base"], "model": "gpt2-tiny", "seq_len": 512}}, r"seq_len 512 is above"),
    ({"base": {**DEFAULT["base"], "global_batch_size": 7}}, "global_batch_size is derived"),
    ({"experiments": {"smok": {}}}, r"experiments\.smok"),
    ({"experiments": {"baseline": {"grid": {"a": {"world_size": 2}}}}}, "no key holds a list"),
    ({"experiments": {"memory": {"search": {"a": {}}}}}, r"candidates: missing"),
    ({"experiments": {"memory": {"search": {"a": {"candidates": [8, 4]}}}}}, "rising"),
    ({"effects": [{"name": "x", "arm": "baseline/none", "control": "baseline/1.1-plain"}]}, "no case 'baseline/none'"),
    ({"datasets": {"stdlib": {"source": "embedded", "tokenizer": "gone"}}}, r"datasets\.stdlib\.tokenizer"),
    ({"base": {**DEFAULT["base"], "seed": 3, "seed.x": 1}}, "seed and seed.x are both given"),
    ({"base": {**DEFAULT["base"], "optimizer.eps": 1e-9}}, "optimizer and optimizer.eps are both given"),
    ({"base": {**DEFAULT["base"], "repeat": 3}}, r"base\.repeat: cannot be set"),
    ({"experiments": {"baseline": {"base": {"name": "a/b"}}}}, r"experiments\.baseline\.base\.name: cannot be set"),
    ({"experiments": {"baseline": {"grid": {"a": {"world_size": []}}}}}, r"grid\.a\.world_size: holds no values"),
    (
        {"effects": [{"name": "x", "arm": "baseline/1.1-plain", "control": "baseline/1.1-plain"}]},
        r"arm and control are both baseline/1\.1-plain",
    ),
    ({"expectations": "nothere"}, r"expectations: found 'nothere'; in .*llama2-1\.36b"),
    ({"machine": {"devices": [0, 0]}}, "a card is named twice"),
    ({"machine": {"devices": [-1]}}, r"machine\.devices\.0: found -1"),
    ({"results_dir": "src"}, r"results_dir: found 'src', where this project's own files are"),
    ({"resources_dir": "config/mine"}, r"resources_dir: found 'config/mine', where this project's own files are"),
    ({"study": "reference"}, "results/reference holds the results that come with this project"),
    ({"study": "h200", "results_dir": "results/reference"}, "results/reference holds the results"),
    (
        {"base": {**DEFAULT["base"], "model": {"preset": "llama2-tiny", "vocab_size": 4095}}},
        r"model\.vocab_size: found 4095, but tokenizers\.\S+\.vocab_size is 4096",
    ),
    ({"machine": {"gpus": 0}}, r"machine\.gpus.*: found 0; .*auto, which is what a machine without GPUs takes"),
    ({"machine": {"gpus": -1}}, r"machine\.gpus.*: found -1; "),
    (
        {
            "machine": {"when_too_small": "skip"},
            "experiments": {"baseline": {"cases": {"a": {"world_size": 4}}}},
            "effects": [],
        },
        r"leaves out every run \(baseline/a needs 4 processes a node, this machine holds 2\)",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD_INPUT, ids=[message for _, message in BAD_INPUT])
def test_bad_input_is_told_with_file_key_and_way_out(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        expand_study({**copy.deepcopy(DEFAULT), **change}, "f.yaml", 2)
    assert str(caught.value).startswith("f.yaml")


@pytest.mark.parametrize(
    ("stage", "overrides", "complaint"),
    [
        ("baseline", {"max_iters": 3}, "max_iters: found 3, which leaves no step to measure after the first one"),
        ("tiers", {"max_iters": 4, "measurement": {"warmup_steps": 3}}, "raise it to 5 or more"),
        ("scaling", {"measurement": {"adaptive": True}}, "min_steps: found 20, but max_iters 14 leaves 11 to measure"),
        ("baseline", {"evaluation": {"only": True}}, "evaluation.only: needs `continues`"),
        ("training", {"evaluation": {"only": True}}, "evaluation.only: needs `continues`"),
    ],
)
def test_a_run_that_could_measure_nothing_is_refused(stage, overrides, complaint):
    with pytest.raises(ConfigError, match=rf"f\.yaml: {stage}/a: .*{re.escape(complaint)}"):
        expand_study(small_study(**{stage: {"cases": {"a": overrides}}}), "f.yaml", 2)


def test_one_step_that_counts_is_enough_and_some_stages_need_none():
    short = {"max_iters": 1, "measurement": {"adaptive": True}}
    expand_study(small_study(baseline={"cases": {"a": {"max_iters": 4}}}), "f.yaml", 2)
    expand_study(small_study(smoke={"cases": {"a": short}}, training={"cases": {"a": short}}), "f.yaml", 2)
    expand_study(small_study(memory={"search": {"a": {**short, "candidates": [1]}}}), "f.yaml", 2)


@pytest.mark.parametrize("declared", ["cases", "ladder", "search"])
def test_a_case_name_is_no_longer_than_a_file_name_may_be(declared):
    values = {"candidates": [1]} if declared == "search" else {}
    expand_study(small_study(memory={declared: {"a" * 100: values}}), "f.yaml", 2)
    with pytest.raises(ConfigError, match="has 101 characters; 100 at most"):
        expand_study(small_study(memory={declared: {"a" * 101: values}}), "f.yaml", 2)


@pytest.mark.parametrize("key", ["study", "tokenizers", "datasets"])
def test_other_names_are_no_longer_either(key):
    def named(length: int) -> dict:
        study, name = small_study(), "a" * length
        return study | {key: name if key == "study" else study[key] | {name: next(iter(study[key].values()))}}

    expand_study(named(100), "f.yaml", 2)
    with pytest.raises(ConfigError, match=r"at most 100 characters"):
        expand_study(named(101), "f.yaml", 2)


@pytest.mark.parametrize("values", [{"seed": 2**53 + 1}, {"measurement": {"warmup_steps": -(10**23)}}])
def test_a_number_that_no_counter_holds_is_refused_with_its_key(values):
    place = "seed" if "seed" in values else "measurement.warmup_steps"
    with pytest.raises(ConfigError, match=rf"cases\.a\.{place}: found -?\d+; a whole number here is at most 2\^53"):
        expand_study(small_study(baseline={"cases": {"a": values}}), "f.yaml", 2)


def test_command_line_overrides_are_yaml():
    assert parse_overrides(["loader.kind=memmap", "seed=3", "model.rope_theta=1.0e+4"]) == {
        "loader": {"kind": "memmap"},
        "seed": 3,
        "model": {"rope_theta": 10000.0},
    }
    with pytest.raises(ConfigError, match="key=value"):
        parse_overrides(["loader"])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["seed=2", "max_iters=3", "seed=4"], "'seed=4': seed is given twice; keep one of them"),
        (["loader.kind=memmap", "loader.kind=memmap"], "'loader.kind=memmap': loader.kind is given twice"),
        (["loader={kind: memmap}", "loader.kind=dataloader"], "loader and loader.kind are both given"),
        (["model.a.b=1", "model.a=2"], "model.a and model.a.b are both given"),
    ],
)
def test_a_key_stands_once_on_a_command_line(words, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_overrides(words)


def test_a_study_extends_another(tmp_path):
    (tmp_path / "base.yaml").write_text("study: base\nbase: {seed: 1, seq_len: 8}\nexperiments: {smoke: {a: 1}}\n")
    (tmp_path / "ring.yaml").write_text("extends: ring\n")
    child = {"extends": "base", "study": "child", "base": {"seed": 2}, "experiments": {"smoke": None}}
    assert resolve_extends(child, tmp_path, "f.yaml") == {
        "study": "child",
        "base": {"seed": 2, "seq_len": 8},
        "experiments": {},
    }
    with pytest.raises(ConfigError, match=r"f\.yaml: extends: found 'bas'; studies in .*: base, ring"):
        resolve_extends({"extends": "bas"}, tmp_path, "f.yaml")
    with pytest.raises(ConfigError, match="circle"):
        resolve_extends({"extends": "ring"}, tmp_path, "f.yaml")


def test_nesting_and_merging():
    assert nest({"a.b": 1, "a.c": 2}) == {"a": {"b": 1, "c": 2}}
    assert merge({"a": {"b": 1}}, {"a.c": 2}) == {"a": {"b": 1, "c": 2}}
    assert merge({"model": {"preset": "x", "k": 1}}, {"model": {"preset": "y"}}) == {"model": {"preset": "y"}}


# --- no input ends in a traceback -------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers(-3, 70_000) | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def paths_of(value, prefix=()):
    """Every key path of nested mappings and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*prefix, key)
        yield from paths_of(item, (*prefix, key))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from(list(paths_of(DEFAULT))), value=anything, extra=st.booleans())
def test_any_value_anywhere_gives_a_study_or_a_sentence(path, value, extra):
    values = copy.deepcopy(DEFAULT)
    holder = values
    for key in path[:-1]:
        holder = holder[key]
    if extra and isinstance(holder, dict):
        holder[f"{path[-1]}x"] = value
    else:
        holder[path[-1]] = value
    try:
        study = expand_study(values, "f.yaml", 2)
    except ConfigError as error:
        assert str(error).startswith("f.yaml")
    else:
        assert all(RunConfig.model_validate_json(run.to_json()) == run for run in study.runs.values())


# --- runs that continue another ---------------------------------------------------------------------------------------


def continuing(**training):
    """A study whose stage training holds `pretrain`, which leaves a checkpoint, and these cases."""
    cases = {"pretrain": {"max_iters": 20, "checkpoint": {"at_end": True}}, **training}
    return expand_study(small_study(training={"cases": cases}), "f.yaml", 1)


EVALUATE = {"continues": "training/pretrain", "evaluation": {"only": True}}


def test_a_run_continues_another():
    found = continuing(evaluate=EVALUATE, more={"continues": "training/pretrain", "max_iters": 30})
    assert found.runs["training/evaluate"].continues == "training/pretrain"
    assert found.runs["training/more"].max_iters == 30


def test_a_run_goes_on_from_the_last_checkpoint_and_not_from_the_last_step_of_the_one_before():
    cases = {
        "first": {"max_iters": 3, "checkpoint": {"interval": 2}},  # leaves one after 2 steps
        "second": {"continues": "training/first", "max_iters": 5, "checkpoint": {"interval": 3}},  # and this after 3
        "third": {**EVALUATE, "continues": "training/second"},
    }
    assert continuing(**cases).runs["training/third"].continues == "training/second"


@pytest.mark.parametrize(
    ("cases", "complaint"),
    [
        (
            {"evaluate": {**EVALUATE, "continues": "training/none"}},
            "found 'training/none'; runs of this study that leave",
        ),
        ({"evaluate": {**EVALUATE, "continues": "none"}}, "continues: found 'none'"),
        ({"evaluate": {**EVALUATE, "seq_len": 16}}, "training/pretrain differs in seq_len"),
        ({"more": {"continues": "training/pretrain", "max_iters": 20}}, "leaves none to do"),
        ({"more": {"continues": "training/more"}}, "cannot start from its own checkpoint"),
        (
            {
                "one": {"continues": "training/two", "max_iters": 30, "checkpoint": {"at_end": True}},
                "two": {"continues": "training/one", "max_iters": 40, "checkpoint": {"at_end": True}},
            },
            "training/one -> training/two -> training/one is a circle",
        ),
        ({"bare": {}, "evaluate": {**EVALUATE, "continues": "training/bare"}}, "training/bare leaves no checkpoint"),
        (
            {
                "short": {"max_iters": 4, "checkpoint": {"interval": 100}},
                "evaluate": {**EVALUATE, "continues": "training/short"},
            },
            "continues: training/short leaves no checkpoint (checkpoint.interval 100, max_iters 4); set checkpoint: "
            "{at_end: true} there",
        ),
        (
            {
                "more": {"continues": "training/pretrain", "max_iters": 30, "checkpoint": {"interval": 18}},
                "evaluate": {**EVALUATE, "continues": "training/more"},
            },
            "training/more leaves no checkpoint (checkpoint.interval 18, max_iters 30)",
        ),
        (
            {
                "first": {**EVALUATE, "checkpoint": {"at_end": True}},
                "second": {**EVALUATE, "continues": "training/first"},
            },
            "training/first only evaluates and leaves no checkpoint; name the run that it continues, training/pretrain",
        ),
    ],
)
def test_a_continuation_that_cannot_be_is_refused(cases, complaint):
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        continuing(**cases)


def test_what_continues_a_run_that_is_left_out_is_left_out_too():
    cases = {"pretrain": {"world_size": 2, "max_iters": 20, "checkpoint": {"at_end": True}}}
    cases |= {
        "more": {"continues": "training/pretrain", "max_iters": 30, "checkpoint": {"interval": 15}},
        "evaluate": {**EVALUATE, "continues": "training/more"},
        "alone": {"max_iters": 20},
    }
    study = expand_study(small_study(training={"cases": cases}), "f.yaml", 1)
    assert set(study.skipped) == {"training/pretrain", "training/more", "training/evaluate"}
    assert study.skipped["training/evaluate"] == "continues training/more, which is left out"


def test_a_study_for_gpus_is_not_begun_on_a_cpu_without_a_word():
    values = copy.deepcopy(DEFAULT)
    assert warn_of_cpu(expand_study(values, "f.yaml", 2)) is None
    values["experiments"]["baseline"]["cases"]["1.1-plain"] = {"model": "llama2-1.36b"}
    warning = warn_of_cpu(expand_study(values, "f.yaml", 2))
    assert warning is not None and "NO GPU WAS FOUND: 1 runs" in warning and "llama2-1.36b" in warning

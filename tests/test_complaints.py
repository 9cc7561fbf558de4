"""What is said of a key that does not exist."""

import datetime

import pytest

from mfubench.config import ConfigError, RunConfig, parse
from mfubench.experiments import StudyConfig

STUDY = {"study": "a", "tokenizers": {}, "datasets": {}, "base": {}, "experiments": {}}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"expriments": {}}, "f.yaml: expriments: unknown key (found {}); did you mean experiments?"),
        ({"machine": {"device": [0]}}, "f.yaml: machine.device: unknown key (found [0]); did you mean devices?"),
        (
            {"experiments": {"smoke": {"case": {}}}},
            "f.yaml: experiments.smoke.case: unknown key (found {}); did you mean cases?",
        ),
        (
            {"datasets": {"d": {"source": "embedded", "tokenizer": "t", "val_fractoin": 0.1}}},
            "f.yaml: datasets.d.val_fractoin: unknown key (found 0.1); did you mean val_fraction?",
        ),
        (
            {"machine": {"gpus": "x"}},
            "f.yaml: machine.gpus: found 'x'; input should be a valid integer (without quotes), or input should be "
            "'auto'",
        ),
        (
            {"effects": [{"name": "a", "arm": "b", "control": "c", "expcted": "d"}]},
            "f.yaml: effects.0.expcted: unknown key (found 'd'); did you mean expected?",
        ),
    ],
)
def test_the_nearest_key_of_that_place_is_named(change, complaint):
    with pytest.raises(ConfigError) as caught:
        parse(StudyConfig, STUDY | change, "f.yaml")
    assert str(caught.value) == complaint


def test_where_none_is_near_all_keys_of_that_place_are_named():
    with pytest.raises(ConfigError, match=r"optimizer\.xyz: unknown key \(found 1\); keys here: beta1, beta2, eps"):
        parse(RunConfig, {"optimizer": {"xyz": 1}}, "f.yaml")


def test_a_value_that_holds_itself_or_is_none_of_json_is_told():
    circle: dict = {}
    circle["a"] = circle
    with pytest.raises(ConfigError, match=r"f\.yaml: holds itself"):
        parse(StudyConfig, circle, "f.yaml")
    date = datetime.date(2026, 1, 2)
    with pytest.raises(ConfigError, match=r"f\.yaml: base\.seed: found 2026-01-02, which YAML reads as a date; put it"):
        parse(StudyConfig, STUDY | {"base": {"seed": date}}, "f.yaml")
    with pytest.raises(ConfigError, match="a key that is no text"):
        parse(StudyConfig, STUDY | {date: 1}, "f.yaml")

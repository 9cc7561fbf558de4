"""The audit of reported figures and legacy logs: the known cases, and faults planted one by one in consistent ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import make_run_log
from typer.testing import CliRunner

from mfubench import hardware
from mfubench.audit import audit_figures, audit_paths
from mfubench.audit.reported import make_reported, parse_figures
from mfubench.cli import app
from mfubench.config import ConfigError
from mfubench.flops import Convention, flop_terms, flops_per_token
from mfubench.presets import CONFIG_DIR, load_model
from mfubench.run_log import write_run_log

CASES = Path(__file__).parent / "audit_cases"
EXPECTED = json.loads((CASES / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", EXPECTED)
def test_known_cases(file: str) -> None:
    answer = CliRunner().invoke(app, ["audit", "--json", str(CASES / file)])
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.output)
    expected = EXPECTED[file]
    assert {run["name"] for run in found["runs"]} == expected["runs"].keys()
    for run in found["runs"]:
        for key, value in expected["runs"][run["name"]].items():
            if key != "note":
                assert run[key] == value, (run["name"], key)
    if "weak_scaling_efficiency" in expected:
        assert found["weak_scaling_efficiency"] == expected["weak_scaling_efficiency"]


def test_all_cases_at_once() -> None:
    report = audit_paths([CASES / file for file in EXPECTED])
    assert len(report.runs) == 4
    assert report.weak_scaling_efficiency == 0.9984
    assert report.impossible
    assert "214" not in report.verdict() and "IMPOSSIBLE" in report.verdict()
    assert "99.84%" in report.to_text()


# --- faults in one good report ----------------------------------------------------------------------------------------

# llama2-1.36b on 8 B200 at 41.7 % MFU: everything stated, everything true.
GOOD: dict[str, Any] = {
    "name": "good",
    "gpu_name": "NVIDIA B200",
    "num_gpus": 8,
    "precision": "bfloat16",
    "model": "llama2-1.36b",
    "parameters": 1_294_159_104,
    "seq_len": 2048,
    "micro_batch_size": 24,
    "gradient_accumulation_steps": 16,
    "global_batch_size": 3072,
    "step_time_s": 7.363,
    "tokens_per_s": 854_472,
    "flops_per_token": 8_784_170_496,
    "hardware_peak_tflops": 18_000,
    "achieved_tflops": 7505.8,
    "mfu_percent": 41.7,
}


def codes(run: dict[str, Any]) -> list[str]:
    figures = [f"{key}={value}" for key, value in run.items() if value is not None]
    return audit_figures(figures).runs[0].codes


def test_good_report_stands_with_any_figure_missing() -> None:
    assert codes(GOOD) == []
    for key in GOOD.keys() - {"num_gpus", "model"}:
        assert codes({**GOOD, key: None}) == [], key


FAULTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "rate of one rank": (
        {"tokens_per_s": 106_809, "achieved_tflops": 938.2, "mfu_percent": 5.21},
        ["tokens_per_s_is_one_rank"],
    ),
    "rate of one micro-step": (
        {"tokens_per_s": 53_405, "achieved_tflops": 469.1, "mfu_percent": 2.61},
        ["tokens_per_s_excludes_accumulation"],
    ),
    "global rate shown per GPU": (
        {"tokens_per_s": None, "tokens_per_s_per_gpu": 854_472, "achieved_tflops": None, "mfu_percent": None},
        ["ranks_counted_twice"],
    ),
    "rate per GPU shown as global": (
        {
            "tokens_per_s": 106_809,
            "tokens_per_s_per_gpu": 106_809,
            "achieved_tflops": None,
            "mfu_percent": None,
            "step_time_s": None,
        },
        ["tokens_per_s_is_one_rank"],
    ),
    "sparse peak": ({"hardware_peak_tflops": 36_000, "mfu_percent": 20.85}, ["peak_is_sparse"]),
    "sparse peak of one card": ({"hardware_peak_tflops": 4500, "mfu_percent": 166.8}, ["peak_is_sparse"]),
    "sparse peak behind the MFU": ({"hardware_peak_tflops": None, "mfu_percent": 20.85}, ["peak_is_sparse"]),
    "peak of an A100": ({"hardware_peak_tflops": 2496, "mfu_percent": 300.7}, ["peak_is_wrong"]),
    "peak of TF32": ({"hardware_peak_tflops": 9000, "mfu_percent": 83.4}, ["peak_is_wrong"]),
    "one card's peak behind the MFU": ({"hardware_peak_tflops": None, "mfu_percent": 333.6}, ["peak_is_wrong"]),
    "MFU divided by another peak": ({"mfu_percent": 55.0}, ["peak_is_wrong"]),
    "unknown card": ({"gpu_name": "NVIDIA B209", "mfu_percent": None}, ["peak_unknown"]),
    "banner of another accumulation": (
        {"gradient_accumulation_steps": 64, "global_batch_size": 12_288},
        ["accumulation_differs_from_banner"],
    ),
    "rate of other steps, 2 % off": (
        {"tokens_per_s": 0.977 * 854_472, "achieved_tflops": None, "mfu_percent": 40.74},
        ["rate_differs_from_step_time"],
    ),
    "rate of other steps, 15 % off, of half a micro-step": (
        {"tokens_per_s": 13.55 / 16 * 854_472, "achieved_tflops": None, "mfu_percent": None},
        ["rate_differs_from_step_time"],
    ),
    "rate of other steps, by chance 15 of 16 micro-steps": (
        {"tokens_per_s": 15 / 16 * 854_472, "achieved_tflops": None, "mfu_percent": None},
        ["rate_differs_from_step_time"],
    ),
    "tokens before a stated resume": (
        {"steps": 100, "resumed_at_step": 50, "total_tokens": 629_145_600, "total_time_s": 368.15},
        ["resumed_tokens_counted"],
    ),
    "rate of one rank beside the true MFU of no named convention": (
        {"tokens_per_s": 854_472 / 8, "achieved_tflops": None, "hardware_peak_tflops": None}
        | {"mfu_percent": 39.1, "flops_per_token": None},
        ["tokens_per_s_is_one_rank", "flops_convention_unstated"],
    ),
    "rate of other steps, the micro-batch unknown": (
        {"tokens_per_s": 0.5 * 854_472, "achieved_tflops": None, "mfu_percent": None}
        | dict.fromkeys(("micro_batch_size", "gradient_accumulation_steps")),
        ["rate_differs_from_step_time"],
    ),
    "rate of one rank beside the true MFU": (
        {"tokens_per_s": 854_472 / 8, "achieved_tflops": None, "hardware_peak_tflops": None},
        ["tokens_per_s_is_one_rank"],
    ),
    "rate below the totals of its own steps": (
        {"tokens_per_s": 427_236, "achieved_tflops": None, "mfu_percent": None, "step_time_s": None}
        | {"steps": 100, "total_tokens": 629_145_600, "total_time_s": 736.3},
        ["rate_differs_from_step_time"],
    ),
    "banner of another global batch": ({"global_batch_size": 12_288}, ["accumulation_differs_from_banner"]),
    "faster than the card": (
        {"step_time_s": 7.363 / 4, "tokens_per_s": 4 * 854_472, "achieved_tflops": None, "mfu_percent": 166.8},
        ["above_ceiling"],
    ),
    "FLOPs of no convention": (
        {"flops_per_token": 6 * 1_294_159_104 * 1.3, "achieved_tflops": None, "mfu_percent": None},
        ["flops_convention_unstated"],
    ),
    "convention misnamed": ({"flops_convention": "causal"}, ["flops_convention_unstated"]),
    "MFU by another convention": (
        {"hardware_peak_tflops": None, "flops_per_token": None, "achieved_tflops": None, "mfu_percent": 37.2},
        ["flops_convention_unstated"],
    ),
    "parameters without the embedding": ({"parameters": 1_294_159_104 - 73_728_000}, ["parameters_differ"]),
    "tokens of before a resume": (
        {"total_tokens": 2 * 854_472 * 3600, "total_time_s": 3600, "resumed_at_step": 1000},
        ["resumed_tokens_counted"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found_and_nothing_else(fault: str) -> None:
    changes, expected = FAULTS[fault]
    assert codes({**GOOD, **changes}) == expected


# The same model on 8 H100s; the stated peak is one card's.
ONE_CARDS_PEAK: dict[str, Any] = {
    "gpu_name": "NVIDIA H100 80GB HBM3",
    "num_gpus": 8,
    "model": "llama2-1.36b",
    "seq_len": 2048,
    "tokens_per_s": 576_000,
    "hardware_peak_tflops": 989.4,
}


@pytest.mark.parametrize("convention", ["palm", "matmul", "causal"])
def test_one_cards_peak_stands_with_an_mfu_of_any_convention(convention: Convention) -> None:
    terms = flop_terms(load_model("llama2-1.36b"), 2048)
    mfu = 576_000 * flops_per_token(terms, convention) / (8 * 989.4e12)
    assert codes({**ONE_CARDS_PEAK, "mfu_percent": round(100 * mfu, 1)}) == []


@pytest.mark.parametrize("changes", [{}, {"hardware_peak_tflops": 8 * 989.4}, {"gpu_name": None}])
def test_the_true_mfu_is_of_the_peak_of_all_cards(changes: dict[str, Any]) -> None:
    run = {**ONE_CARDS_PEAK, "mfu_percent": 80, **changes}
    (finding,) = audit_figures([f"{key}={value}" for key, value in run.items() if value]).runs[0].findings
    assert finding.code == "peak_is_wrong"
    assert finding.true_value == pytest.approx(63.9, abs=0.05)


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"tokens_per_s": 106_809 / 16, "gradient_accumulation_steps": 1}, "one GPU's 1 micro-step instead of 8 x 1"),
        ({"gradient_accumulation_steps": 1}, "1 micro-step per GPU is claimed, but"),
        ({"gradient_accumulation_steps": 4}, "4 micro-steps per GPU are claimed, but"),
    ],
)
def test_one_micro_step_is_told_in_the_singular(changes: dict[str, Any], claim: str) -> None:
    keys = ("gpu_name", "num_gpus", "seq_len", "micro_batch_size", "step_time_s", "tokens_per_s")
    run = {**{key: GOOD[key] for key in keys}, **changes}
    (finding,) = audit_figures([f"{key}={value}" for key, value in run.items()]).runs[0].findings
    assert claim in finding.sentence


@pytest.mark.parametrize(
    ("figures", "certainty", "impossible"),
    [
        ({"tokens_per_s": 1e9, "parameters": 1_360_000_000}, "certain", True),  # 450 times the peak by 6N
        ({"tokens_per_s": 5e6, "parameters": 1_360_000_000}, "certain", True),  # 3N are above the peak, whatever N is
        ({"tokens_per_s": 3e6, "parameters": 1_360_000_000}, "likely", False),  # 6N only: embeddings may explain it
        ({"tokens_per_s": 1e9, "model": "llama2-1.36b"}, "certain", True),  # no length: no attention
        ({"mfu_percent": 130.0, "model": "llama2-1.36b", "seq_len": 2048}, "certain", True),
        ({"mfu_percent": 103.0, "model": "llama2-1.36b", "seq_len": 2048}, "likely", False),
    ],
)
def test_beyond_the_card_with_few_figures(figures: dict[str, Any], certainty: str, impossible: bool) -> None:
    run = {"gpu": "NVIDIA B200", "num_gpus": 8, **figures}
    verdict = audit_figures([f"{key}={value}" for key, value in run.items()]).runs[0]
    found = {finding.code: finding for finding in verdict.findings}
    assert found.keys() == {"above_ceiling"}
    finding = found["above_ceiling"]
    assert (finding.certainty, finding.impossible) == (certainty, impossible)


def test_an_mfu_above_100_percent_is_impossible_by_itself() -> None:
    report = audit_figures(["mfu=140"])
    assert report.impossible
    assert "by any convention" in report.runs[0].findings[-1].sentence


def test_what_could_not_be_checked_is_named() -> None:
    report = audit_figures(["gpu=NVIDIA B200", "tokens_per_s=9000", "parameters=1360000000"])
    text = " ".join(report.to_text().split())
    assert "nothing to object to in what could be checked" in text
    assert "whether the rate counts all GPUs and micro-steps (needs step_time_s, micro_batch_size, seq_len)" in text
    assert report.to_json()["runs"][0]["not_checked"] == report.runs[0].not_checked
    good = audit_figures([f"{key}={value}" for key, value in GOOD.items()])
    assert good.runs[0].not_checked == []
    assert good.to_text().endswith("1 run, nothing to object to")


@pytest.mark.parametrize("words", [["gpu=NVIDIA B200", "num_gpus=8"], ["tokens_per_s=9000"], ["name=x"]])
def test_figures_that_nothing_can_be_held_against_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="holds no figures that can be audited"):
        audit_figures(words)


def test_mfu_without_anything_to_compute_it_from() -> None:
    assert codes({"gpu_name": "NVIDIA H100 80GB HBM3", "mfu_percent": 55, "tokens_per_s": 60_000}) == [
        "flops_convention_unstated"
    ]


@pytest.mark.parametrize("stated", ["mfu=41.7", "mfu=41.7%", "mfu=41.7 %", "mfu_percent=41.7", "mfu_percent=41.7%"])
def test_an_mfu_is_a_percentage(stated: str) -> None:
    others = [f"{key}={value}" for key, value in GOOD.items() if key != "mfu_percent"]
    (verdict,) = audit_figures([*others, stated]).runs
    assert (verdict.codes, verdict.stated_mfu) == ([], pytest.approx(0.417))


def test_an_mfu_below_one_percent_can_be_said() -> None:
    for stated in ("mfu_percent=0.604", "mfu=0.604%"):
        assert audit_figures([stated, "gpu=B200", "tokens_per_s=9000"]).runs[0].stated_mfu == pytest.approx(0.00604)


def test_a_fraction_in_a_file_is_asked_about_as_well(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"mfu": 0.417, "gpu": "B200", "tokens_per_s": 9000}')
    with pytest.raises(ConfigError, match=r"mfu_percent=41\.7"):
        audit_paths([tmp_path / "run.json"])


def test_whole_numbers_may_be_written_with_an_exponent() -> None:
    report = make_reported({"parameters": 1.36e9}, "a file")
    assert report.parameters == 1_360_000_000
    figures = parse_figures(["parameters=1.36e9", "gpus=8.0", "seq_len=2,048", "steps=1e3"])
    assert (figures.parameters, figures.num_gpus, figures.seq_len, figures.steps) == (1_360_000_000, 8, 2048, 1000)


def test_what_an_mfu_lacks_is_said() -> None:
    figures = ["gpu=H100 SXM", "gpus=8", "tokens_per_s=540000", "mfu=60"]
    (finding,) = audit_figures([*figures, "model=llama2-1.36b"]).runs[0].findings
    assert finding.code == "flops_convention_unstated"
    assert "with the model (llama2-1.36b), but without seq_len" in finding.sentence
    (verdict,) = audit_figures([*figures, "model=llama2-1.36b"]).runs
    assert any(check.endswith("(needs seq_len, or flops_per_token)") for check in verdict.not_checked)
    (finding,) = audit_figures(figures).runs[0].findings
    assert "without FLOPs a token, their convention or the model" in finding.sentence


def test_a_finding_ends_in_one_full_stop() -> None:
    report = audit_figures(["gpu=H109 SXM", "tokens_per_s=540000", "model=llama2-1.36b", "mfu=140"])
    assert "peak_unknown" in report.runs[0].codes
    assert not any(finding.sentence.endswith(".") for finding in report.runs[0].findings)
    assert ".." not in report.to_text()


def test_tables_that_contradict_themselves() -> None:
    """165K tokens/s of the 1.8B model on 8 B200 are 11 % MFU, not 50; 85B tokens in 6 hours are beyond the cards."""
    model = {"gpu_name": "NVIDIA B200", "num_gpus": 8, "model": "qwen3-1.8b", "seq_len": 2048}
    verdict = audit_figures(
        [f"{k}={v}" for k, v in {**model, "tokens_per_s": 165_000, "mfu_percent": 50}.items()]
    ).runs[0]
    assert verdict.codes == ["peak_is_wrong"]
    assert verdict.true_mfu_palm == pytest.approx(0.112, abs=0.001)
    assert codes({**model, "total_tokens": 85e9, "total_time_s": 6 * 3600}) == ["above_ceiling"]


def test_runs_with_unequal_work_are_not_comparable(tmp_path: Path) -> None:
    runs = [
        {
            **GOOD,
            "model": None,
            "name": "four",
            "num_gpus": 4,
            "gradient_accumulation_steps": 8,
            "global_batch_size": 768,
        },
        {**GOOD, "model": None, "name": "eight"},
    ]
    runs[0] |= {"tokens_per_s": 427_236, "step_time_s": 3.6815, "hardware_peak_tflops": 9000, "achieved_tflops": 3752.9}
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"runs": [{k: v for k, v in run.items() if v is not None} for run in runs]}))
    report = audit_paths([path])
    assert [run.codes for run in report.runs] == [["workloads_differ"], ["workloads_differ"]]
    assert report.weak_scaling_efficiency == 1.0


def test_bad_figures_are_told_in_a_sentence() -> None:
    for figures, message in [
        (["tokens_per_second=5"], "did you mean tokens_per_s"),
        (["num_gpus=eight"], "num_gpus"),
        (["B200"], "key=value"),
        ([], "key=value"),
        (["precision=int4"], "precision 'int4'"),
        (["tokens_per_s=nan"], "tokens_per_s"),
        (["tokens_per_s=1e300"], "tokens_per_s"),
        (["tokens_per_s=5", "tokens_per_s=6"], "given twice, as '5' and '6'"),
        (["gpu=B200", "gpu_name=H100"], "given twice"),
        (["mfu=0.604"], r"mfu: found 0.604; give mfu_percent=60.4 \(or mfu_percent=0.604 if it is that low\)"),
        (["mfu=1"], r"mfu: found 1; give mfu_percent=100 \("),
        (["mfu=half%"], "mfu_percent: found 'half'"),
        (["parameters=1.5"], "parameters: found '1.5'"),
        (["parameters=1e400000"], "parameters: found '1e400000'"),
        (["gpus=1.5e0"], "num_gpus: found '1.5e0'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            audit_figures(figures)


def test_command_line() -> None:
    words = ["gpu=NVIDIA B200", "num_gpus=8", "tokens_per_s=106,809", "step_time_s=29.452", "micro_batch_size=24"]
    words += ["seq_len=2048", "gradient_accumulation_steps=64", "model=llama2-1.36b"]
    answer = CliRunner().invoke(app, ["audit", "--reported", *words])
    assert answer.exit_code == 0
    assert "854,472 tokens/s, MFU 41.7% palm" in answer.output
    assert CliRunner().invoke(app, ["audit", "--strict", "--reported", *words]).exit_code == 1


# --- faults in one good legacy log ------------------------------------------------------------------------------------


@pytest.fixture
def good_legacy() -> dict[str, Any]:
    """The A6000 log with its rates made those of both ranks."""
    log = json.loads((CASES / "legacy_llama2_a6000.json").read_text(encoding="utf-8"))
    for entry in log["training_iterations"]:
        if isinstance(entry["mfu"], dict):
            for key in ("mfu", "mfu_percent", "flops_achieved", "tokens_per_sec", "achieved_tflops"):
                entry["mfu"][key] *= 2
    return log


def scale(**factors: float) -> Callable[[dict[str, Any]], None]:
    def plant(log: dict[str, Any]) -> None:
        for entry in log["training_iterations"][1:]:
            for key, factor in factors.items():
                entry["mfu"][key] *= factor

    return plant


def rate_without_accumulation(log: dict[str, Any]) -> None:
    scale(tokens_per_sec=1 / 8, mfu=1 / 8, flops_achieved=1 / 8)(log)


def compile_in_the_average(log: dict[str, Any]) -> None:
    first = copy.deepcopy(log["training_iterations"][1])
    seconds = log["training_iterations"][0]["time_ms"] / 1e3
    first |= {"iter": 0, "time_ms": seconds * 1e3}
    first["mfu"]["tokens_per_sec"] = 163_840 / seconds
    log["training_iterations"][0] = first


def evaluation_in_the_iteration(log: dict[str, Any]) -> None:
    log["startup_info"]["config"]["eval_interval"] = 100
    for entry in log["training_iterations"]:
        if entry["iter"] and entry["iter"] % 100 == 0:
            seconds = entry["time_ms"] / 1e3 + 25
            entry["time_ms"], entry["mfu"]["tokens_per_sec"] = seconds * 1e3, 163_840 / seconds


def clock_read_too_early(log: dict[str, Any]) -> None:
    scale(tokens_per_sec=4, mfu=4, flops_achieved=4)(log)
    for entry in log["training_iterations"][1:]:
        entry["time_ms"] /= 4


def card_that_fell_to_another(log: dict[str, Any]) -> None:
    scale(hardware_peak_flops=989.4 / 155, mfu=155 / 989.4)(log)


def unknown_card(log: dict[str, Any]) -> None:
    log["startup_info"]["hardware"]["gpu_name"] = "NVIDIA RTX A6001"


def rates_of_nothing(log: dict[str, Any]) -> None:
    for entry in log["training_iterations"][1:20]:
        entry["mfu"]["tokens_per_sec"] = 0.0


LEGACY_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], list[str]]] = {
    "none": (scale(), []),
    "rate of one rank": (scale(tokens_per_sec=0.5, mfu=0.5, flops_achieved=0.5), ["tokens_per_s_is_one_rank"]),
    "rate of one micro-step": (rate_without_accumulation, ["tokens_per_s_excludes_accumulation"]),
    "sparse peak": (scale(hardware_peak_flops=2, mfu=0.5), ["peak_is_sparse"]),
    "peak of another card": (card_that_fell_to_another, ["peak_is_wrong"]),
    "unknown card": (unknown_card, ["peak_unknown"]),
    "some rates of nothing": (rates_of_nothing, []),
    "clock read too early": (clock_read_too_early, ["above_ceiling"]),
    "FLOPs of another model": (scale(flops_per_token=1.4), ["flops_convention_unstated"]),
    "compilation counted": (compile_in_the_average, ["warm_up_included"]),
    "evaluation counted": (evaluation_in_the_iteration, ["time_contains_other_work"]),
}


@pytest.mark.parametrize("fault", LEGACY_FAULTS)
def test_planted_fault_in_a_legacy_log(fault: str, good_legacy: dict[str, Any], tmp_path: Path) -> None:
    plant, expected = LEGACY_FAULTS[fault]
    plant(good_legacy)
    path = tmp_path / "legacy.json"
    path.write_text(json.dumps(good_legacy))
    assert audit_paths([path]).runs[0].codes == expected


def test_a_legacy_log_with_impossible_sizes_is_told(good_legacy: dict[str, Any], tmp_path: Path) -> None:
    good_legacy["startup_info"]["config"]["n_head"] = 0
    path = tmp_path / "legacy.json"
    path.write_text(json.dumps(good_legacy))
    with pytest.raises(ConfigError, match="sizes that cannot be"):
        audit_paths([path])


def test_legacy_log_with_nan_is_read(good_legacy: dict[str, Any], tmp_path: Path) -> None:
    good_legacy["training_iterations"][5]["mfu"]["tokens_per_sec"] = float("nan")
    path = tmp_path / "legacy.json"
    path.write_text(json.dumps(good_legacy))
    assert "NaN" in path.read_text()
    assert audit_paths([path]).runs[0].codes == []


def test_files_that_are_no_runs_are_told(tmp_path: Path) -> None:
    for name, text, message in [
        ("a.json", "{", "no valid JSON"),
        (
            "a.log",
            "iter 10: loss 4.2, mfu 31.0%",
            "no valid JSON .*of a text log give the figures it shows: --reported",
        ),
        ("b.json", "[]", "holds neither"),
        ("c.json", '{"training_iterations": []}', "legacy log without"),
        ("d.json", '{"runs": [3]}', "no mapping"),
        ("e.json", '{"tokens": 3}', "unknown figure"),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=message):
            audit_paths([tmp_path / name])
    with pytest.raises(ConfigError, match="cannot be read"):
        audit_paths([tmp_path / "missing.json"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no run found"):
        audit_paths([tmp_path / "empty"])


def test_unknown_model_is_told() -> None:
    with pytest.raises(ConfigError, match="llama2-1"):
        make_reported({"model": "llama2-1.37b"}, "here")


def test_a_broken_row_of_any_card_stops_the_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal) -> None:
    """It is no unknown card: a peak that nobody could look up would be passed over."""
    rows = (CONFIG_DIR / "hardware.yaml").read_text(encoding="utf-8").replace("  link: NVLink 5\n", "", 1)
    (tmp_path / "hardware.yaml").write_text(rows)
    monkeypatch.setattr(hardware, "CONFIG_DIR", tmp_path)
    figures = ("model=llama2-1.36b", "gpus=1", "seq_len=2048", "tokens_per_s=50000", "mfu=80")
    said = "error: hardware.yaml: b200.link: missing; this key must be given"
    for card in ("B200", "H100", "B209"):
        assert refusal("audit", "--reported", f"gpu={card}", *figures) == said
    write_run_log(tmp_path / "run.json", make_run_log())
    assert refusal("audit", tmp_path / "run.json") == said


def test_every_figure_that_stands_on_a_line_is_listed(refusal) -> None:
    known = refusal("audit", "--reported", "speed=5").split("Known: ")[1].split(", ")
    assert "step_time_s" in known and not {"step_times_s", "step_numbers", "step_rates"} & {*known}

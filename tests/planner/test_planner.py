"""The planner: laws to five decimals, costs by stated conventions, and a search that keeps every promise."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mfubench.analysis.figures.style import LIGHT
from mfubench.commands.plan import app
from mfubench.config import ConfigError, ModelConfig, parse
from mfubench.flops import count_parameters, flop_terms, flops_per_token
from mfubench.planner import pages, study
from mfubench.planner.design import LAWS, PlanConfig, effective_tokens, evaluate, find_law
from mfubench.planner.figures import draw_isoflops
from mfubench.planner.machine import Machine, compute_in_hours, search_on_machine
from mfubench.planner.search import build_model, isoflop_curve, search, shapes, widths
from mfubench.planner.study import PlanRequest
from mfubench.prediction import measured_runs
from mfubench.prediction.calibration import shipped_calibration
from mfubench.presets import load_model

BUDGET = 1.36e21
# The designs of the founding training guide: parameters as planned, tokens, the loss stated for them.
DESIGNS = {
    "llama3-1.5b": (1_544_628_224, 101.909e9, 2.33512),
    "llama3-2.2b": (2_224_154_624, 61.545e9, 2.35106),
    "qwen3-1.8b": (1_829_189_632, 81.727e9, 2.33972),
    "llama2-1.36b": (1_294_159_104, 84.72e9, 2.37209),
}


@pytest.fixture(autouse=True)
def no_shipped_runs(request, monkeypatch, tmp_path):
    """Tests of this file do not depend on which measured studies ship, but for the one of the pages."""
    shipped_calibration.cache_clear()
    if "pages" not in request.node.name:
        monkeypatch.setattr(measured_runs, "REFERENCE", tmp_path / "reference")
    yield
    shipped_calibration.cache_clear()


def plan(**overrides) -> PlanConfig:
    return PlanConfig(**{"compute": BUDGET, "vocab_size": 128_256, **overrides})


@pytest.mark.parametrize("parameters, tokens, expected", DESIGNS.values(), ids=DESIGNS)
def test_hoffmann_losses(parameters, tokens, expected):
    assert round(find_law("hoffmann").loss(parameters, tokens), 5) == expected


def test_besiroglu_at_chinchillas_own_point():
    # 70B on 1.4T: 1.8172 + 482.01 / 7e10^0.3478 + 2085.43 / 1.4e12^0.3658, term by term
    expected = 1.8172 + 482.01 * 7e10**-0.3478 + 2085.43 * 1.4e12**-0.3658
    assert find_law("besiroglu").loss(70e9, 1.4e12) == pytest.approx(expected, abs=1e-12)
    # the refit's point: compute-optimal D/N is near 20 at Chinchilla's budget, where Hoffmann's published fit says 70
    parameters, tokens = find_law("besiroglu").optimum(5.76e23)
    assert 15 < tokens / parameters < 25


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("compute", [1e18, BUDGET, 1e25])
def test_textbook_optimum_is_a_minimum(law, compute):
    parameters, tokens = law.optimum(compute)
    assert 6 * parameters * tokens == pytest.approx(compute)
    best = law.loss(parameters, tokens)
    for factor in (0.9, 1.1):
        assert law.loss(parameters * factor, tokens / factor) > best


def test_unknown_law_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"kaplan.*hoffmann, besiroglu"):
        find_law("kaplan")


@pytest.mark.parametrize(
    "preset, overrides, six_n_d, matmul",
    [
        ("llama3-1.5b", {}, 9.44e20, 8.76e20),
        ("llama3-2.2b", {}, 8.21e20, 8.17e20),
        ("qwen3-1.8b", {"vocab_size": 151_643, "qk_norm": False}, 8.97e20, 8.43e20),
    ],
)
def test_stated_budget_is_not_the_cost_of_the_designs(preset, overrides, six_n_d, matmul):
    parameters, tokens, _ = DESIGNS[preset]
    design = evaluate(load_model(preset, overrides), tokens, 2048, find_law("hoffmann"))
    assert 6 * parameters * tokens == pytest.approx(six_n_d, rel=1e-3)
    assert design.cost("matmul") == pytest.approx(matmul, rel=1e-3)
    assert max(design.cost(name) for name in design.flops_per_token) < 0.8 * BUDGET


def test_budget_follows_from_scores_over_the_width_and_a_forgotten_head():
    """What does give 1.36e21: query-key products of 2 heads S^2 H (width for head size), no lm_head, within 2 %."""
    for preset, overrides in (
        ("llama3-1.5b", {}),
        ("llama3-2.2b", {}),
        ("qwen3-1.8b", {"vocab_size": 151_643, "qk_norm": False}),
    ):
        model = load_model(preset, overrides)
        counts = count_parameters(model)
        scores = 2 * model.num_attention_heads * 2048 * model.hidden_size * model.num_hidden_layers
        forward = 2 * (counts.attention + counts.mlp) + scores
        assert 3 * forward * DESIGNS[preset][1] == pytest.approx(BUDGET, rel=0.02)


@pytest.mark.parametrize(
    "convention, tokens, expected", [("matmul", 158e9, 2.296), ("palm", 133.7e9, 2.310), ("causal", 167e9, 2.291)]
)
def test_tokens_the_budget_buys_the_1_5b_model(convention, tokens, expected):
    model = load_model("llama3-1.5b")
    bought = BUDGET / flops_per_token(flop_terms(model, 2048), convention)
    assert bought == pytest.approx(tokens, rel=2e-3)
    assert round(find_law("hoffmann").loss(flop_terms(model, 2048).parameters, bought), 3) == expected


def test_twenty_tokens_a_parameter_is_twenty_eight():
    parameters, tokens, _ = DESIGNS["llama3-2.2b"]
    assert round(tokens / parameters, 1) == 27.7


# --- search ----------------------------------------------------------------------------------------------------------


def test_search_beats_the_designs_at_the_same_cost():
    """At what each design really costs, the search finds a loss no higher than the design's."""
    for preset in ("llama3-1.5b", "llama3-2.2b"):
        given_design = evaluate(load_model(preset), DESIGNS[preset][1], 2048, find_law("hoffmann"))
        best = search(plan(compute=given_design.cost("matmul")))[0]
        assert best.loss < given_design.loss


def test_search_spends_the_budget_exactly_and_ranks():
    designs = search(plan(), count=6)
    assert len(designs) == 6
    assert [one.loss for one in designs] == sorted(one.loss for one in designs)
    assert len({one.model.hidden_size for one in designs}) == 6
    for one in designs:
        assert one.cost("matmul") == pytest.approx(BUDGET, rel=1e-12)
        assert one.parameters == count_parameters(one.model).total
        assert one.loss == pytest.approx(find_law("hoffmann").loss(one.parameters, one.tokens), abs=1e-12)


def test_grid_counts_like_single_models():
    grid = shapes(plan(qk_norm=True), 1536)
    terms = flop_terms(grid, 2048)
    for row in np.random.default_rng(0).integers(0, grid.num_hidden_layers.size, 20):
        single = flop_terms(build_model(grid, row), 2048)
        assert single.parameters == terms.parameters[row]
        for convention in ("palm", "matmul", "causal"):
            assert flops_per_token(single, convention) == flops_per_token(terms, convention)[row]


def test_no_allowed_shape_beats_the_best():
    """Exhaustively over one small space, shape by shape through the scalar formulas."""
    small = plan(hidden_sizes=(1024, 1280), head_dims=(128,), compute=1e19, indifference=0.0)
    law = find_law("hoffmann")
    losses = []
    for hidden_size in (1024, 1280):
        grid = shapes(small, hidden_size)
        for row in range(grid.num_hidden_layers.size):
            terms = flop_terms(build_model(grid, row), 2048)
            losses.append(law.loss(terms.parameters, 1e19 / flops_per_token(terms, "matmul")))
    assert search(small)[0].loss == pytest.approx(min(losses), abs=1e-12)


@settings(max_examples=15, deadline=None)
@given(
    exponent=st.floats(18, 24),
    ratio=st.floats(5, 200),
    vocab_size=st.sampled_from([32_000, 50_257, 151_936]),
    convention=st.sampled_from(["palm", "matmul", "causal"]),
    law=st.sampled_from(["hoffmann", "besiroglu"]),
)
def test_search_keeps_its_bands(exponent, ratio, vocab_size, convention, law):
    wanted = plan(
        compute=10**exponent,
        vocab_size=vocab_size,
        convention=convention,
        law=law,
        ratio_min=ratio,
        ratio_max=1.5 * ratio,
        hidden_sizes=tuple(range(256, 8192, 512)),
    )
    try:
        designs = search(wanted)
    except ConfigError:
        return  # a narrow band may hold no shape of these widths
    for one in designs:
        model = one.model
        assert ratio * (1 - 1e-9) <= one.tokens_per_parameter <= 1.5 * ratio * (1 + 1e-9)
        assert one.cost(convention) <= wanted.compute * (1 + 1e-9)
        assert 64 <= model.hidden_size / model.num_hidden_layers <= 128
        assert model.intermediate_size % 256 == 0 and 2.5 <= model.intermediate_size / model.hidden_size <= 4
        assert model.num_attention_heads * model.head_dim == model.hidden_size


def test_data_limits_the_tokens():
    scarce = search(plan(unique_tokens=40e9, max_epochs=2.0))[0]
    plenty = search(plan())[0]
    assert scarce.tokens <= 80e9 and scarce.epochs == pytest.approx(scarce.tokens / 40e9)
    assert scarce.parameters > plenty.parameters and scarce.loss > plenty.loss


def test_repeated_tokens_are_worth_less():
    assert effective_tokens(30e9, 40e9) == 30e9  # not one epoch: all fresh
    once, four, forty = (effective_tokens(epochs * 1e9, 1e9) / 1e9 for epochs in (1, 4, 40))
    assert once == 1 and 3.5 < four < 4 and 14 < forty < 1 + 15.39


def test_memory_turns_models_down():
    largest = search(plan(), fits=lambda model: count_parameters(model).total < 1.2e9)[0]
    assert largest.parameters < 1.2e9


def test_equal_losses_keep_the_preferred_head_size():
    assert search(plan(head_dims=(128, 64)))[0].model.head_dim == 128
    assert search(plan(head_dims=(64, 128)))[0].model.head_dim == 64


def test_impossible_plans_say_why():
    with pytest.raises(ConfigError, match="ratio_min"):
        search(plan(ratio_min=1e6))
    with pytest.raises(ConfigError, match=r"plan: ratio_min 30.0 is above ratio_max 20.0"):
        parse(PlanConfig, {"compute": 1e20, "vocab_size": 100, "ratio_min": 30.0, "ratio_max": 20.0}, "plan")
    with pytest.raises(ConfigError, match="compute"):
        parse(PlanConfig, {"compute": -1.0, "vocab_size": 100}, "plan")


# --- machine ---------------------------------------------------------------------------------------------------------


def test_price_at_a_given_mfu_is_arithmetic():
    design = evaluate(load_model("llama2-1.36b"), 84.72e9, 2048, find_law("hoffmann"))
    price = Machine("B200", gpus=8, mfu=0.5, price_per_gpu_hour=4.0).price(design)
    assert price.tokens_per_s == pytest.approx(8 * 2250e12 * 0.5 / 8.784175104e9, rel=1e-6)
    assert price.hours == pytest.approx(84.72e9 / price.tokens_per_s / 3600)
    assert price.energy_kwh == pytest.approx(8 * price.hours * 1.0)
    assert price.money == pytest.approx(32 * price.hours)
    assert (price.mfu_source, price.error_fraction) == ("given", 0)


def test_price_at_a_predicted_mfu_says_so():
    design = evaluate(load_model("llama2-1.36b"), 84.72e9, 2048, find_law("hoffmann"))
    price = Machine("B200").price(design)
    assert "UNCALIBRATED" in price.mfu_source and price.error_fraction > 0.1
    assert price.money is None


def test_small_cards_get_small_models():
    roomy = search_on_machine(plan(), Machine("B200"), count=1)[0]
    tight = search_on_machine(plan(), Machine("NVIDIA GeForce RTX 4090", gpus=8), count=1)[0]
    assert tight.parameters < 1.4e9 < roomy.parameters  # 18 bytes a parameter in 24 GB
    assert tight.loss > roomy.loss
    sharded = search_on_machine(plan(), Machine("NVIDIA GeForce RTX 4090", gpus=8, parallelism="fsdp"), count=1)[0]
    assert sharded.parameters > tight.parameters


def test_hours_become_compute():
    machine = Machine("H100 SXM", gpus=8, mfu=0.5)
    compute = compute_in_hours(plan(), machine, hours=100)
    best = search_on_machine(plan(compute=compute), machine, count=1)[0]
    assert machine.price(best).hours == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize("mfu", [0.0, 1.2, -0.3, math.nan])
def test_impossible_mfu_is_refused(mfu):
    with pytest.raises(ConfigError, match="mfu"):
        Machine("B200", mfu=mfu)


@pytest.mark.parametrize("price", [0.0, -1.0, math.inf])
def test_a_price_is_positive_on_the_command_line_and_in_a_study(price):
    with pytest.raises(ConfigError, match="price_per_gpu_hour"):
        Machine("B200", price_per_gpu_hour=price)
    with pytest.raises(ConfigError, match="price_per_gpu_hour"):
        parse(PlanRequest, GUIDE_BUDGET | {"machine": {"gpu": "B200", "price_per_gpu_hour": price}}, "plan")


@pytest.mark.parametrize(
    ("proportions", "width"),
    [
        ({"head_dims": (512,)}, 512),
        ({"aspect_min": 100.0, "aspect_max": 100.0}, 100),
        ({"mlp_ratio_min": 2.6, "mlp_ratio_max": 2.8}, 256),
    ],
)
def test_a_machine_serves_proportions_that_the_first_width_cannot_have(proportions, width):
    request = plan(**proportions)
    assert not shapes(request, widths()[0]).num_hidden_layers.size
    machine = Machine("NVIDIA H200", mfu=0.5, parallelism="fsdp")
    (design,) = search_on_machine(request, machine, count=1)
    assert design.model.hidden_size % width == 0
    assert design == search(request, count=1)[0]  # which fits these cards


# --- command line ----------------------------------------------------------------------------------------------------


def run_json(*arguments: str) -> dict:
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.mark.parametrize("parameters, tokens, expected", DESIGNS.values(), ids=DESIGNS)
def test_command_loss(parameters, tokens, expected):
    assert round(run_json("loss", "--parameters", str(parameters), "--tokens", str(tokens))["loss"], 5) == expected


def test_command_loss_by_the_other_law():
    result = run_json("loss", "--parameters", "1.5e9", "--tokens", "1e11", "--law", "besiroglu")
    assert result["loss"] == find_law("besiroglu").loss(1.5e9, 1e11)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e308"])
def test_command_loss_refuses_what_is_no_quantity(value):
    with pytest.raises(ConfigError, match="parameters"):
        CliRunner().invoke(app, ["loss", "--parameters", value, "--tokens", "1e9"], catch_exceptions=False)


def test_command_search_round_trips_its_models():
    result = run_json("search", "--compute", "1e20", "--vocab-size", "32000", "--layers", "12", "--count", "2")
    assert len(result["designs"]) == 2
    for one in result["designs"]:
        model = ModelConfig.model_validate(one["architecture"])
        assert model.num_hidden_layers == 12
        assert count_parameters(model).total == one["parameters"]
        assert math.isclose(one["cost_flops"]["matmul"], 1e20)


def test_command_cost():
    result = run_json("cost", "llama3-1.5b", "--tokens", "101.909e9")
    assert round(result["loss"], 5) == 2.33512
    assert result["cost_flops"]["6ND"] == pytest.approx(9.44e20, rel=1e-3)
    with pytest.raises(ConfigError, match=r"seq_len 257 is above the model's 256 learned positions"):
        run_json("cost", "gpt2-tiny", "--tokens", "1e9", "--seq-len", "257")


def test_command_search_prices_on_a_machine():
    result = run_json("search", "--hours", "24", "--vocab-size", "128256", "--gpu", "B200", "--price-per-gpu-hour", "5")
    for one in result["designs"]:
        assert one["price"]["hours"] == pytest.approx(24, rel=0.1)
        assert one["price"]["money"] == pytest.approx(5 * one["price"]["gpu_hours"])


def test_command_search_wants_one_budget():
    for arguments in ([], ["--compute", "1e20", "--hours", "3"], ["--hours", "3"]):
        with pytest.raises(ConfigError, match="--hours"):
            CliRunner().invoke(app, ["search", "--vocab-size", "32000", *arguments], catch_exceptions=False)


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            ["--compute", "--seq-len", "--ratio-min", "--ratio-max", "--unique-tokens", "--max-epochs", "--layers",
             "--hidden-size", "--head-dim", "--query-groups", "--mfu", "--gpus", "--price-per-gpu-hour", "--count"]
        ),
        st.sampled_from(["0", "1", "-1", "7", "128", "2048", "1e20", "1e300", "nan", "inf", "x"]),
        max_size=4,
    ),
    st.sampled_from([[], ["--gpu", "B200"], ["--gpu", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"]]),
)  # fmt: skip
def test_no_input_ends_in_a_traceback(options, gpu):
    arguments = [word for pair in {"--compute": "1e20", **options}.items() for word in pair]
    result = CliRunner().invoke(app, ["search", "--vocab-size", "32000", *arguments, *gpu])
    assert result.exit_code in (0, 2) or isinstance(result.exception, ConfigError), result.exception


def test_command_search_for_people():
    result = CliRunner().invoke(app, ["search", "--compute", "1e20", "--vocab-size", "32000", "--gpu", "B200"])
    assert "D/N" in result.output and "UNCALIBRATED" in result.output


def test_command_figures(tmp_path):
    arguments = ["figures", "--compute", "1.36e21", "--vocab-size", "128256", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--design", "llama3-1.5b:101.909e9"], catch_exceptions=False)
    assert result.exit_code == 0
    for name in ("isoflops", "loss-surface"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for text in ("llama3-1.5b", "llama3-1.5b:many", "llama3-1.5b:-3"):
        with pytest.raises(ConfigError, match=r"--design"):
            CliRunner().invoke(app, [*arguments, "--design", text], catch_exceptions=False)


def test_given_designs_have_a_colour_and_markers_of_their_own():
    figure = draw_isoflops(plan(), pages.founding_designs(), LIGHT)
    (axes,) = figure.axes
    designs = [line for line in axes.lines if not line.get_label().startswith("_")]
    others = [line for line in axes.lines if line.get_label().startswith("_")]
    assert len(designs) == 4
    assert not {line.get_color() for line in designs} & {line.get_color() for line in others}
    assert not {line.get_marker() for line in designs} & {line.get_marker() for line in others}


def test_no_label_of_a_budget_lies_on_the_ticks():
    """A small budget, whose best designs are the smallest there are."""
    figure = draw_isoflops(PlanConfig(compute=1e18, vocab_size=50_257), [], LIGHT)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    panel, labels = axes.get_window_extent(), [text.get_window_extent() for text in axes.texts]
    assert len(labels) == 4 and all(panel.x0 <= label.x0 and label.x1 <= panel.x1 for label in labels)


def test_a_small_budget_buys_few_tokens_and_not_none():
    result = CliRunner().invoke(app, ["search", "--compute", "1e16", "--vocab-size", "32000"], catch_exceptions=False)
    rows = [line.split() for line in result.output.splitlines()[2:]]
    assert rows[0][4:7] == ["17.9M", "141M", "7.9"] and rows[-1][4:7] == ["251M", "6.36M", "0.0254"]


def test_few_tokens_for_people():
    result = CliRunner().invoke(app, ["loss", "--parameters", "1e9", "--tokens", "4e6"], catch_exceptions=False)
    assert "nats per token at D/N 0.004 " in result.output
    result = CliRunner().invoke(app, ["cost", "llama3-1.5b", "--tokens", "7e6"], catch_exceptions=False)
    assert "D 7M, D/N 0.00453" in result.output and "nats per token (hoffmann)" in result.output


def test_isoflop_curve_touches_the_best_design():
    parameters, tokens, losses = isoflop_curve(plan())
    best = search(plan(indifference=0.0), count=1)[0]
    assert losses.min() == pytest.approx(best.loss, abs=1e-9)
    assert (np.diff(parameters) > 0).all() and (np.diff(tokens) < 0).mean() > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("page", pages.PAGES)
def test_pages_are_what_the_code_says(page):
    """`python -m mfubench.planner.pages` rewrites them."""
    text = (pages.DOCS / page).read_text(encoding="utf-8")
    assert pages.fill(text, pages.PAGES[page]) == text


# --- plans of a study ------------------------------------------------------------------------------------------------

GUIDE_BUDGET = {
    "search": {"compute": 1e20, "vocab_size": 32000, "layers": [12, 16], "hidden_sizes": [1024, 1536]},
    "machine": {"gpu": "NVIDIA H100 80GB HBM3", "gpus": 8, "price_per_gpu_hour": 2.5},
    "compare": {"llama2-1.36b": 10e9},
    "count": 2,
}


def run_plan_script(request: dict, folder: Path) -> int:
    files = {"output": "plan.json", "table": "plan.txt", "isoflops": "isoflops.png", "loss-surface": "surface.png"}
    arguments = [text for name, file in files.items() for text in (f"--{name}", str(folder / file))]
    return study.main(["--plan", parse(PlanRequest, request, "plan").to_json(), *arguments])


def test_a_plan_of_a_study_is_written_as_json_table_and_figures(tmp_path):
    assert run_plan_script(GUIDE_BUDGET, tmp_path) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert len(plan["designs"]) == 2
    for design in plan["designs"]:
        assert design["architecture"]["num_hidden_layers"] in (12, 16)
        assert design["cost_flops"]["matmul"] == pytest.approx(1e20, rel=1e-6)
        assert design["price"]["money"] == pytest.approx(2.5 * design["price"]["gpu_hours"])
    assert plan["compared"]["llama2-1.36b"]["tokens"] == 10e9
    table = (tmp_path / "plan.txt").read_text()
    assert "1e+20 FLOPs (matmul)" in table and "for comparison: llama2-1.36b" in table
    for figure in ("isoflops.png", "surface.png"):
        assert (tmp_path / figure).read_bytes().startswith(b"\x89PNG")


def test_a_plan_needs_no_machine(tmp_path):
    assert run_plan_script(GUIDE_BUDGET | {"machine": None}, tmp_path) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert "price" not in plan["designs"][0]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"compare": {"llama9": 1e9}}, r"study: plans.big: .*no model preset 'llama9'"),
        ({"machine": {"gpu": "Voodoo 2"}}, r"study: plans.big: no row for the card 'Voodoo 2'"),
    ],
)
def test_what_a_plan_names_must_exist(change, complaint):
    request = parse(PlanRequest, GUIDE_BUDGET | change, "plan")
    with pytest.raises(ConfigError, match=complaint):
        request.check("study: plans.big")

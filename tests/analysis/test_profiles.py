"""A profiled step judged: ideal times by hand, parts that add up, what is worth doing next."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from analysis.example_study import PROFILED
from factories import make_run_config
from matplotlib.figure import Figure
from matplotlib.text import Text

from mfubench.analysis.figures.profiled import fastest_profile
from mfubench.analysis.figures.roofline import LABEL_DISTANCE, labels_of, roofs_of
from mfubench.analysis.figures.style import LIGHT
from mfubench.analysis.figures.waterfall import bars_of
from mfubench.analysis.findings import Findings
from mfubench.analysis.ideal import Ideals, ideals_of, memory_traffic
from mfubench.analysis.profiled_matmuls import profiled_matmuls
from mfubench.analysis.profiles import Profiled, fold_unnamed, rows_of
from mfubench.analysis.report.profile_section import headline_blocks, next_sentence, part_row, profile_section
from mfubench.analysis.roofline import Point, points_of
from mfubench.analysis.tables import profiles_table
from mfubench.analysis.units import format_rate
from mfubench.ceilings.schema import AttentionRate, Ceilings
from mfubench.config import CommunicationConfig
from mfubench.flops import executed_flops_per_token, flop_terms
from mfubench.model.attention import Shape
from mfubench.prediction.predict import plan_run
from mfubench.prediction.step_bytes import chunk_sum_bytes, elementwise_bytes, elementwise_bytes_by_group
from mfubench.prediction.step_model import micro_step_matmuls
from mfubench.presets import load_model
from mfubench.profiling.breakdown import MatmulTotal
from mfubench.profiling.trace_file import trace_of_reason, write_trace
from mfubench.run_log import Choice, write_json

NOT_RUN = ("tiers/tier8", "tiers/tier9")


@pytest.fixture(scope="module")
def found(gpu_study: Path) -> Findings:
    return Findings.of(gpu_study)


@pytest.fixture(scope="module")
def profiled(found: Findings) -> Profiled:
    return found.profiles[0][0]


def words_of(study: Path, partial: bool = False) -> str:
    """All that the section says."""
    words: list[str] = []
    for block in profile_section(Findings.of(study, partial=partial)).blocks:
        words += [block.text] if block.kind in ("text", "notice") else []
        words += [block.caption] if block.kind == "table" else []
    return "\n".join(words)


def test_profiled_cases_come_fastest_first(found: Findings):
    profiles, missing = found.profiles
    assert [one.case for one in profiles] == ["tiers/tier3", "scaling/2.1-plain-gpus8", "baseline/1.2-compile"]
    assert sorted(one.case for one in profiles) == sorted(PROFILED) and missing == {}


def test_the_parts_add_up_to_the_profiled_step(profiled: Profiled):
    assert sum(row.time_s for row in profiled.rows) == pytest.approx(profiled.rank.step_s, rel=1e-9)
    assert sum(bar.time_s for bar in bars_of(profiled)) == pytest.approx(profiled.rank.step_s, rel=1e-9)


def test_ideal_times_by_hand(profiled: Profiled):
    """llama2-1.36b, micro-batch 24, accumulation 8, 2,048 tokens: 393,216 tokens a step and GPU."""
    tokens, matmul_parameters = 24 * 8 * 2048, 1_294_159_104 - 32_000 * 2304 - 37 * 2304
    seconds = profiled.ideals.seconds
    assert profiled.ideals.peak_matmul_s == pytest.approx(6 * matmul_parameters * tokens / 989.4e12)
    attention_flops = tokens * 6 * 18 * 2304 * 2048
    assert profiled.ideals.peak_attention_s == pytest.approx(attention_flops / 989.4e12)
    # what runs is 7 matmuls, of which the model's FLOPs count 6: the backward pass makes the scores anew
    assert seconds["attention"] == pytest.approx(attention_flops * 7 / 6 / 398e12)
    rate = 4 / (1 / 741 + 1 / 752 + 1 / 694 + 1 / 702) * 1e12  # four shapes of the same FLOPs
    assert seconds["matmul"] == pytest.approx(6 * matmul_parameters * tokens / rate)
    # activation, 2 bytes: forward reads gate and up and writes one, backward reads three and writes two
    assert seconds["activation"] == pytest.approx(18 * tokens * 2 * 8 * 6144 / 2960e9)
    assert seconds["communication"] == seconds["queue"] == 0
    assert profiled.ideals.collectives_s == pytest.approx(2 * 7 / 8 * 4 * 1_294_159_104 / 447e9)


def with_config(profiled: Profiled, found: Findings, **changes: Any) -> Ideals:
    """Of the profiled run, had it been configured otherwise."""
    log = profiled.judged.log
    used = {
        key: Choice(requested=changes[key], used=changes[key]) for key in ("dtype", "parallelism") if key in changes
    }
    log = log.model_copy(update={"config": log.config.model_copy(update=changes), "used": log.used | used})
    return ideals_of(replace(profiled.judged, log=log), found.study.ceilings)


def test_attention_at_its_best_is_what_the_kernel_measured_alone_takes(profiled: Profiled):
    """A ceiling's rate, from a call's time by its own count of FLOPs, gives back that time."""
    config = profiled.judged.log.config
    model, tokens = config.model, config.tokens_per_step // config.world_size
    heads, length, calls = model.num_attention_heads, config.seq_len, model.num_hidden_layers * tokens / config.seq_len
    shape = Shape(1, length, heads, heads, model.head_dim, torch.bfloat16, torch.device("cuda"))
    alone = AttentionRate(
        model=model.name, backend="sdpa", dtype="bfloat16", batch_size=1, seq_len=length, query_heads=heads,
        key_value_heads=heads, head_dim=model.head_dim, forward_backward_tflops=shape.flops / 0.002 / 1e12,
    )  # fmt: skip
    ceilings = Ceilings(
        measured_at="", total_s=1, host="", device="cuda", device_name="", threads=1, environment={}, seconds=1,
        matmuls=[], attention=[alone],
    )  # fmt: skip
    assert ideals_of(profiled.judged, ceilings).seconds["attention"] == pytest.approx(0.002 * calls)


def test_attention_of_another_dtype_is_no_ideal(profiled: Profiled, found: Findings):
    assert "attention" in profiled.ideals.seconds
    assert "attention" not in with_config(profiled, found, dtype="float32").seconds


@pytest.mark.parametrize("weight_gradient", ["plain", "accumulate"])
def test_matmuls_that_checkpointing_repeats_are_those_of_hfu(weight_gradient: str):
    kernels = {"weight_gradient": weight_gradient}
    config = plan_run(load_model("llama2-1.36b"), 1, activation_checkpointing="full", kernels=kernels)
    terms = flop_terms(config.model, config.seq_len)
    tokens = config.micro_batch_size * config.seq_len
    attention = terms.attention / 2 * 4 / 3  # causal; three thirds of the model's, and the forward pass again
    matmuls = sum(one.flops * one.count for one in micro_step_matmuls(config)) / tokens
    assert matmuls + attention == pytest.approx(executed_flops_per_token(terms, config), rel=1e-12)


@pytest.mark.parametrize(("keeps", "gathers", "scatters"), [("never", 1, 1), ("always", 16, 8)])
def test_fsdp_sends_as_often_as_it_gathers(
    keeps: str, gathers: int, scatters: int, profiled: Profiled, found: Findings
):
    """8 micro-steps; weights in bfloat16, gradients in float32; without whole weights both in every micro-step."""
    communication = CommunicationConfig(reshard_after_forward=keeps)
    sharded = with_config(profiled, found, parallelism="fsdp", communication=communication)
    moved = 7 / 8 * 1_294_159_104 * (2 * gathers + 4 * scatters)
    assert sharded.collectives_s == pytest.approx(moved / 447e9)
    groups = communication.model_copy(update={"shard_ranks": 4})
    assert with_config(profiled, found, parallelism="fsdp", communication=groups).collectives_s is None


@pytest.mark.parametrize(("reduction", "gb_s"), [("collective", 447), ("exchange", 350)])
def test_what_runs_send_is_held_against_the_rate_of_what_sums_their_gradients(reduction, gb_s, profiled, found):
    log, ceilings = profiled.judged.log, found.study.ceilings
    exchange = ceilings.collectives[0].model_copy(update={"operation": "exchange", "bus_gb_s": 350})
    both = ceilings.model_copy(update={"collectives": [exchange, *ceilings.collectives]})
    choice = Choice(requested="auto", used=reduction)
    judged = replace(profiled.judged, log=log.model_copy(update={"used": log.used | {"reduction": choice}}))
    assert ideals_of(judged, both).collectives_s == pytest.approx(2 * 7 / 8 * 4 * 1_294_159_104 / (gb_s * 1e9))


def test_gradients_reduced_in_bfloat16_are_half_the_bytes_and_are_cast(profiled: Profiled, found: Findings):
    log = profiled.judged.log
    rounded = log.config.model_copy(update={"communication": CommunicationConfig(reduce_dtype="bfloat16")})
    judged = replace(profiled.judged, log=log.model_copy(update={"config": rounded}))
    ideals = ideals_of(judged, found.study.ceilings)
    assert ideals.collectives_s == pytest.approx(profiled.ideals.collectives_s / 2)
    casts = 1_294_159_104 * (4 + 2) * 2
    assert ideals.seconds["accumulation"] - profiled.ideals.seconds["accumulation"] == pytest.approx(casts / 2960e9)


def ideals_with(profiled: Profiled, found: Findings, asked: dict[str, str], used: dict[str, str]) -> Ideals:
    """Of the profiled run, had it asked for these kernels and used those."""
    log = profiled.judged.log
    kernels = log.config.kernels.model_copy(update=asked)
    choices = {
        name: Choice(requested=asked[name], used=ran, reason=None if ran != "plain" else "a try failed")
        for name, ran in used.items()
    }
    config = log.config.model_copy(update={"kernels": kernels})
    log = log.model_copy(update={"config": config, "used": log.used | choices})
    return ideals_of(replace(profiled.judged, log=log), found.study.ceilings)


def test_a_chunked_loss_leaves_the_sum_over_its_chunks_to_the_matmuls():
    """Qwen3, micro-batch 6: 12,288 tokens, logits in two chunks; the own kernel reads twice and writes once."""
    settings = {"micro_batch_size": 6, "gradient_accumulation_steps": 8, "loss": "chunked"}
    config = plan_run(load_model("qwen3-1.8b"), 1, kernels={"cross_entropy": "fused"}, **settings)
    softmax, weights = 12_288 * 151_936 * 2 * 3, 151_936 * 2048  # bytes, numbers
    assert memory_traffic(config)["loss"] == 8 * (softmax + weights * (4 + 2))  # the sum, rounded
    assert chunk_sum_bytes(config) == weights * (4 + (4 + 4))
    accumulating = plan_run(
        load_model("qwen3-1.8b"), 1, kernels={"cross_entropy": "fused", "weight_gradient": "accumulate"}, **settings
    )
    assert memory_traffic(accumulating)["loss"] == 8 * softmax
    assert chunk_sum_bytes(accumulating) == weights * (4 + 4)  # the first chunk's is the matmul's own


def test_activations_in_matmuls_are_part_of_their_ideal(profiled: Profiled, found: Findings):
    """LLaMA-2 1.36B: 4 I values a token and layer, in bfloat16, where SwiGLU as a kernel of its own has a row."""
    apart, inside = (ideals_with(profiled, found, {"swiglu": "auto"}, {"swiglu": used}) for used in ("fused", "matmul"))
    assert "activation" in apart.seconds and "activation" not in inside.seconds
    config = profiled.judged.log.config
    moved = 4 * 6144 * 2 * 18 * config.tokens_per_step / config.world_size
    assert inside.seconds["matmul"] - apart.seconds["matmul"] == pytest.approx(moved / 2960e9, rel=1e-3)
    assert inside.words["matmul"].endswith("of activations in their tiles at 2,960 GB/s")


def test_accumulating_matmuls_read_and_write_float32_where_the_run_used_them(profiled: Profiled, found: Findings):
    """1,220,345,856 weights of matmuls, 8 micro-steps: 2 bytes more written in each, 4 read in all but one."""
    asked = {"weight_gradient": "auto"}
    inside = ideals_with(profiled, found, asked, {"weight_gradient": "accumulate"})
    beyond_s = inside.seconds["matmul"] - profiled.ideals.seconds["matmul"]
    assert beyond_s == pytest.approx(53_695_217_664 / 2960e9, rel=1e-6)
    assert inside.words["matmul"].endswith("measured hot; and 53.7 GB of float32 sums at 2,960 GB/s")
    # what no matmul makes is still added up: 73,813,248 weights, 6 bytes and then seven times 10
    assert inside.seconds["accumulation"] == pytest.approx(73_813_248 * 76 / 2960e9)
    assert inside.recomputed_s == 0
    fell_back = ideals_with(profiled, found, asked, {"weight_gradient": "plain"})
    assert fell_back == profiled.ideals and "float32" not in fell_back.words["matmul"]


def test_ideals_are_of_the_kernels_that_ran(profiled: Profiled, found: Findings):
    """393,216 tokens: the own norm's backward pass moves 2 bytes of each of 2,304 values less, 37 times a token."""
    own = ideals_with(profiled, found, {"norm": "auto"}, {"norm": "fused"})
    saved_s = profiled.ideals.seconds["norm"] - own.seconds["norm"]
    assert saved_s == pytest.approx(393_216 * 37 * 2 * 2304 / 2960e9)
    assert ideals_with(profiled, found, {"norm": "fused"}, {"norm": "plain"}) == profiled.ideals


def test_groups_of_elementwise_bytes_are_all_of_them():
    config = make_run_config(model=make_run_config().model, activation_checkpointing="full")
    assert sum(elementwise_bytes_by_group(config).values()) == elementwise_bytes(config)
    assert memory_traffic(config)["norm"] == 4 * elementwise_bytes_by_group(config)["norm"]


def test_the_part_with_the_most_to_win_is_named(found: Findings, profiled: Profiled):
    row = profiled.next_row
    assert row is not None and row.excess_s == max(other.excess_s for other in profiled.rows)
    sentence = next_sentence(found, profiled)
    assert f"**The next optimisation of `tiers/tier3` is: {row.label}.**" in sentence
    assert "To try: `cuda_graphs: true`." in sentence
    won = profiled.rate_won(row.excess_s)
    assert won is not None
    step_s = profiled.rank.step_s
    assert won / profiled.tokens_per_s == pytest.approx(step_s / (step_s - row.excess_s) - 1)


def test_what_a_part_is_worth_is_a_share_of_the_profiled_step(found: Findings, profiled: Profiled):
    """Of a step that the profiler, or the machine's other work, made ten times as long as the measured ones."""
    row = max(profiled.rows, key=lambda row: row.time_s)
    whole = replace(row, ideal_s=0.4 * row.time_s)  # could be won: more than a measured step
    slow = replace(profiled, rows=[whole], measured_step_s=profiled.rank.step_s / 10)
    assert whole.excess_s > slow.measured_step_s
    expected = whole.excess_s / (slow.rank.step_s - whole.excess_s)
    assert profiles_table([slow])["tokens_per_s_per_gpu_won"][0] == pytest.approx(expected * slow.tokens_per_s)
    assert f"({100 * expected:+.1f} %)" in next_sentence(found, slow)
    assert part_row(slow, whole)[5] == f"+{format_rate(expected * slow.tokens_per_s)}"


def test_where_hardly_anything_is_left_of_a_step_no_rate_is_told(found: Findings, profiled: Profiled):
    all_of_it = replace(profiled.rows[0], time_s=profiled.rank.step_s, ideal_s=0.0)
    alone = replace(profiled, rows=[all_of_it])
    assert alone.rate_won(all_of_it.excess_s) is None
    assert part_row(alone, all_of_it)[5] == "–" and profiles_table([alone])["tokens_per_s_per_gpu_won"].isna().all()
    assert "Removing it would leave almost nothing of the step" in next_sentence(found, alone)


def test_unnamed_elementwise_work_makes_one_row(profiled: Profiled):
    """Named rows say nothing where a good part of the work could belong to any of them."""
    parts = {**profiled.rank.parts, "elementwise": 0.6}
    rows = rows_of(replace(profiled.rank, parts=parts), profiled.ideals, "cuda")
    keys = [row.key for row in rows]
    assert "elementwise" in keys and not {"norm", "rope", "activation", "optimizer"} & set(keys)
    assert sum(row.time_s for row in rows) == pytest.approx(sum(parts.values()))
    folded = next(row for row in rows if row.key == "elementwise")
    known = ("norm", "rope", "activation", "embedding", "loss", "accumulation", "optimizer")
    assert folded.ideal_s == pytest.approx(sum(profiled.ideals.seconds[key] for key in known))
    assert fold_unnamed(profiled.rows, profiled.ideals) == profiled.rows


def test_roofline_points_by_projection_where_shapes_are_known(profiled: Profiled):
    (matmuls, attention, *memory) = points_of(profiled)
    assert (matmuls.label, attention.label) == ("matmuls", "attention")
    assert {point.kind for point in memory} == {"memory"}
    config = profiled.judged.log.config
    shapes = {(one.rows, one.inner, one.columns): one.count for one in micro_step_matmuls(config)}
    totals = [MatmulTotal(shape, None, count, 0.001 * count) for shape, count in shapes.items()]
    total = sum(one.total_s for one in totals)
    rank = replace(profiled.rank, matmuls=totals, parts={**profiled.rank.parts, "matmul": total})
    labels = [point.label for point in points_of(replace(profiled, rank=rank)) if point.kind == "matmul"]
    assert "matmul: head" in labels and len(labels) >= 3


def test_matmuls_one_by_one_beside_their_rates_alone(profiled: Profiled, found: Findings):
    """Micro-batch 24 of 2,048 tokens: 49,152 rows; the down projection is 6,144 -> 2,304."""
    tokens = 24 * 2048
    totals = [
        MatmulTotal((tokens, 6144, 2304), "forward", 144, 0.3),
        MatmulTotal((6144, tokens, 2304), "backward", 144, 0.28),
        MatmulTotal((5, 6, 7), "forward", 1, 0.1),
    ]
    measured = replace(profiled, rank=replace(profiled.rank, matmuls=totals))
    forward, gradient = profiled_matmuls(measured, found.study.ceilings)
    assert (forward.name, forward.product, gradient.product) == ("mlp_down", "forward", "weight_gradient")
    flops = 2 * tokens * 6144 * 2304 * 144
    assert forward.tflops == pytest.approx(flops / 0.3 / 1e12)
    assert forward.alone_tflops == 694.0 and gradient.alone_tflops is None  # the example has the forward rates
    assert forward.excess_s == pytest.approx(0.3 - flops / 694e12)
    assert profiled_matmuls(profiled, found.study.ceilings) == []


def test_a_square_weights_products_are_told_apart_by_their_pass(profiled: Profiled):
    """The attention output is 2,304 -> 2,304: forward and the input's gradient have one shape."""
    shape = (24 * 2048, 2304, 2304)
    totals = [MatmulTotal(shape, "backward", 144, 0.12), MatmulTotal(shape, "forward", 144, 0.11)]
    measured = replace(profiled, rank=replace(profiled.rank, matmuls=totals))
    found = {one.product: (one.name, one.count, one.time_s) for one in profiled_matmuls(measured, None)}
    assert found == {
        "forward": ("attention_output", 144, 0.11),
        "input_gradient": ("attention_output", 144, 0.12),
    }


def test_a_point_of_the_roofline():
    point = Point("x", "memory", flops=2e12, bytes=1e12, time_s=0.5)
    assert (point.intensity, point.tflops) == (2.0, 4.0)


def on_half_a_cpu(profiled: Profiled, cpu: Findings) -> Profiled:
    """The profile as if a rank on one of the two threads of the ceilings had made it."""
    judged = cpu.good["scaling/2.1-plain-gpus2"]
    assert judged.log.environment.cpu_threads == 1
    ideals = ideals_of(judged, cpu.study.ceilings)
    return replace(profiled, judged=judged, ideals=ideals, breakdown=replace(profiled.breakdown, device="cpu"))


def test_the_roof_of_a_rank_on_a_cpu_is_its_share_of_the_threads(profiled: Profiled, cpu_study: Path):
    cpu = Findings.of(cpu_study)
    half = on_half_a_cpu(profiled, cpu)
    assert cpu.study.ceilings is not None
    rate = cpu.study.ceilings.fastest_matmul_tflops("fp32")
    assert rate is not None
    (roof,) = roofs_of(cpu, half, LIGHT)
    assert (roof.label, roof.tflops) == ("fastest matmul measured", pytest.approx(rate / 2))
    config = half.judged.log.config
    flops = sum(one.flops * one.count for one in micro_step_matmuls(config)) * config.gradient_accumulation_steps
    assert half.ideals.seconds["matmul"] == pytest.approx(flops / (roof.tflops * 1e12))  # as the waterfall has it


def test_what_is_best_for_a_rank_on_a_cpu_is_said_as_it_is_reckoned(profiled: Profiled, cpu_study: Path):
    """0.35 TFLOP/s of two threads are 0.175 of the one that each of two processes has."""
    cpu = Findings.of(cpu_study)
    half = on_half_a_cpu(profiled, cpu)
    assert "the large matmul: 0.175 TFLOP/s, a process's 50 % of what was measured hot" in half.ideals.words["matmul"]
    alone = ideals_of(cpu.good["scaling/2.1-plain-gpus1"], cpu.study.ceilings)
    assert "the large matmul: 0.35 TFLOP/s, measured hot" in alone.words["matmul"]
    assert cpu.study.ceilings is not None
    rate = AttentionRate(
        model=half.judged.log.config.model.name, backend="sdpa", dtype="float32", batch_size=8, seq_len=256,
        query_heads=4, key_value_heads=4, head_dim=64, forward_tflops=0.2, forward_backward_tflops=0.1,
    )  # fmt: skip
    ideals = ideals_of(half.judged, cpu.study.ceilings.model_copy(update={"attention": [rate]}))
    assert ideals.words["attention"].startswith("sdpa, the fastest here: 50 GFLOP/s forward and backward, a process's")


def test_matmuls_alone_are_those_of_a_ranks_share_of_the_threads(profiled: Profiled, cpu_study: Path):
    cpu = Findings.of(cpu_study)
    half = on_half_a_cpu(profiled, cpu)
    one = next(one for one in micro_step_matmuls(half.judged.log.config) if one.name == "lm_head")
    total = MatmulTotal((one.rows, one.inner, one.columns), "forward", 1, 1.0)
    half = replace(half, rank=replace(half.rank, matmuls=[total]))
    assert cpu.study.ceilings is not None
    (large,) = cpu.study.ceilings.matmuls
    head = large.model_copy(update={"model": half.judged.log.config.model.name, "name": "lm_head", "tflops": 0.3})
    (found,) = profiled_matmuls(half, cpu.study.ceilings.model_copy(update={"matmuls": [head]}))
    assert found.alone_tflops == pytest.approx(0.15)


def test_labels_of_the_roofline_do_not_meet():
    """Groups as near to one another as on a CPU, one of them a thousandth of a step of a second."""
    memory = [Point(f"memory {i}", "memory", i * 1e8, 1e9, 0.1) for i in range(2, 6)]
    small = Point("gradient accumulation", "memory", 1e7, 1e8, 0.001)
    compute = [Point("attention", "attention", 3e9, 1e8, 0.2), Point("matmuls", "matmul", 5e9, 1e8, 0.4)]
    limits = (0.03, 200.0)
    labels = labels_of([*memory, small, *compute], 1.0, limits, [])
    assert {label.point.label for label in labels} == {point.label for point in [*memory, small, *compute]}
    heights = sorted(label.y for label in labels)
    near = [high / low for low, high in pairwise(heights)]
    assert min(near) >= 0.999 * LABEL_DISTANCE


def test_the_ceilings_of_the_waterfall_are_a_cards_or_a_machines(profiled: Profiled, cpu_study: Path):
    words = " ".join(bar.label for bar in bars_of(on_half_a_cpu(profiled, Findings.of(cpu_study))))
    assert "matmuls: this machine's ceiling" in words and "card" not in words
    assert "matmuls: this card's ceiling" in " ".join(bar.label for bar in bars_of(profiled))


def test_the_table_of_profiles(found: Findings, profiled: Profiled):
    table = profiles_table(found.profiles[0])
    assert set(table["case"]) == set(PROFILED)
    own = table[table["case"] == "tiers/tier3"]
    assert own["time_s"].sum() == pytest.approx(profiled.rank.step_s)


def test_a_profiled_step_unlike_the_measured_ones_is_told(found: Findings, profiled: Profiled):
    slow = replace(profiled, measured_step_s=profiled.measured_step_s / 2)
    (_, warning, *_) = headline_blocks(found, slow)
    assert "they were not alike" in warning.text
    assert "they were not alike" not in str(headline_blocks(found, profiled)[1])


def test_a_profile_of_a_busy_machine_says_so_first(found: Findings, profiled: Profiled):
    log = profiled.judged.log
    on_cpu = log.environment.model_copy(update={"device": "cpu", "cpu_count": 64, "cpu_threads": 8})
    host = {"cpu_percent": {"median": 100.0}, "run_cores": {"median": 2.0}}
    busy = log.model_copy(update={"environment": on_cpu, "telemetry": {"host": host}})
    (first, *_) = headline_blocks(found, replace(profiled, judged=replace(profiled.judged, log=busy)))
    assert first.text.startswith("The machine was busy with something else during `tiers/tier3`: other processes took")
    assert "next optimisation" in headline_blocks(found, profiled)[0].text


def test_best_times_of_a_busy_machine_name_no_next_optimisation(found: Findings, profiled: Profiled):
    ceilings = found.study.ceilings
    assert ceilings is not None and found.study.environment is not None
    wanted = {"device": "cpu", "threads": found.study.environment.cpu_count}
    host = {"cpu_percent": {"median": 100.0}, "run_cores": {"median": 40.0}}
    busy = ceilings.model_copy(update={**wanted, "telemetry": {"host": host}})
    disturbed = replace(found, study=replace(found.study, ceilings=busy))
    (first, second, *_) = headline_blocks(disturbed, profiled)
    assert first.text.startswith("**No next optimisation of `tiers/tier3` is named:** other processes took 64.0 of 104")
    assert first.tone == "warning" and second.kind == "figure"


def test_without_ceilings_the_report_says_how_to_get_them(changed_study: Path):
    (changed_study / "ceilings.json").unlink()
    told = "The machine's ceilings were not measured, so only gaps, copies and communication have a best time: "
    assert f"{told}`snakemake --cores all analysis --configfile …` measures them." in words_of(changed_study)


def test_without_a_profile_the_report_says_how_to_get_one(cpu_study: Path, changed_study: Path):
    for study in (cpu_study, changed_study):
        if study == changed_study:
            shutil.rmtree(study / "traces")
        words = words_of(study, partial=True)
        assert "No case of this study has a profile" in words and "measurement: {profile: timeline}" in words


def test_traces_that_are_not_shipped_are_told_apart_from_profiles_that_nobody_asked_for(changed_study: Path):
    declared = json.loads((changed_study / "study.json").read_text())
    for name in (*PROFILED, *NOT_RUN):
        declared["cases"][name] = {"measurement": {"profile": "timeline"}}
    write_json(changed_study / "study.json", declared)
    shutil.rmtree(changed_study / "traces")
    found = Findings.of(changed_study)
    not_kept = "its trace is not in traces/ (a run's profile is kept there); run the case again"
    assert found.profiles == ([], dict.fromkeys(PROFILED, not_kept) | dict.fromkeys(NOT_RUN, "has not been run"))
    words = words_of(changed_study)
    assert "Profiles that are not to be had" in words and "measurement: {profile: timeline}" not in words
    panel = fastest_profile(found, LIGHT, "title")
    assert isinstance(panel, Figure)
    shown = " ".join(" ".join(text.get_text() for text in panel.findobj(Text)).split())
    assert f"{', '.join(PROFILED)}: {not_kept}" in shown
    assert "tiers/tier8, tiers/tier9 have not been run" in shown


def test_a_profile_that_was_not_to_be_had_is_told(changed_study: Path):
    path = changed_study / "traces" / "tiers" / "tier3.json.gz"
    write_trace(path, trace_of_reason("tiers/tier3", "the profiler saw no kernel on the GPU"))
    assert Findings.of(changed_study).profiles[1] == {"tiers/tier3": "the profiler saw no kernel on the GPU"}
    assert "Profiles that are not to be had" in words_of(changed_study)
    path.write_bytes(b"cut off")
    assert "is no readable trace" in Findings.of(changed_study).profiles[1]["tiers/tier3"]


def test_the_section_names_ranks_streams_and_the_trace(gpu_study: Path):
    words = words_of(gpu_study)
    assert "Rank 1 comes last to them; rank 0 waits longest for it" in words
    assert "hidden behind compute" in words and "traces/tiers/tier3.json.gz" in words
    assert "Matmuls: " in words and "backward" in words

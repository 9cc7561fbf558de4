"""Steps with known answers: overlap, gaps, nested streams, several ranks. Every moment belongs to one category."""

from __future__ import annotations

import random

import pytest
from profiling.kineto import (
    ADAM,
    ADD,
    ALL_REDUCE,
    AUTOGRAD,
    COMPUTE,
    COPIES,
    CUDNN,
    GEMM,
    NCCL_STREAM,
    NORM,
    SWIGLU,
    XMMA,
    Kineto,
    one_step,
)

from mfubench.profiling.breakdown import MatmulTotal, break_down, break_down_rank
from mfubench.profiling.chrome_trace import CutStep, cut_step, matmul_shape
from mfubench.profiling.trace_file import make_trace, trace_of_reason


def cut(kineto: Kineto, rank: int = 0) -> CutStep:
    step = cut_step(kineto.trace(), rank)
    assert step is not None
    return step


def parts_us(kineto: Kineto) -> dict[str, float]:
    """Microseconds of the categories that have any."""
    found = break_down_rank(cut(kineto))
    assert sum(found.parts.values()) == pytest.approx(found.step_s, rel=1e-12)
    return {name: round(seconds * 1e6, 3) for name, seconds in found.parts.items() if seconds}


def test_every_moment_of_the_step_has_its_category():
    assert parts_us(one_step()) == {
        "matmul": 500, "attention": 100, "activation": 80, "communication": 100, "optimizer": 150,
        "host": 20, "queue": 15, "data": 35,
    }  # fmt: skip


def test_the_step_is_the_last_marked_one_on_the_devices_time_line():
    found = break_down_rank(cut(one_step()))
    assert found.step_s == pytest.approx(1000e-6)
    assert found.busy_s == pytest.approx(930e-6)
    assert found.hidden_communication_s == pytest.approx(100e-6)


def test_passes_come_from_the_operators_and_shapes_from_the_matmul():
    found = break_down_rank(cut(one_step()))
    assert found.directions["matmul"] == pytest.approx({"forward": 300e-6, "backward": 200e-6})
    assert found.matmuls == [MatmulTotal((4096, 2048, 6144), "forward", 1, pytest.approx(300e-6))]


@pytest.mark.parametrize(
    ("operator", "sizes"),
    [
        ("aten::mm", [[8, 4], [4, 16]]),
        ("aten::mm", [[8, 4], [4, 16], [8, 16]]),  # with a place for the result
        ("aten::addmm", [[16], [8, 4], [4, 16], [], []]),  # a bias
        ("aten::addmm", [[8, 16], [8, 4], [4, 16], [], [], [8, 16]]),  # adds to a matrix, in place
    ],
)
def test_a_matmuls_shape_is_that_of_its_factors(operator: str, sizes: list[list[int]]):
    assert matmul_shape([{"name": operator, "args": {"Input Dims": sizes}}]) == (8, 4, 16)


def test_kernels_are_counted_by_name():
    kineto = Kineto()
    kineto.step(0, 100)
    for number, length in enumerate((10, 20, 60)):
        kineto.launch(NORM, 10 + number, 200 + 100 * number, 200 + 100 * number + length)
    (total,) = break_down_rank(cut(kineto)).kernels
    assert (total.name, total.category, total.count) == (NORM, "norm", 3)
    assert (total.total_s, total.median_s) == (pytest.approx(90e-6), pytest.approx(20e-6))


def test_kernels_on_several_streams_share_the_time_they_overlap():
    kineto = Kineto()
    kineto.step(0, 90)
    kineto.launch(GEMM, 10, 100, 300)
    kineto.launch(SWIGLU, 20, 200, 400, stream=9)  # 100 alone, 100 beside the matmul
    kineto.launch(ADAM, 30, 250, 300, stream=11)  # inside both
    parts = parts_us(kineto)
    assert parts["matmul"] == pytest.approx(100 + 50 / 2 + 50 / 3, abs=1e-3)
    assert parts["activation"] == pytest.approx(100 + 50 / 2 + 50 / 3, abs=1e-3)
    assert parts["optimizer"] == pytest.approx(50 / 3, abs=1e-3)


def test_copies_count_where_neither_kernel_nor_collective_runs():
    kineto = Kineto()
    kineto.step(0, 90)
    kineto.launch(GEMM, 10, 100, 200)
    kineto.launch("Memcpy HtoD (Pinned -> Device)", 20, 150, 250, COPIES, cat="gpu_memcpy")
    kineto.launch(ALL_REDUCE, 30, 240, 300, NCCL_STREAM)
    kineto.launch("Memset (Device)", 40, 300, 310, cat="gpu_memset")
    parts = parts_us(kineto)
    assert (parts["matmul"], parts["copy"], parts["communication"]) == (100, 50, 60)
    assert break_down_rank(cut(kineto)).hidden_communication_s == 0


def test_copies_to_other_cards_are_communication_that_waits_for_nobody():
    """An exchange: its copies begin once all ranks are ready, so that no rank waits in one."""
    kineto = Kineto()
    kineto.step(0, 90)
    kineto.launch(GEMM, 10, 100, 200)
    kineto.launch("Memcpy PtoP (Device -> Device)", 20, 150, 250, COPIES, cat="gpu_memcpy")
    parts = parts_us(kineto)
    assert (parts["matmul"], parts["communication"]) == (100, 50)
    found = break_down_rank(cut(kineto))
    assert found.hidden_communication_s == pytest.approx(50e-6)
    assert (found.collectives_s, found.copies_s) == ([], pytest.approx(100e-6))


def test_an_exposed_exchange_is_communication_as_long_as_it_lasts():
    """Parts for two other ranks at once, and beside them its own, which stays on the card."""
    kineto = Kineto()
    kineto.step(0, 90)
    kineto.launch(GEMM, 10, 50, 100)
    kineto.launch("Memcpy PtoP (Device -> Device)", 20, 100, 200, COPIES, cat="gpu_memcpy")
    kineto.launch("Memcpy PtoP (Device -> Device)", 21, 100, 200, COPIES + 1, cat="gpu_memcpy")
    kineto.launch("Memcpy DtoD (Device -> Device)", 22, 150, 200, COPIES + 2, cat="gpu_memcpy")
    found = break_down_rank(cut(kineto))
    assert found.parts["communication"] == found.copies_s == pytest.approx(100e-6)
    assert found.hidden_communication_s == found.parts["copy"] == 0


def test_a_replayed_graph_has_one_launch_for_all_its_kernels():
    kineto = Kineto()
    kineto.step(0, 100)
    kineto.launch(GEMM, 50, 120, 200)
    for name, start, end in ((XMMA, 210, 300), (CUDNN, 300, 400)):
        tie = {"stream": COMPUTE, "correlation": kineto.correlation}
        kineto.add("kernel", name, start, end, 0, COMPUTE, tie)
    assert parts_us(kineto) == {"host": 50, "matmul": 170, "attention": 100, "queue": 80}
    assert break_down_rank(cut(kineto)).directions == {}


def test_the_operators_around_an_elementwise_kernel_name_its_purpose():
    kineto = Kineto()
    kineto.step(0, 400)
    kineto.host("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 10, 30, AUTOGRAD)
    kineto.host("torch::autograd::AccumulateGrad", 11, 29, AUTOGRAD)
    kineto.launch(ADD, 20, 500, 520, thread=AUTOGRAD)
    kineto.host("Optimizer.step#AdamW.step", 40, 60, cat="user_annotation")
    kineto.launch(ADD, 50, 520, 550)
    kineto.launch(ADD, 70, 550, 590)  # on its own: a sum of unknown purpose
    parts = parts_us(kineto)
    assert (parts["gradient accumulation"], parts["optimizer"], parts["elementwise"]) == (20, 30, 40)


def test_a_step_without_any_mark_is_the_whole_trace():
    kineto = one_step()
    kineto.events = [event for event in kineto.events if event["name"] != "mfubench::step"]
    assert break_down_rank(cut(kineto)).step_s == pytest.approx(1300e-6)


def step_of_rank(rank: int, matmul_ends: float, sends: str, begins: float, stream: int, cat: str) -> CutStep:
    """A matmul from 100 us on, communication until 400, the optimizer until 500."""
    kineto = Kineto()
    kineto.step(0, 90)
    kineto.launch(GEMM, 10, 100, matmul_ends)
    kineto.launch(sends, 20, begins, 400, stream, cat=cat)
    kineto.launch(ADAM, 30, 400, 500)
    return cut(kineto, rank)


def test_the_rank_that_the_others_wait_for_is_named():
    """Two ranks: the second comes 150 us late to the collective, so the first one's kernel lasts that much longer."""
    steps = [step_of_rank(rank, end, ALL_REDUCE, end, NCCL_STREAM, "kernel") for rank, end in enumerate((200, 350))]
    found = break_down(make_trace("scaling/two", steps))
    assert found is not None
    assert [round((rank.waiting_s or 0) * 1e6) for rank in found.ranks] == [150, 0]
    assert found.slowest.rank == 1
    assert found.slowest.parts["communication"] == pytest.approx(50e-6)


def test_the_rank_that_exchanges_wait_for_is_named():
    """Nothing runs on the first rank while the second one computes; both copy at the same time."""
    copy = "Memcpy PtoP (Device -> Device)"
    steps = [step_of_rank(rank, end, copy, 260, COPIES, "gpu_memcpy") for rank, end in enumerate((200, 250))]
    found = break_down(make_trace("scaling/two", steps))
    assert found is not None
    assert [round((rank.waiting_s or 0) * 1e6) for rank in found.ranks] == [50, 0]
    assert found.slowest.rank == 1
    assert found.slowest.copies_s == pytest.approx(140e-6)


def test_ranks_that_did_not_do_the_same_collectives_are_not_compared():
    kineto = Kineto()
    kineto.step(0, 90)
    kineto.launch(GEMM, 10, 100, 300)
    found = break_down(make_trace("scaling/two", [cut(one_step(), 0), cut(kineto, 1)]))
    assert found is not None and [rank.waiting_s for rank in found.ranks] == [None, None]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_overlaps_the_parts_add_up(seed: int):
    """Random kernels on random streams: the sum is the step, and busy time is the union of what ran."""
    generator = random.Random(seed)
    kineto = Kineto()
    kineto.step(0, 500)
    names = (GEMM, CUDNN, SWIGLU, NORM, ADAM, ALL_REDUCE, ADD)
    spans = []
    for number in range(40):
        start = generator.uniform(100, 1000)
        spans.append((start, start + generator.uniform(0, 60)))
        kineto.launch(generator.choice(names), generator.uniform(1, start), *spans[-1], stream=number % 5)
    found = break_down_rank(cut(kineto))
    step = cut(kineto)
    assert sum(found.parts.values()) == pytest.approx((step.window[1] - step.window[0]) / 1e6, rel=1e-9)
    assert found.busy_s == pytest.approx(union_us(spans, step.window) / 1e6, rel=1e-9)
    assert min(found.parts.values()) >= 0


def union_us(spans: list[tuple[float, float]], window: tuple[float, float]) -> float:
    covered, reached = 0.0, window[0]
    for start, end in sorted(spans):
        covered += max(0.0, min(end, window[1]) - max(start, reached))
        reached = max(reached, end)
    return covered


def test_nothing_profiled_is_no_breakdown():
    assert cut_step({"traceEvents": []}) is None
    assert break_down(trace_of_reason("baseline/plain", "out of memory")) is None

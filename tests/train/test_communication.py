"""How ranks exchange gradients and weights changes when it happens, not what comes of it."""

from __future__ import annotations

import subprocess
import sys

import pynvml
import pytest
import torch
import torch.distributed
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from train.test_gpu import FLOAT32, assert_graphs, gpu_config, needs_cards
from train.train_runs import SCRIPTS, environment, grad_norms, losses, run_here, run_many, tiny_config

from mfubench.config import CommunicationConfig, ConfigError, RunConfig, parse
from mfubench.decisions import no_exchange
from mfubench.model import build_model
from mfubench.train.buckets import plan_buckets
from mfubench.train.exchange import Exchange, missing_here, not_by_itself
from mfubench.train.fsdp import FsdpEngine
from mfubench.train.gathers import WeightGathers
from mfubench.train.process import Process

RELATIVE = 1e-5
ACCUMULATE = {"weight_gradient": "accumulate"}
EVALUATION = {"interval": 4, "iters": 2, "at_end": True}


@pytest.fixture(scope="module")
def reference(data, tmp_path_factory):
    config = tiny_config(parallelism="none", max_iters=8, evaluation=EVALUATION)
    return run_here(config, data, tmp_path_factory.mktemp("reference"))


def split(world_size: int, parallelism: str, communication: dict, **options) -> RunConfig:
    """The reference's global batch of 8, accumulated."""
    batch = {"micro_batch_size": 1, "gradient_accumulation_steps": 8 // world_size}
    evaluation = EVALUATION | {"iters": 16 // world_size}  # of one sequence: the same 16 sequences
    values = batch | {"max_iters": 8, "evaluation": evaluation} | options
    return tiny_config(world_size=world_size, parallelism=parallelism, communication=communication, **values)


def assert_same(log, reference):
    assert log.status == "ok"
    assert losses(log) == pytest.approx(losses(reference), rel=RELATIVE)
    assert grad_norms(log) == pytest.approx(grad_norms(reference), rel=RELATIVE)
    found = [evaluation.loss for evaluation in log.evaluations]
    assert found == pytest.approx([evaluation.loss for evaluation in reference.evaluations], rel=RELATIVE)


def test_two_processes(reference, data, tmp_path):
    """Gathered early, late and before a whole graph; small buckets; resharded; evaluated between steps."""
    configs = {
        "zero1": split(2, "zero1", {}),
        "zero1-late": split(2, "zero1", {"overlap_gather": False}),
        "zero1-small": split(2, "zero1", {"bucket_mb": 0.008, "first_bucket_mb": 0.001}),
        "zero1-whole": split(2, "zero1", {}, compile="model", compile_backend="aot_eager"),
        "ddp-small": split(2, "ddp", {"bucket_mb": 0.008, "first_bucket_mb": 0.001}),
        "fsdp-resharded": split(2, "fsdp", {"reshard_after_forward": "always", "prefetch_blocks": 2}),
        "ddp-exchanged": split(2, "ddp", {"reduction": "exchange", "bucket_mb": 0.008}),
        "zero1-exchanged": split(2, "zero1", {"reduction": "exchange", "bucket_mb": 0.008}),
        "fsdp-exchanged": split(2, "fsdp", {"reduction": "exchange"}, kernels=ACCUMULATE),
        "fsdp-one-micro-step-exchanged": split(
            2,
            "fsdp",
            {"reduction": "exchange", "prefetch_blocks": 2},
            kernels=ACCUMULATE,
            micro_batch_size=4,
            gradient_accumulation_steps=1,
            evaluation=EVALUATION | {"iters": 2},  # of four sequences: the same 16 on both ranks
        ),
        "ddp-rounded": split(2, "ddp", {"reduce_dtype": "bfloat16"}),
        "zero1-rounded": split(2, "zero1", {"reduce_dtype": "bfloat16"}),
        "fsdp-rounded": split(2, "fsdp", {"reduce_dtype": "bfloat16"}),
    }
    logs = run_many(configs, data, tmp_path)
    for key, log in logs.items():
        if not key.endswith("rounded"):
            assert_same(log, reference)
        first, second = (torch.load(tmp_path / key / f"weights-{rank}.pt") for rank in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first), key
        reduction = "exchange" if key.endswith("exchanged") else "collective"  # auto on a CPU: the latter
        assert log.used["reduction"].used == reduction, key
    reasons = {key: log.used["parallelism"].reason for key, log in logs.items()}
    assert reasons["zero1"] == "updated weights are gathered while the forward pass runs"
    assert reasons["zero1-whole"].startswith("updated weights are gathered before the forward pass")
    assert reasons["zero1-late"] is None
    assert reasons["fsdp-resharded"] == "gathered weights are resharded after each use, sharded among 2 ranks"
    for key in ("ddp-rounded", "zero1-rounded", "fsdp-rounded"):
        assert_rounding_shows_and_is_small(logs[key], reference)


@pytest.mark.parametrize("learned", [False, True])
def test_several_parameters_that_no_matmul_writes_are_exchanged_in_order(learned, data, tmp_path):
    """In the root of a model whose embedding is its head, or that has a table of positions; with one micro-step."""
    model = {"tie_word_embeddings": True}
    if learned:
        model = {"norm": "layernorm", "position": "learned", "mlp": "gelu", "norm_bias": True}

    def one_step(parallelism: str, communication: dict) -> RunConfig:
        batch = {"micro_batch_size": 4, "gradient_accumulation_steps": 1, "evaluation": EVALUATION | {"iters": 2}}
        options = {"model": model, "kernels": ACCUMULATE, "dtype": "float32" if learned else "float16"}
        return split(2, parallelism, communication, loss="chunked", **batch, **options)

    configs = {"ddp": one_step("ddp", {}), "fsdp": one_step("fsdp", {"reduction": "exchange"})}
    logs = run_many(configs, data, tmp_path)
    assert logs["fsdp"].used["reduction"].used == "exchange", logs["fsdp"].used["reduction"].reason
    relative = 1e-5 if learned else 1e-3
    assert losses(logs["fsdp"]) == pytest.approx(losses(logs["ddp"]), rel=relative)
    assert grad_norms(logs["fsdp"]) == pytest.approx(grad_norms(logs["ddp"]), rel=10 * relative)


def assert_rounding_shows_and_is_small(log, reference):
    """A sum of bfloat16 gradients is off by 2^-8 of its elements at most; over all of them the errors average out."""
    norm, expected = grad_norms(log)[0], grad_norms(reference)[0]
    error = abs(norm / expected - 1)
    assert 0 < error < 2**-10
    assert losses(log) == pytest.approx(losses(reference), rel=2e-3)


@pytest.mark.slow
def test_four_processes_in_two_groups(reference, data, tmp_path):
    hybrid = {"shard_ranks": 2}
    configs = {
        "kept": split(4, "fsdp", hybrid),
        "resharded": split(4, "fsdp", hybrid | {"reshard_after_forward": "always"}),
        "copies": split(4, "fsdp", {"shard_ranks": 1}),
        "zero1": split(4, "zero1", {}),
        "zero1-exchanged": split(4, "zero1", {"reduction": "exchange", "bucket_mb": 0.008}),
        "ddp-exchanged": split(4, "ddp", {"reduction": "exchange", "bucket_mb": 0.008}),
        "fsdp-exchanged": split(4, "fsdp", {"reduction": "exchange"}, kernels=ACCUMULATE),
    }
    for key, log in run_many(configs, data, tmp_path).items():
        assert_same(log, reference)
        if "exchanged" in key:
            assert log.used["reduction"].used == "exchange", log.used["reduction"].reason
        elif configs[key].parallelism == "fsdp":
            assert f"sharded among {configs[key].communication.shard_ranks} ranks" in log.used["parallelism"].reason


@pytest.mark.multigpu
@needs_cards(2)
def test_two_cards(data, tmp_path):
    """Streams of their own, captured steps: gathers and reductions are waited for wherever they must."""
    evaluation = {"interval": 5, "iters": 2, "at_end": True}

    def on_cards(parallelism: str, communication: dict, **options):
        options = FLOAT32 | {"evaluation": evaluation, "parallelism": parallelism} | options
        return gpu_config(2, 4, communication=communication, **options)

    configs = {
        "late": on_cards("zero1", {"overlap_gather": False}),
        "early": on_cards("zero1", {}),
        "compiled": on_cards("zero1", {"bucket_mb": 0.5, "first_bucket_mb": 0.1}, compile="block"),
        "graphs": on_cards("zero1", {"reduction": "collective"}, compile="block", cuda_graphs=True),
        "zero1-exchanged": on_cards("zero1", {"reduction": "exchange", "bucket_mb": 0.5}),
        "ddp-exchanged": on_cards("ddp", {"reduction": "exchange", "bucket_mb": 0.5}),
        "zero1-exchanged-graphs": on_cards("zero1", {"reduction": "exchange"}, compile="block", cuda_graphs=True),
        "ddp-exchanged-graphs": on_cards("ddp", {"reduction": "exchange"}, compile="block", cuda_graphs=True),
        "resharded": on_cards("fsdp", {"reshard_after_forward": "always", "prefetch_blocks": 2}),
        "copies": on_cards("fsdp", {"shard_ranks": 1}),
    }
    rounded = {
        f"{parallelism}-rounded": on_cards(parallelism, {"reduce_dtype": "bfloat16"})
        for parallelism in ("ddp", "zero1", "fsdp")
    }
    logs = run_many(configs | rounded, data, tmp_path, timeout_s=540)
    late = logs["late"]
    for key, log in logs.items():
        assert log.status == "ok", key
        relative = 2e-3 if key in rounded else 1e-4
        assert losses(log) == pytest.approx(losses(late), rel=relative), key
        found = [evaluation.loss for evaluation in log.evaluations]
        assert found == pytest.approx([evaluation.loss for evaluation in late.evaluations], rel=relative), key
        first, second = (torch.load(tmp_path / key / f"weights-{rank}.pt", map_location="cpu") for rank in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first), key
        if "exchanged" in key:
            assert log.used["reduction"].used == "exchange", log.used["reduction"].reason
        if key.endswith("graphs"):
            assert_graphs(log)


def test_what_forbids_an_exchange_has_a_reason():
    allowed = {"world_size": 2, "parallelism": "ddp", "communication": {"reduction": "exchange"}}
    resharded = {"communication": {"reduction": "exchange", "reshard_after_forward": "always"}}
    assert no_exchange(tiny_config(**allowed)) is None
    assert no_exchange(tiny_config(**allowed | {"parallelism": "fsdp", "kernels": ACCUMULATE})) is None
    for change, reason in (
        ({"world_size": 1}, "one process"),
        ({"parallelism": "fsdp"}, "written whole"),
        ({"parallelism": "fsdp", "kernels": ACCUMULATE} | resharded, "written whole"),
        ({"world_size": 4, "parallelism": "fsdp", "communication": {"shard_ranks": 2}}, "among all ranks"),
        ({"communication": {"reduction": "exchange", "reduce_dtype": "bfloat16"}}, "sums in float32"),
        ({"nnodes": 2}, "within a node"),
        ({"memory_cap_gib": 4.0}, "memory_cap_gib"),
    ):
        found = no_exchange(tiny_config(**allowed | change))
        assert found is not None and reason in found


def test_auto_exchanges_over_links_that_join_all_cards(monkeypatch):
    config, card = tiny_config(world_size=2, parallelism="ddp"), torch.device("cuda", 0)
    for name, words in (
        ("NVIDIA H200", None),
        ("NVIDIA B200", None),
        ("NVIDIA A10", "over PCIe and bridges"),
        ("NVIDIA H100 PCIe", "over PCIe and bridges"),
        ("NVIDIA X9000", "does not know how cards of the kind NVIDIA X9000 are linked"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found = not_by_itself(config, card)
        assert found is None if words is None else words in found
    sharded = tiny_config(world_size=2, parallelism="fsdp")
    assert not_by_itself(sharded, card) == "fsdp sums by exchange where it is asked to"
    assert not_by_itself(config, torch.device("cpu")) == "no CUDA"


def test_cards_that_cannot_exchange_say_why(monkeypatch):
    process = Process(rank=0, world_size=2, local_rank=0, device=torch.device("cuda", 0))
    monkeypatch.setenv("NCCL_CTA_POLICY", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    if not torch.cuda.is_available():
        assert missing_here(process).startswith("which CUDA the driver is of cannot be read: NVMLError")
    drivers = iter([13000, 13000, 12040])
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion", lambda: next(drivers))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    assert missing_here(process) is None
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    assert missing_here(process) == "the cards cannot write to each other's memory"
    assert missing_here(process) == "the driver is of CUDA 12.4; copy engines need 12.5"
    drivers = iter([13000])
    monkeypatch.setenv("NCCL_CTA_POLICY", "0")
    assert missing_here(process) == "NCCL_CTA_POLICY is 0, and copy engines need 2"
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    assert missing_here(process).startswith("NCCL 2.27.5 has no")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert missing_here(process) == "an exchange stays within a node"


@pytest.mark.faults
@pytest.mark.parametrize("failing", ["", "0,1", "0", "1"])
def test_a_rank_that_fails_alone_in_the_trial_of_an_exchange_says_so(failing, tmp_path):
    """All or none: the same words on both. One alone: it raises, where the other waits (in a run: for its watchdog)."""
    ranks = []
    for rank in range(2):
        arguments = [str(rank), "2", f"file://{tmp_path}/store", failing]
        command = [sys.executable, str(SCRIPTS / "trial_of_exchange.py"), *arguments]
        ranks.append(subprocess.Popen(command, env=environment(), stdout=-1, stderr=-1, text=True))
    try:
        if failing in ("0", "1"):
            _, stderr = ranks[int(failing)].communicate(timeout=60)
            assert f"a trial of the exchange ended on rank {failing} (RuntimeError: planted: the copy" in stderr
            return
        found = [rank.communicate(timeout=60) for rank in ranks]
        words = "RuntimeError: planted: the copy engines are gone" if failing else "None"
        assert [stdout for stdout, _ in found] == [f"found: {words}\n"] * 2, found
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_step_that_was_broken_off_leaves_nothing_in_an_exchange(one_rank):
    """Of two buckets one has been sent off: the next step's sums are its own."""
    exchange = Exchange(8, 1, one_rank.device)
    first, second = torch.arange(8.0), torch.arange(8.0, 16.0)
    exchange.sum(first, first, everywhere=True)
    exchange.begin_step()
    exchange.sum(second, second, everywhere=True)
    exchange.finish()
    assert exchange.summed is None and not exchange.works
    assert torch.equal(second, torch.arange(8.0, 16.0))


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Process(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("keeps_weights", [True, False])
@pytest.mark.parametrize("tied", [False, True])
def test_fsdp_gathers_and_reduces_the_head_beside_the_blocks(tied, keeps_weights, one_rank, monkeypatch):
    """What of an untied model is not in a block, the embedding and the head, has nothing to wait for but itself."""
    config = tiny_config(parallelism="fsdp", model={"num_hidden_layers": 2, "tie_word_embeddings": tied})
    model = build_model(config, device="meta")
    options = {"gradient_accumulation_steps": 1, "keeps_weights": keeps_weights}
    engine = FsdpEngine(model, dtype=torch.float32, process=one_rank, **options)
    done = []
    for method in ("unshard", "post_backward"):
        original = getattr(FSDPParamGroup, method)

        def noted(group, *arguments, original=original, method=method, **more):
            done.append((method, group._module_fqn))
            return original(group, *arguments, **more)

        monkeypatch.setattr(FSDPParamGroup, method, noted)
    tokens = torch.arange(config.seq_len)[None]
    engine.begin_micro_step(first=True, last=True)
    model(tokens, tokens).backward()
    gathered = [name for method, name in done[: done.index(("post_backward", "blocks.1"))] if method == "unshard"]
    reduced = [name for method, name in done if method == "post_backward"]
    if tied:
        assert gathered[:3] == ["", "blocks.0", "blocks.1"] and reduced[:3] == ["blocks.1", "blocks.0", ""]
    else:
        assert gathered[:5] == ["", "token_embedding", "blocks.0", "blocks.1", "lm_head"]
        assert reduced[:3] == ["lm_head", "blocks.1", "blocks.0"] and set(reduced[3:]) == {"", "token_embedding"}
    assert all(gradient.abs().sum() > 0 for gradient in engine.gradients())


def test_bucket_sizes():
    model = build_model(tiny_config(model={"num_hidden_layers": 8}), device="meta")

    def sizes(**keys) -> list[int]:
        buckets = plan_buckets(model, 2, CommunicationConfig(**keys))
        return [bucket.end - bucket.start for bucket in buckets]

    assert len(sizes(bucket_mb=0.001)) > len(sizes())
    assert sizes(first_bucket_mb=0.001)[0] < sizes()[0]
    matrices = [bucket for bucket in plan_buckets(model, 2) if bucket.decay]
    assert [slot.name for slot in matrices[-1].slots] == ["token_embedding.weight"]


def test_weights_used_before_they_are_gathered_are_an_error():
    config = tiny_config()
    model = build_model(config, device="cpu")
    waited = []

    class Work:
        def __init__(self, bucket):
            self.bucket = bucket

        def wait(self):
            waited.append(self.bucket.slots[0].name)

    gathers = WeightGathers(plan_buckets(model, 2), Work)
    gathers.watch(model, whole=False)
    tokens = torch.zeros(1, config.seq_len, dtype=torch.int64)
    gathers.begin()
    model(tokens, tokens)
    gathers.check()
    assert waited[0] == "token_embedding.weight"
    assert waited.index("lm_head.weight") > waited.index("blocks.1.mlp.down.weight")
    assert len(waited) == len(gathers.buckets)

    gathers.begin()
    model.token_embedding(tokens)
    with pytest.raises(RuntimeError, match="used before they were gathered"):
        gathers.check()


def test_groups_must_divide_the_ranks():
    values = tiny_config(world_size=4).model_dump(mode="json") | {"communication": {"shard_ranks": 3}}
    with pytest.raises(ConfigError, match=r"not a multiple of communication\.shard_ranks 3"):
        parse(RunConfig, values, "run")

from __future__ import annotations

from pathlib import Path

import pytest
from analysis.example_study import add_untried_case, declare, make_gpu_log
from factories import make_run_config

from mfubench.analysis.answer import answers
from mfubench.analysis.findings import Findings
from mfubench.analysis.untried import Untried, on_as_many, untried
from mfubench.run_log import read_run_log, write_run_log


def untried_of(study: Path) -> Untried | None:
    found = Findings.of(study)
    (answer,) = answers(found)
    return untried(found, answer)


def test_settings_that_ran_on_all_gpus_have_had_their_chance(gpu_study: Path):
    """1.2-compile on 2 GPUs is faster per GPU than tier3 on 8, and ran on 8 as a scaling case."""
    assert untried_of(gpu_study) is None


def test_the_faster_per_gpu_that_nobody_ran_on_all(changed_study: Path):
    add_untried_case(changed_study, speed=1.06)
    item = untried_of(changed_study)
    assert item is not None and item.candidate.case == "baseline/1.4-graphs"
    assert item.tokens_per_s_per_gpu == pytest.approx(69_300 * 1.06, rel=0.003)
    assert item.difference.change == pytest.approx(69_300 * 1.06 / 68_900 - 1, abs=0.004)
    assert item.difference.interval.low > 0
    assert item.differs_in == {"loader.kind": ("dataloader", "memmap")}
    assert item.config.world_size == 8 and "world_size=8" in item.command and "cuda_graphs=true" in item.command


def test_what_the_spread_explains_is_not_faster(changed_study: Path):
    add_untried_case(changed_study, speed=68_950 / 69_300)
    assert untried_of(changed_study) is None


def test_settings_that_did_not_fit_on_all_gpus_were_tried(changed_study: Path):
    path = add_untried_case(changed_study, speed=1.06)
    log = read_run_log(path)
    many = make_gpu_log("tiers/tier1", 3)
    config = many.config.model_copy(update={"name": "tiers/graphs", "cuda_graphs": True})
    changes = {"name": config.name, "config": config, "used": log.used, "steps": [], "rank_step_times_s": []}
    oom = many.model_copy(update={**changes, "status": "oom", "reason": "CUDA out of memory", "wall": None})
    write_run_log(changed_study / "runs" / "tiers" / "graphs.json", oom)
    declare(changed_study, config.name)
    assert untried_of(changed_study) is None


def test_a_run_alone_becomes_data_parallel():
    alone, fastest = make_run_config(compile="block"), make_run_config(world_size=16, nnodes=2, parallelism="fsdp")
    config = on_as_many(alone, fastest)
    assert config is not None
    assert (config.world_size, config.nnodes, config.parallelism) == (16, 2, "ddp")
    assert config.compile == "block" and config.global_batch_size == 16 * alone.global_batch_size


def test_shards_that_do_not_divide_the_gpus_are_not_proposed():
    three = make_run_config(world_size=3, parallelism="fsdp", communication={"shard_ranks": 3})
    assert on_as_many(three, make_run_config(world_size=8)) is None


def test_the_real_difference_of_parallelism_is_told(changed_study: Path):
    """Alone against fsdp on 8: the proposal is ddp, and says so; the number of GPUs is no setting."""
    path = add_untried_case(changed_study, speed=1.06)
    log = read_run_log(path)
    used = {**log.used, "parallelism": log.used["parallelism"].model_copy(update={"used": "none"})}
    write_run_log(path, log.model_copy(update={"used": used}))
    fastest = changed_study / "runs" / "tiers" / "tier3.json"
    log = read_run_log(fastest)
    used = {**log.used, "parallelism": log.used["parallelism"].model_copy(update={"used": "fsdp"})}
    write_run_log(fastest, log.model_copy(update={"used": used}))
    item = untried_of(changed_study)
    assert item is not None
    assert item.differs_in == {"loader.kind": ("dataloader", "memmap"), "parallelism": ("fsdp", "ddp")}


@pytest.mark.parametrize(("cores", "is_found"), [(8, False), (64, True)])
def test_one_of_few_processes_that_had_more_of_the_same_cores_is_not_faster(
    changed_study: Path, cores: int, is_found: bool
):
    """On eight cores two processes have four threads each and eight have one; on 64 each has eight of its own."""
    add_untried_case(changed_study, speed=1.06)
    for path in (changed_study / "runs").rglob("*.json"):
        log = read_run_log(path)
        threads = min(8, cores // log.config.world_size)
        on_cpu = {"device": "cpu", "gpus": [], "cpu_count": cores, "cpu_threads": threads}
        write_run_log(path, log.model_copy(update={"environment": log.environment.model_copy(update=on_cpu)}))
    assert (untried_of(changed_study) is not None) == is_found

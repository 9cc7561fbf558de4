"""The rows of config/hardware.yaml, found by exact driver names, and the peak that follows what ran."""

from __future__ import annotations

import pytest
from factories import make_ceilings, make_run_log

from mfubench.config import ConfigError, parse
from mfubench.hardware import (
    HardwareRow,
    arithmetic_of_run,
    find_gpu,
    load_hardware,
    normalise,
    peak_for,
    peak_for_run,
)
from mfubench.presets import CONFIG_DIR

# Dense bf16 TFLOP/s by driver name, from the makers' datasheets.
DENSE_BF16 = {
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA A40": 149.7,
    "NVIDIA A10": 125,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181,
    "NVIDIA L40S": 362,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA RTX 6000 Ada Generation": 364,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 503.8,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989.4,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA H200 NVL": 835,
    "NVIDIA H20": 148,
    "NVIDIA B200": 2250,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA GB300": 2500,
    "AMD Instinct MI300X": 1307,
    "AMD Instinct MI325X": 1307,
    "AMD Instinct MI355X": 2500,
    "AMD Instinct MI250X": 191.5,
}


@pytest.mark.parametrize("name", DENSE_BF16)
def test_dense_peaks(name: str) -> None:
    peak = peak_for(name, "bfloat16", tf32=True, fp8=False)
    assert (peak.tflops, peak.dtype, peak.measured) == (DENSE_BF16[name], "bf16", False)
    assert peak.source


def test_every_row_is_complete() -> None:
    rows = load_hardware()
    assert len(rows) >= 30
    for row in rows:
        assert len(row.source) > 20, row.key
        assert row.dense_tflops.fp32 > 0
        assert row.memory_gib >= 8 and row.bandwidth_gb_s > 100 and row.power_limit_w >= 60 and row.link


@pytest.mark.parametrize(
    "row", [row for row in load_hardware() if row.multiprocessors and row.clock_mhz], ids=lambda row: row.key
)
def test_peak_is_multiprocessors_times_clock(row: HardwareRow) -> None:
    """An independent count of each peak: a sparse or mistyped number is off by far more."""
    counted = row.multiprocessors * row.flops_per_clock * row.clock_mhz * 1e6 / 1e12
    assert counted == pytest.approx(row.dense_tflops.bf16 or row.dense_tflops.fp16, rel=0.015)


def test_rates_of_one_card_belong_together() -> None:
    for row in load_hardware():
        rates = row.dense_tflops
        if rates.bf16 is not None and rates.fp16 is not None:
            assert rates.bf16 == rates.fp16, row.key
        if rates.fp8 is not None:
            assert rates.fp8 == pytest.approx(2 * rates.bf16, rel=0.015), row.key
        if rates.tf32 is not None:
            assert rates.tf32 <= rates.bf16 / 2 * 1.02, row.key
            assert rates.fp32 <= rates.tf32 * 1.001, row.key


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("nvidia h100 80gb hbm3", "h100-sxm"),
        ("H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA  H100   NVL", "h100-nvl"),
        ("NVIDIA H100 PCIE", "h100-pcie"),
        ("NVIDIA A100 SXM4 80GB", "a100-sxm-80gb"),
        ("A100-PCIE-40GB", "a100-pcie-40gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA Tesla V100-SXM2-32GB", "v100-sxm"),
        ("NVIDIA l40s", "l40s"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA GeForce RTX(TM) 4090", "rtx-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("Quadro RTX 6000", "quadro-rtx-8000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000-blackwell-max-q"),
    ],
)
def test_names_as_drivers_write_them(written: str, key: str) -> None:
    assert find_gpu(written).key == key


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090"),
        ("NVIDIA H100", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA A100", "A100-SXM4-80GB"),
        ("NVIDIA L40G", "L40"),
        ("NVIDIA X900", "names: [NVIDIA X900]"),
        ("", "names:"),
    ],
)
def test_unknown_card_stops_with_the_row_to_add(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_gpu(name)
    message = str(error.value)
    assert "hardware.yaml" in message and "dense_tflops" in message and near in message


@pytest.mark.parametrize("value", [0, -2250])
@pytest.mark.parametrize("key", ["bf16", "memory_gib", "bandwidth_gb_s", "power_limit_w", "link_gb_s"])
def test_what_a_card_can_do_is_more_than_nothing(key: str, value: float) -> None:
    row = find_gpu("NVIDIA B200").model_dump(mode="json")
    changed = {**row, "dense_tflops": {**row["dense_tflops"], key: value}} if key == "bf16" else {**row, key: value}
    if key == "link_gb_s" and value == 0:  # a slice of a card has no link
        assert parse(HardwareRow, changed, "hardware.yaml: b200").link_gb_s == 0
        return
    complaint = rf"hardware\.yaml: b200\.(dense_tflops\.)?{key}: found {value}.*greater than"
    with pytest.raises(ConfigError, match=complaint):
        parse(HardwareRow, changed, "hardware.yaml: b200")


def test_a_row_says_what_joins_the_cards() -> None:
    """The file's head names words that rows have, one of each kind that is told apart."""
    head = (CONFIG_DIR / "hardware.yaml").read_text(encoding="utf-8").split("--- NVIDIA")[0]
    row = {row.link: row for row in load_hardware()}
    for link, is_pcie, joins_all in (
        ("NVLink 4", False, True), ("NVLink 3 bridge", False, False), ("PCIe 4", True, False)
    ):  # fmt: skip
        assert link in head and (row[link].is_pcie, row[link].joins_all) == (is_pcie, joins_all)


def test_mig_slices_are_scaled_by_their_multiprocessors() -> None:
    whole = find_gpu("NVIDIA A100-SXM4-80GB")
    third = find_gpu("NVIDIA A100-SXM4-80GB MIG 3g.40gb")
    assert third.dense_tflops.bf16 == pytest.approx(whole.dense_tflops.bf16 * 42 / 108)
    assert third.dense_tflops.fp8 is None
    assert (third.memory_gib, third.bandwidth_gb_s) == (40, whole.bandwidth_gb_s / 2)
    assert "42 of 108" in third.scope
    assert find_gpu("NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb").dense_tflops.bf16 == pytest.approx(312 * 14 / 108)
    assert find_gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me").dense_tflops.bf16 == pytest.approx(989.4 * 16 / 132)
    for name in ("NVIDIA A100-SXM4-80GB MIG 5g.50gb", "NVIDIA H100 PCIe MIG 3g.40gb", "NVIDIA B200 MIG banana"):
        with pytest.raises(ConfigError, match="nvidia-smi mig -lgip"):
            find_gpu(name)


@pytest.mark.parametrize(
    ("dtype", "tf32", "fp8", "expected"),
    [
        ("bfloat16", True, False, ("bf16", 989.4)),
        ("float16", False, False, ("fp16", 989.4)),
        ("float32", True, False, ("tf32", 494.7)),
        ("float32", False, False, ("fp32", 66.9)),
        ("bfloat16", True, True, ("fp8", 1978.9)),
    ],
)
def test_peak_follows_what_ran(dtype: str, tf32: bool, fp8: bool, expected: tuple[str, float]) -> None:
    log = make_run_log(dtype=dtype, tf32=tf32, fp8=fp8)
    peak = peak_for_run(log, None)
    assert (peak.dtype, peak.tflops) == expected
    assert arithmetic_of_run(log) == expected[0]


def test_peak_follows_what_was_used_not_what_was_asked_for() -> None:
    log = make_run_log(fp8=True)
    log.used["fp8"] = log.used["fp8"].model_copy(update={"used": "false", "reason": "no torchao"})
    assert peak_for_run(log, None).dtype == arithmetic_of_run(log) == "bf16"


def test_arithmetic_that_a_card_lacks() -> None:
    with pytest.raises(ConfigError, match="no bf16"):
        peak_for("Tesla V100-SXM2-16GB", "bfloat16", tf32=False, fp8=False)
    with pytest.raises(ConfigError, match="no fp8"):
        peak_for("NVIDIA A100-SXM4-80GB", "bfloat16", tf32=True, fp8=True)
    with pytest.raises(ConfigError, match="int4"):
        peak_for("NVIDIA A100-SXM4-80GB", "int4", tf32=True, fp8=False)
    assert peak_for("Tesla T4", "float32", tf32=True, fp8=False).dtype == "fp32", "the switch does nothing there"


def test_mixed_cards_are_judged_by_their_mean() -> None:
    log = make_run_log(world_size=2)
    log.environment.gpus[1].name = "NVIDIA H100 PCIe"
    peak = peak_for_run(log, None)
    assert peak.tflops == pytest.approx((989.4 + 756) / 2)
    assert "h100-sxm" in peak.source and "h100-pcie" in peak.source


def test_cpu_peak_is_measured() -> None:
    log = make_run_log(device="cpu")
    with pytest.raises(ConfigError, match="measured"):
        peak_for_run(log, None)
    peak = peak_for_run(log, make_ceilings("cpu", "fp32", 0.2))
    assert (peak.tflops, peak.measured) == (0.2, True)
    with pytest.raises(ConfigError, match="no fp32 matmul of a CPU"):
        peak_for_run(log, make_ceilings("cpu", "bf16", 0.2))
    with pytest.raises(ConfigError, match="of a CPU"):
        peak_for_run(log, make_ceilings("cuda", "fp32", 60))
    two_ranks = make_run_log(device="cpu", world_size=2)
    assert two_ranks.environment.cpu_threads == 1
    assert peak_for_run(two_ranks, make_ceilings("cpu", "fp32", 0.2)).tflops == pytest.approx(0.1)


def test_names_are_compared_whole() -> None:
    assert normalise("NVIDIA GeForce RTX 3080") != normalise("NVIDIA GeForce RTX 3080 Ti")
    assert normalise("NVIDIA A100-SXM4-80GB") == "a100 sxm4 80gb"

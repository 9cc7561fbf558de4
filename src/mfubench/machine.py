"""The machine is a fact of the results: cards, count, driver, torch and flash kernels, written once a study.

A run on another machine stops with the difference: a table never mixes machines.
"""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from mfubench.config import ConfigError
from mfubench.run_log import write_json

# memory_gib is recorded, not compared: virtual machines show memory that grows as it is used.
IDENTITY = ("cards", "driver", "cpu", "cpu_count", "packages", "python")

KERNEL_PACKAGES = (
    "torch",
    "triton",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "liger-kernel",
    "quack-kernels",
    "torchao",
    "xformers",  # brings FlashAttention-3's library
)


def describe_machine() -> dict[str, Any]:
    """This node, as far as a study's results depend on it."""
    cards, driver = describe_cards()
    return {
        "cards": cards,
        "driver": driver,
        "cpu": cpu_name(),
        "cpu_count": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "packages": {name: version for name in KERNEL_PACKAGES if (version := installed_version(name))},
        "python": platform.python_version(),
    }


def describe_cards() -> tuple[list[str], str | None]:
    """Names of all cards of this node and the driver's version; ([], None) without an NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [pynvml.nvmlDeviceGetName(handle) for handle in handles], pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()


def cpu_name() -> str:
    """The processor's model name (Linux), or what Python knows of it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_same_machine(machine_file: Path) -> None:
    """Compare this node with a study's machine.json. Raises ConfigError with the differences and the ways out."""
    try:
        recorded = json.loads(machine_file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{machine_file}: is no JSON ({error}); remove it and start again") from None
    found = describe_machine()
    differences = [
        f"  {key}: was {recorded.get(key)!r}, is {found[key]!r}" for key in IDENTITY if recorded.get(key) != found[key]
    ]
    if differences:
        raise ConfigError(
            f"{machine_file} describes another machine than this one:\n" + "\n".join(differences) + "\n"
            "Results of two machines are never mixed. Either keep them apart (--config results_dir=ANOTHER_FOLDER), or "
            "mark every run of this study stale by raising machine.generation in its configuration."
        )


def main(argv: list[str] | None = None) -> None:
    """Write machine.json: `record_machine.py --output FILE`."""
    parser = argparse.ArgumentParser(description="Record the machine that a study is measured on.")
    parser.add_argument("--output", required=True, type=Path)
    arguments = parser.parse_args(argv)
    write_json(arguments.output, describe_machine())

"""`mfubench doctor`: what this machine has, what it lacks, and what to do about it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

MINIMUM_TORCH = (2, 11)
NEEDED_DISK_GIB = 2.0


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check Python, torch, CUDA, cards, attention backends, Snakemake, disk space and the cache of kernels."""
    findings = examine()
    if as_json:
        typer.echo(json.dumps(findings, indent=1))
    else:
        show(findings)
    raise typer.Exit(1 if findings["problems"] else 0)


def examine() -> dict[str, Any]:
    """Everything that the doctor knows, as plain data; `problems` holds a sentence for each thing to mend."""
    import platform
    import shutil

    import torch

    from mfubench.machine import installed_version

    problems: list[str] = []
    torch_version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if torch_version < MINIMUM_TORCH:
        problems.append(f"torch {torch.__version__} is too old: 2.11 or newer is needed (`make setup` installs it)")
    cards = examine_cards(problems)
    disk_free_gib = shutil.disk_usage(".").free / 2**30
    if disk_free_gib < NEEDED_DISK_GIB:
        problems.append(f"{disk_free_gib:.1f} GiB of disk are free here; the default study needs {NEEDED_DISK_GIB:g}")
    if shutil.which("c++") is None and shutil.which("g++") is None and not cards:
        problems.append("no C++ compiler: torch.compile falls back to eager on a CPU (apt-get install g++)")
    plugins = ("snakemake-executor-plugin-slurm", "snakemake-executor-plugin-kubernetes")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "cards": cards,
        "attention": examine_attention(),
        "packages": {
            name: installed_version(name)
            for name in ("liger-kernel", "torchao", "flash-attn", "quack-kernels", "triton")
        },
        "snakemake": installed_version("snakemake"),
        "plugins": {name: installed_version(name) for name in plugins},
        "graphviz": shutil.which("dot") is not None,
        "disk_free_gib": round(disk_free_gib, 1),
        "cache": examine_cache(problems),
        "problems": problems,
    }


def examine_cards(problems: list[str]) -> list[dict[str, Any]]:
    """Cards of this machine, each with the hardware row it matches or the error that says which row to add."""
    import torch

    from mfubench.config import ConfigError
    from mfubench.hardware import find_gpu
    from mfubench.machine import describe_cards

    names, driver = describe_cards()
    if names and not torch.cuda.is_available():
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
        problems.append(
            f"driver {driver} lists {len(names)} cards, but torch {torch.__version__}, built for {built_for}, "
            "cannot use them: install the CUDA build (make setup); update the driver where torch calls it too old"
        )
    cards = []
    for index, name in enumerate(names):
        card: dict[str, Any] = {"index": index, "name": name, "driver": driver, "row": None}
        try:
            row = find_gpu(name)
            card["row"] = row.names[0]
        except ConfigError as error:
            problems.append(str(error))
        cards.append(card)
    return cards


def examine_cache(problems: list[str]) -> str:
    """The folder of compiled kernels, and whether it can be written to."""
    from mfubench.cache import cache_root, writable_folder
    from mfubench.config import ConfigError

    try:
        return f"{writable_folder(cache_root())} (can be written to)"
    except ConfigError as error:
        problems.append(str(error))
        return "cannot be written to"


def examine_attention() -> dict[str, str]:
    """Attention backends of this machine: `available`, or why not."""
    import torch

    from mfubench.model.attention import attention_backends

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {name: reason or "available" for name, reason in attention_backends(device).items()}


def show(findings: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(show_header=False, box=None, padding=(0, 2))
    for key in ("python", "torch", "cuda", "cudnn", "nccl", "snakemake", "disk_free_gib", "cache"):
        table.add_row(key, str(findings[key] if findings[key] is not None else "-"))
    for card in findings["cards"]:
        table.add_row(f"card {card['index']}", f"{card['name']} -> {card['row'] or 'no row in config/hardware.yaml'}")
    if not findings["cards"]:
        table.add_row("cards", "none: runs go to the CPU, whose peak is measured")
    for name, state in findings["attention"].items():
        table.add_row(f"attention {name}", state)
    for name, version in {**findings["packages"], **findings["plugins"]}.items():
        table.add_row(name, version or "not installed")
    console.print(table)
    for problem in findings["problems"]:
        console.print(f"[bold red]problem[/] {problem}")
    if not findings["problems"]:
        console.print("[bold green]no problems found[/]")

"""`mfubench`: what people run by hand. Each command is a function of its own module under commands/."""

from __future__ import annotations

import importlib
import pkgutil

import typer

import mfubench
from mfubench import commands

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="How much of its GPUs a pre-training run really uses, and what to change.",
)


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(mfubench.__version__)
        raise typer.Exit()


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", callback=show_version, is_eager=True
    ),
) -> None:
    """What stands before a command."""


def register_commands() -> None:
    """Each module of commands/ is a command: its `app` (with sub-commands), or the function of its name.

    `export_model.py` holds `export_model` and is called `export`: words after the first say what a module is about.
    """
    for module_info in sorted(pkgutil.iter_modules(commands.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"mfubench.commands.{module_info.name}")
        name = module_info.name.removesuffix("_model")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name=name)(getattr(module, module_info.name))


register_commands()


def main() -> None:
    """Entry point: a fault of the input, or of a file's place, is told in a sentence, without a traceback."""
    from mfubench.endings import faults_told

    with faults_told():
        app()  # ends in silence once nobody reads what it says (a pipe to `head`)

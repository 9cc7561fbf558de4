"""`mfubench`: what people run by hand. Each command is a function of its own module under commands/."""

from __future__ import annotations

import errno
import importlib
import pkgutil
import sys

import typer

import mfubench
from mfubench import commands

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="How much of its GPUs a pre-training run really uses, and what to change.",
)


@app.callback()
def version_option(
    version: bool = typer.Option(False, "--version", help="Show the version and exit.", is_eager=True),
) -> None:
    if version:
        typer.echo(mfubench.__version__)
        raise typer.Exit()


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

# What to do about a file, by what the system says of it.
MAKE_ROOM, ELSEWHERE = "make room, or name another folder", "name another file or folder"
WAYS_OUT = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), MAKE_ROOM) | dict.fromkeys(
    (
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.ENAMETOOLONG,
        errno.ELOOP,
    ),
    ELSEWHERE,
)


def main() -> None:
    """Entry point: a fault of the input, or of a file's place, is told in a sentence, without a traceback."""
    from mfubench.config import ConfigError

    try:
        app()  # ends in silence once nobody reads what it says (a pipe to `head`)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.filename is None or error.errno not in WAYS_OUT:
            raise
        print(f"error: {error.filename}: {error.strerror}; {WAYS_OUT[error.errno]}", file=sys.stderr)
        sys.exit(1)

"""`mfubench flops`: parameters and FLOPs of a model, term by term."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from mfubench.config import ModelConfig


def flops(
    model: Annotated[str, typer.Argument(help="A preset of config/models.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change, e.g. num_hidden_layers=4.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence; default: 2048, or all learned positions if fewer.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Parameters and training FLOPs per token of a model, by every convention."""
    from mfubench.experiments import parse_overrides
    from mfubench.flops import CONVENTIONS, flop_terms, flops_per_token
    from mfubench.presets import load_model

    # a study and `mfubench train` say model.num_hidden_layers=4: understood here too
    pairs = [pair.removeprefix("model.") for pair in overrides or []]
    config = load_model(model, parse_overrides(pairs))
    if seq_len is None:
        seq_len = min(2048, config.max_position_embeddings) if config.position == "learned" else 2048
    config.check_seq_len(seq_len)
    terms = flop_terms(config, seq_len)
    if as_json:
        conventions = {convention: flops_per_token(terms, convention) for convention in CONVENTIONS}
        counts = {"model": model, "seq_len": seq_len, "parameters": terms.parameters, "flops_per_token": conventions}
        typer.echo(json.dumps(counts))
        return
    from rich.console import Console

    from mfubench.banner import architecture, attention_to_mlp_ratio

    console = Console()
    console.print(f"{config.name}: {architecture(config)}", highlight=False)
    console.print(components(config, seq_len), conventions_table(config, seq_len))
    console.print("The components add up to matmul; an MFU without a convention's name is palm.", highlight=False)
    ratio = attention_to_mlp_ratio(config, seq_len)
    console.print(f"attention/FFN {ratio:.2f} (FLOPs of projections and scores over those of the MLP)", highlight=False)


def components(model: ModelConfig, seq_len: int) -> Table:
    """Parameters, and what each part costs a token in the `matmul` convention, as the header says."""
    from rich.table import Table

    from mfubench.flops import count_parameters, flop_terms, flops_per_token

    counts, terms = count_parameters(model), flop_terms(model, seq_len)
    total = flops_per_token(terms, "matmul")
    table = Table("component", "parameters", "share", "MFLOP a token\n(matmul)", "share")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = [
        ("token embedding", counts.token_embedding, 0),
        ("position embedding", counts.position_embedding, 0),
        ("attention projections", counts.attention, 6 * counts.attention),
        (f"attention scores at {seq_len}", 0, terms.attention),
        ("MLP", counts.mlp, 6 * counts.mlp),
        ("head (tied)" if model.tie_word_embeddings else "head", counts.lm_head, 6 * counts.lm_head),
        ("norms and biases", counts.other, 0),
        ("all", counts.total, total),
    ]
    for name, parameters, cost in rows:
        if parameters or cost:
            table.add_row(
                name, f"{parameters:,}", f"{parameters / counts.total:.1%}", f"{cost / 1e6:,.1f}", f"{cost / total:.1%}"
            )
    return table


def conventions_table(model: ModelConfig, seq_len: int) -> Table:
    """MFLOP a token by convention: palm takes all parameters, matmul those in matmuls, causal half of attention too."""
    from rich.table import Table

    from mfubench.flops import CONVENTIONS, flop_terms, flops_per_token

    terms = flop_terms(model, seq_len)
    table = Table("convention", "6 x parameters", "attention", "MFLOP a token")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in CONVENTIONS:
        parameters = terms.parameters if name == "palm" else terms.matmul_parameters
        attention = terms.attention / (2 if name == "causal" else 1)
        cells = (6 * parameters, attention, flops_per_token(terms, name))
        table.add_row(name, *(f"{cell / 1e6:,.1f}" for cell in cells))
    return table

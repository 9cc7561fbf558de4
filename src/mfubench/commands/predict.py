"""`mfubench predict`: what a run would reach on cards that are not at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def predict(
    model: Annotated[str, typer.Argument(help="A preset of config/models.yaml.")],
    gpu: Annotated[str, typer.Option(help="Card, by a name of config/hardware.yaml: B200, H100 SXM, RTX A6000, …")],
    gpus: Annotated[int, typer.Option(help="How many, one process each.")] = 1,
    nodes: Annotated[int, typer.Option(help="Machines they are spread over.")] = 1,
    micro_batch_size: Annotated[
        int | None,
        typer.Option(
            help="Sequences per GPU; default: of those certain to fit, the smallest within 1 % of the fastest."
        ),
    ] = None,
    gradient_accumulation_steps: Annotated[int, typer.Option(help="Micro-steps per GPU and step.")] = 8,
    seq_len: Annotated[int, typer.Option()] = 2048,
    parallelism: Annotated[Literal["none", "ddp", "zero1", "fsdp"] | None, typer.Option(help="Default: ddp.")] = None,
    attention: Annotated[
        Literal["auto", "fa4", "fa3", "fa2", "cudnn", "sdpa", "eager"], typer.Option(help="Attention kernel.")
    ] = "auto",
    kernels: Annotated[
        Literal["plain", "auto"],
        typer.Option(help="plain: torch's and the compiler's; auto: all own kernels that model and settings allow."),
    ] = "plain",
    fp8: Annotated[bool, typer.Option("--fp8", help="Matmuls of the blocks in float8.")] = False,
    compile_: Annotated[Literal["none", "block", "model"], typer.Option("--compile", help="torch.compile.")] = "model",
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], typer.Option()] = "bfloat16",
    activation_checkpointing: Annotated[Literal["none", "selective", "full"], typer.Option()] = "none",
    cuda_graphs: Annotated[bool, typer.Option("--cuda-graphs")] = False,
    runs: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of results to calibrate on (repeatable); default: the shipped ones."),
    ] = None,
    uncalibrated: Annotated[bool, typer.Option("--uncalibrated", help="Datasheet and priors alone.")] = False,
    ceilings: Annotated[list[Path] | None, typer.Option(help="ceilings.json of a machine (repeatable).")] = None,
    network_gb_s: Annotated[float | None, typer.Option(help="Between nodes, GB/s a card.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict step time, tokens/s, MFU and memory of a run, each with an error bar."""
    from mfubench.ceilings import read_ceilings
    from mfubench.config import ConfigError, KernelsConfig
    from mfubench.prediction.calibration import calibrate_on, shipped_calibration
    from mfubench.prediction.predict import plan_run, predict_fastest
    from mfubench.prediction.predict import predict as predict_run
    from mfubench.presets import load_model

    if runs and uncalibrated:
        raise ConfigError("--runs is what to calibrate on, and --uncalibrated wants none: give one of them")
    measured = [read_ceilings(path) for path in ceilings or []]
    calibration = None
    if not uncalibrated:
        calibration = calibrate_on(runs, measured) if runs else shipped_calibration()
    settings: dict[str, Any] = {
        "nnodes": nodes,
        "micro_batch_size": 1 if micro_batch_size is None else micro_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "seq_len": seq_len,
        "attention": attention,
        "kernels": dict.fromkeys(KernelsConfig.model_fields, kernels),
        "fp8": fp8,
        "compile": compile_,
        "dtype": dtype,
        "activation_checkpointing": activation_checkpointing,
        "cuda_graphs": cuda_graphs,
    }
    if parallelism is not None:
        settings["parallelism"] = parallelism
    config = plan_run(load_model(model), gpus, **settings)

    how = predict_fastest if micro_batch_size is None else predict_run
    prediction = how(config, gpu, calibration=calibration, ceilings=measured, network_gb_s=network_gb_s)
    typer.echo(json.dumps(prediction.to_dict()) if as_json else describe(prediction, attention))


def describe(prediction: Any, attention: str) -> str:
    """A prediction for people; `attention`: what was asked for."""
    config, memory = prediction.config, prediction.memory
    bar = prediction.error_fraction
    fit = "fits" if prediction.fits_surely else "may fit, too close to tell" if prediction.fits else "DOES NOT FIT"
    arithmetic = f"{config.dtype} with float8 matmuls" if config.fp8 else config.dtype
    own = [f"{name} {used}" for name, used in config.kernels.model_dump().items() if used != "plain"]
    # the one change that is made to what was asked for (resolved_settings.resolve_settings)
    instead = "" if attention in ("auto", config.attention) else f" ({attention} has no {config.dtype})"
    speed = prediction.network_gb_s
    network = f"; {speed:g} GB/s a card between nodes (--network-gb-s)" if speed is not None else ""
    lines = [
        f"{config.model.name} on {config.world_size} x {prediction.gpu}: {config.parallelism}, {arithmetic}, "
        f"micro-batch {config.micro_batch_size} x {config.gradient_accumulation_steps}, T {config.seq_len}, "
        f"compile {config.compile}",
        f"assumed   attention {config.attention}{instead}, loss {config.loss}, own kernels: {', '.join(own) or 'none'}"
        f"{network}",
        f"step      {1000 * prediction.step_time_s:,.0f} ms ± {100 * bar:.0f} %",
        f"tokens/s  {prediction.tokens_per_s:,.0f} ± {bar * prediction.tokens_per_s:,.0f}"
        f" ({prediction.tokens_per_s_per_gpu:,.0f} a GPU)",
        "MFU       "
        + ", ".join(f"{100 * value:.1f} % {name}" for name, value in prediction.mfu.items())
        + f" (of {prediction.peak_tflops:g} TFLOP/s dense), each ± {100 * bar:.0f} % of itself",
        f"memory    {memory.total_gib:.1f} of {prediction.memory_capacity_gib:.0f} GiB "
        f"± {100 * prediction.memory_error_fraction:.0f} %, at least {prediction.least_memory_gib:.1f}: "
        f"{fit}; largest micro-batch that may fit: {prediction.largest_micro_batch_size}",
        "time      "
        + ", ".join(
            f"{term} {100 * seconds / prediction.step_time_s:.1f} %"
            for term, seconds in sorted(prediction.terms_s.items(), key=lambda item: -item[1])
            if seconds > 0
        ),
        prediction.basis,
    ]
    if prediction.micro_batch_basis != "given":
        lines.insert(2, f"chosen    micro-batch {config.micro_batch_size}: {prediction.micro_batch_basis}")
    return "\n".join(lines)

"""From a trained run to Hugging Face's format and back into a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from train.train_runs import run_arguments, run_here, tiny_config, write_dataset
from typer.testing import CliRunner

from mfubench.cli import app
from mfubench.config import ConfigError, ModelConfig
from mfubench.conversion.checkpoints import export_checkpoint, find_checkpoint, import_checkpoint, read_masters
from mfubench.conversion.hf import import_hf
from mfubench.model import build_model
from mfubench.run_log import read_run_log
from mfubench.train.launch import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A dataset, and the work folder of a run of six steps that kept its checkpoint."""
    root = tmp_path_factory.mktemp("trained")
    data = write_dataset(root / "data")
    run_here(
        tiny_config(max_iters=6, checkpoint={"at_end": True}, evaluation={"at_end": True, "iters": 2}),
        data,
        root / "work",
    )
    return data, root / "work"


def command(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_trained_checkpoint_loads_in_transformers_and_generates(trained: tuple[Path, Path], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    _, work = trained
    output = command("export", work, tmp_path / "hf")
    assert "step-000006" in output
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    batch = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    config = tiny_config()
    decoder = build_model(config, device="cpu")
    untrained = decoder.logits(batch)
    decoder.load_parameters(read_masters(find_checkpoint(work)))
    torch.testing.assert_close(decoder.logits(batch), model(batch).logits, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(untrained, decoder.logits(batch), atol=1e-2)
    assert model.generate(batch, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 15)


def test_export_in_bfloat16(trained: tuple[Path, Path], tmp_path: Path) -> None:
    export_checkpoint(trained[1], tmp_path / "hf", dtype="bfloat16")
    masters = read_masters(find_checkpoint(trained[1]))
    _, state = import_hf(tmp_path / "hf")
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    assert all(torch.equal(state[name], value.bfloat16()) for name, value in masters.items())


@pytest.mark.parametrize(
    "layout", ["study/runs/training/case.json with study/work/training/case", "run.json with run-work", "work folder"]
)
def test_where_a_checkpoint_is_looked_for(layout: str, tmp_path: Path) -> None:
    source, _, work = layout.partition(" with ")
    folder = tmp_path / (work or "work")
    for step in (9, 10, 100):
        (folder / f"checkpoints/step-{step:06d}").mkdir(parents=True)
    if work:
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).write_text("{}")
    found = find_checkpoint(tmp_path / source if work else folder)
    assert found == folder / "checkpoints/step-000100"


def test_of_a_studys_training_the_attempt_that_was_written_last_is_taken(tmp_path: Path) -> None:
    """Each attempt with other values or code has a folder of its own (rules/names.smk: work_of)."""
    run = tmp_path / "study/runs/training/case.json"
    run.parent.mkdir(parents=True)
    run.write_text("{}")
    work = tmp_path / "study/work/training/case"
    (work / "aaaaaaaa/checkpoints").mkdir(parents=True)  # of an attempt that has left none
    for age_s, attempt, steps in ((300, "bbbbbbbb", (100,)), (60, "cccccccc", (9, 10)), (200, "dddddddd", (900,))):
        for step in steps:
            folder = work / attempt / f"checkpoints/step-{step:06d}"
            folder.mkdir(parents=True)
            os.utime(folder, times=(time.time() - age_s,) * 2)
        (work / attempt / "checkpoints/.writing-000999").mkdir()
        (work / attempt / "checkpoints/step-by-hand").mkdir()
    assert find_checkpoint(run) == find_checkpoint(work) == work / "cccccccc/checkpoints/step-000010"
    assert find_checkpoint(work / "dddddddd").name == "step-000900"


def test_no_checkpoint_of_a_studys_training(tmp_path: Path) -> None:
    run = tmp_path / "study/runs/training/case.json"
    run.parent.mkdir(parents=True)
    run.write_text("{}")
    (tmp_path / "study/work/training/case/aaaaaaaa/checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"study/work/training/case, and one folder below.* name the checkpoint"):
        find_checkpoint(run)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint found.*checkpoint\.at_end"):
        find_checkpoint(tmp_path)
    (tmp_path / ".metadata").write_text("")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        export_checkpoint(tmp_path, tmp_path / "hf")


def test_round_trip_through_both_formats(trained: tuple[Path, Path], tmp_path: Path) -> None:
    data, work = trained
    command("export", work, tmp_path / "hf")
    output = command("import", tmp_path / "hf", tmp_path / "back", "seq_len=16", "model.name=tiny", "--data", data)
    assert "go on from it with model.name=tiny." in output
    preset = yaml.safe_load(output.partition("\n\n")[2])
    assert ModelConfig(name="tiny", **preset["tiny"]) == tiny_config().model
    before, after = read_masters(find_checkpoint(work)), read_masters(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(ConfigError, match="exists already"):
        import_checkpoint(tmp_path / "hf", tmp_path / "back", settings={})


@pytest.mark.faults
def test_a_model_that_cannot_be_written_is_one_line_and_leaves_nothing(
    trained: tuple[Path, Path], tmp_path: Path, full_disk: Path, refusal: Callable[..., str]
) -> None:
    command("export", trained[1], tmp_path / "hf")
    advice = "make room, or name another folder"
    for words in (("export", trained[1]), ("import", tmp_path / "hf")):
        full, below = full_disk / "model", tmp_path / "hf" / "config.json" / "model"
        assert refusal(*words, full) == f"error: {full}: cannot be written there (No space left on device); {advice}"
        assert [path.name for path in full_disk.iterdir()] == ["somebody-elses"]
        assert refusal(*words, below) == f"error: {below}: cannot be written there (Not a directory); {advice}"


def test_a_run_goes_on_from_an_imported_checkpoint(trained: tuple[Path, Path], tmp_path: Path) -> None:
    """Its validation loss before the first step is that of the trained run after its last; then it trains on."""
    data, work = trained
    export_checkpoint(work, tmp_path / "hf")
    config = tiny_config(max_iters=3, evaluation={"at_start": True, "iters": 2})
    settings = {"dataset": config.dataset, "seq_len": 16, "seed": config.seed, "model": {"name": "tiny"}}
    import_checkpoint(tmp_path / "hf", tmp_path / "work/checkpoints/step-000000", settings=settings, data=data)
    log = run_here(config, data, tmp_path / "work", "--resume", "auto")
    assert log.evaluations[0].loss == pytest.approx(read_run_log(work / "run.json").evaluations[-1].loss, abs=1e-5)
    assert [step.step for step in log.steps] == [0, 1, 2]
    assert log.resumes[0].changed == [] and log.demoted() is None


@pytest.mark.parametrize("resume", ["auto", "always"])
def test_an_imported_checkpoint_is_not_removed_for_other_data(
    resume: str, trained: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was imported for some; no training would bring it back, as it does steps that were done on other data."""
    data, work = trained
    export_checkpoint(work, tmp_path / "hf")
    config, imported = tiny_config(max_iters=3), tmp_path / "work/checkpoints/step-000000"
    settings = {"dataset": config.dataset, "seq_len": 16, "seed": config.seed, "model": {"name": "tiny"}}
    import_checkpoint(tmp_path / "hf", imported, settings=settings, data=data)
    other = write_dataset(tmp_path / "other", seed=1)
    assert main(run_arguments(config, other, tmp_path / "work", "--resume", resume)) == 1
    told = capfd.readouterr().err
    assert "is a checkpoint of another run than this one: data.sha256: " in told and "starting anew" not in told
    assert imported.is_dir()

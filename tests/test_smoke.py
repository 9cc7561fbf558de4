"""The smoke gate lets good runs through and names what is wrong with the others."""

import math

import pytest
import torch
from factories import make_run_log
from model.small_models import GPT2, LLAMA, QWEN3, run_config

from mfubench.model import build_model
from mfubench.run_log import write_run_log
from mfubench.smoke import find_faults, main, untrained_loss


def good_run():
    log = make_run_log()
    model = log.config.model
    first = log.steps[0].model_copy(update={"loss": math.log(model.vocab_size) + 0.0002 * model.hidden_size})
    steps = [first, *log.steps[1:]]
    return log.model_copy(update={"steps": steps, "config": log.config.model_copy(update={"max_iters": len(steps)})})


@pytest.mark.parametrize(("architecture", "hidden"), [(LLAMA, 1536), (QWEN3, 2304), (GPT2, 768)])
def test_the_first_loss_of_a_wide_model_is_what_its_width_makes_it(architecture, hidden):
    config = run_config({**architecture, "hidden_size": hidden, "vocab_size": 4000})
    torch.manual_seed(0)
    model = build_model(config, device="cpu")
    batch = torch.randint(0, 4000, (128, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = model(batch[:, :-1], batch[:, 1:]).item()
    assert abs(loss - untrained_loss(config.model)) < 0.08
    assert untrained_loss(config.model) - math.log(4000) > 0.1


def test_a_production_model_starts_where_it_was_measured_to_start():
    model = LLAMA | {"hidden_size": 2304, "vocab_size": 32000, "num_attention_heads": 18}
    assert abs(untrained_loss(run_config(model).model) - 10.831) < 0.01  # llama2-1.36b on an H200


def test_a_good_run_passes(tmp_path):
    write_run_log(tmp_path / "run.json", good_run())
    assert main([str(tmp_path / "run.json")]) == 0


def test_each_fault_is_named(tmp_path):
    log = good_run()
    wrong_count = log.parameters.model_copy(update={"total": log.parameters.total - 1})
    bad_loss = log.steps[0].model_copy(update={"loss": log.steps[0].loss + 0.5})
    changes = {
        "parameters": {"parameters": wrong_count},
        "steps were run": {"steps": log.steps[:-1]},
        "first loss": {"steps": [bad_loss, *log.steps[1:]]},
        "status oom": {"status": "oom", "reason": "out of memory"},
    }
    for message, change in changes.items():
        faults = find_faults(log.model_copy(update=change))
        assert len(faults) == 1 and message in faults[0]
        write_run_log(tmp_path / "run.json", log.model_copy(update=change))
        assert main([str(tmp_path / "run.json")]) == 1


def test_too_little_to_evaluate_on_is_found_before_the_longer_runs(tmp_path, capsys):
    log = good_run()
    val = log.dataset.val_tokens
    write_run_log(tmp_path / "run.json", log)
    assert main([str(tmp_path / "run.json"), "--evaluated-length", str(val - 1)]) == 0
    assert main([str(tmp_path / "run.json"), "--evaluated-length", str(val)]) == 1
    assert f"whose val holds {val}; give the dataset more documents" in capsys.readouterr().err


def test_a_file_that_is_no_run_log_is_told(tmp_path, capsys):
    (tmp_path / "run.json").write_text("{")
    assert main([str(tmp_path / "run.json")]) == 1
    assert "run.json" in capsys.readouterr().err

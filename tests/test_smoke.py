"""The smoke gate lets good runs through and names what is wrong with the others."""

import math

from factories import make_run_log

from mfubench.run_log import write_run_log
from mfubench.smoke import find_faults, main


def good_run():
    log = make_run_log()
    first = log.steps[0].model_copy(update={"loss": math.log(log.config.model.vocab_size)})
    steps = [first, *log.steps[1:]]
    return log.model_copy(update={"steps": steps, "config": log.config.model_copy(update={"max_iters": len(steps)})})


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


def test_a_file_that_is_no_run_log_is_told(tmp_path, capsys):
    (tmp_path / "run.json").write_text("{")
    assert main([str(tmp_path / "run.json")]) == 1
    assert "run.json" in capsys.readouterr().err

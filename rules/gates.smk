# What a run waits for: its data, and a model that has passed its smoke test. What a result was made with: its stamp.


def run_inputs(stage):
    """A run needs its data and, after the smoke stage, a model that passed its smoke test."""

    def inputs(wildcards):
        name = f"{stage}/{wildcards.case}"
        return dataset_and_gate(name, STUDY.runs[name])

    return inputs


def dataset_and_gate(name, run):
    """A smoke test that ran again does not make a run stale, so its gate is `ancient`, but only for a run that is up
    to date: Snakemake looks at no other reason of a job whose ancient input is being made, and would leave a stale
    run for a second call.
    """
    needed = [dataset_file(run.dataset)]
    gate = STUDY.smoke_case(run.model.name)
    if gate is not None and run.stage != "smoke":
        needed.append(ancient(gate_file(gate)) if is_current(name) else gate_file(gate))
    if run.continues is not None:
        # its run JSON stands for its checkpoint, which is left before it
        needed.append(run_file(run.continues))
    return needed


def stamp_file(name):
    return f"{RESULTS}/stamps/{name}"


def stamp_of(name):
    """What a result was made with: values, those of its data too, code, generation of the machine, and what the run
    continues.
    """
    if name in STUDY.searches:
        run = STUDY.searches[name].run
        made_with = STUDY.searches[name].to_json() + SEARCH_CODE
    else:
        run = STUDY.runs[name]
        made_with = run.to_json() + TRAINING_CODE
        made_with += stamp_of(run.continues) if run.continues is not None else ""
    dataset = STUDY.config.datasets[run.dataset]
    made_with += (
        dataset.to_json() + STUDY.config.tokenizers[dataset.tokenizer].to_json()
    )
    return text_digest(f"{made_with} {MACHINE.generation}")


def is_current(name):
    """Was this result made with what stands in the study and the code now? (A missing stamp says no.)"""
    file = Path(stamp_file(name))
    return file.is_file() and file.read_text(encoding="utf-8") == stamp_of(name)

use rule run_smoke as run_training with:
    input:
        data=run_inputs("training"),
        machine=MACHINE_FILE,
    output:
        run=f"{RESULTS}/runs/training/{{case}}.json",
    log:
        f"{LOGS}/training/{{case}}.log",
    priority: priority_of("training")
    retries: TRAINING_RESTARTS
    resources:
        **measured_resources("training"),
    params:
        config=config_of("training"),
        code=TRAINING_CODE,
        generation=MACHINE.generation,
        options=run_options("training"),

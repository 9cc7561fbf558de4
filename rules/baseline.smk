use rule run_smoke as run_baseline with:
    input:
        data=run_inputs("baseline"),
        machine=MACHINE_FILE,
    output:
        run=f"{RESULTS}/runs/baseline/{{case}}.json",
    log:
        f"{LOGS}/baseline/{{case}}.log",
    priority: priority_of("baseline")
    resources:
        **measured_resources("baseline"),
    params:
        config=config_of("baseline"),
        code=TRAINING_CODE,
        generation=MACHINE.generation,
        options=run_options("baseline"),

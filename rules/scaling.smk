use rule run_smoke as run_scaling with:
    input:
        data=run_inputs("scaling"),
        machine=MACHINE_FILE,
    output:
        run=f"{RESULTS}/runs/scaling/{{case}}.json",
    log:
        f"{LOGS}/scaling/{{case}}.log",
    priority: priority_of("scaling")
    resources:
        **measured_resources("scaling"),
    params:
        config=config_of("scaling"),
        code=TRAINING_CODE,
        generation=MACHINE.generation,
        options=run_options("scaling"),

use rule run_smoke as run_ablations with:
    input:
        data=run_inputs("ablations"),
        machine=MACHINE_FILE,
    output:
        run=f"{RESULTS}/runs/ablations/{{case}}.json",
    log:
        f"{LOGS}/ablations/{{case}}.log",
    priority: priority_of("ablations")
    resources:
        **measured_resources("ablations"),
    params:
        config=config_of("ablations"),
        code=TRAINING_CODE,
        generation=MACHINE.generation,
        options=run_options("ablations"),

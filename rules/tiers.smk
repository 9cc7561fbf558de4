use rule run_smoke as run_tiers with:
    input:
        data=run_inputs("tiers"),
        machine=MACHINE_FILE,
    output:
        run=f"{RESULTS}/runs/tiers/{{case}}.json",
    log:
        f"{LOGS}/tiers/{{case}}.log",
    priority: priority_of("tiers")
    resources:
        **measured_resources("tiers"),
    params:
        config=config_of("tiers"),
        code=TRAINING_CODE,
        generation=MACHINE.generation,
        options=run_options("tiers"),

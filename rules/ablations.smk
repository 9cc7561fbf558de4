use rule run_smoke as run_ablations with:
    input:
        data=run_inputs("ablations"),
        machine=ancient(MACHINE_FILE),
    output:
        run=f"{RESULTS}/runs/ablations/{{case}}.json",
    log:
        f"{LOGS}/ablations/{{case}}.log",
    priority: priority_of("ablations")
    resources:
        gpu=gpus_of("ablations"),
        nodes=nodes_of("ablations"),
        exclusive=1,
    params:
        config=config_of("ablations"),
        code=TRAINING_CODE,
        generation=MACHINE.generation,
        options=run_options("ablations"),

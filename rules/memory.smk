use rule run_smoke as run_memory with:
    input:
        data=run_inputs("memory"),
        machine=MACHINE_FILE,
    output:
        run=f"{RESULTS}/runs/memory/{{case}}.json",
    log:
        f"{LOGS}/memory/{{case}}.log",
    priority: priority_of("memory")
    resources:
        **measured_resources("memory"),
    params:
        config=config_of("memory"),
        code=TRAINING_CODE,
        generation=MACHINE.generation,
        options=run_options("memory"),


rule search_memory:
    input:
        data=search_inputs,
        machine=MACHINE_FILE,
    output:
        limit=f"{RESULTS}/memory/{{case}}.json",
    log:
        f"{LOGS}/memory/{{case}}.search.log",
    priority: PRIORITY["memory"]
    conda:
        "../envs/mfubench.yaml"
    threads: ALL_CORES
    resources:
        **resources_of_search(),
    params:
        search=search_config,
        code=SEARCH_CODE,
        generation=MACHINE.generation,
        options=search_options,
    shell:
        'python "$MFUBENCH_SCRIPTS"/search_memory.py --search {params.search:q} {params.options}'
        " --machine {input.machine} --output {output.limit} 2>&1 | tee -i {log}"

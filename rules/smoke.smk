# The body of every measured run. The other stages use it with their own files, so that the rule graph shows each.
rule run_smoke:
    input:
        data=run_inputs("smoke"),
        machine=MACHINE_FILE,
    output:
        run=f"{RESULTS}/runs/smoke/{{case}}.json",
    log:
        f"{LOGS}/smoke/{{case}}.log",
    priority: priority_of("smoke")
    conda:
        "../envs/mfubench.yaml"
    threads: ALL_CORES
    resources:
        **measured_resources("smoke"),
    params:
        config=config_of("smoke"),
        code=TRAINING_CODE,
        generation=MACHINE.generation,
        options=run_options("smoke"),
    shell:
        'python "$MFUBENCH_SCRIPTS"/train_model.py --config {params.config:q} {params.options}'
        " --machine {input.machine} --output {output.run} 2>&1 | tee -i {log}"


rule check_smoke:
    input:
        run=f"{RESULTS}/runs/smoke/{{case}}.json",
    output:
        passed=touch(f"{RESULTS}/smoke/{{case}}.passed"),
    log:
        f"{LOGS}/smoke/{{case}}.check.log",
    priority: PRIORITY["smoke"]
    localrule: True
    conda:
        "../envs/mfubench.yaml"
    params:
        code=SMOKE_CODE,
        evaluated=evaluated_length,
    shell:
        'python "$MFUBENCH_SCRIPTS"/check_smoke.py {input.run} --evaluated-length {params.evaluated} 2>&1 | tee -i {log}'

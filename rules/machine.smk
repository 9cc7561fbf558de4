rule record_machine:
    output:
        machine=MACHINE_FILE,
    log:
        f"{LOGS}/record_machine.log",
    priority: PRIORITY["machine"]
    conda:
        "../envs/mfubench.yaml"
    resources:
        **node_resources("smoke"),
    params:
        generation=MACHINE.generation,
    shell:
        'python "$MFUBENCH_SCRIPTS"/record_machine.py --output {output.machine} 2>&1 | tee -i {log}'


rule measure_ceilings:
    input:
        machine=MACHINE_FILE,
    output:
        ceilings=f"{RESULTS}/ceilings.json",
    log:
        f"{LOGS}/measure_ceilings.log",
    priority: PRIORITY["ceilings"]
    conda:
        "../envs/mfubench.yaml"
    threads: ALL_CORES
    resources:
        **node_resources("memory"),
        exclusive=1,
    params:
        request=ceilings_request,
        code=CEILINGS_CODE,
        generation=MACHINE.generation,
        lease=lease_options(largest_world_size() if MEASURES_GPUS else 0),
    shell:
        'python "$MFUBENCH_SCRIPTS"/lease_cards.py {params.lease} --'
        ' python "$MFUBENCH_SCRIPTS"/measure_ceilings.py --request {params.request:q} --output {output.ceilings}'
        " 2>&1 | tee -i {log}"

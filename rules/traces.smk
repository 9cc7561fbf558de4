# The profiled step of a run, out of its work folder. Only a new run makes it stale: nothing else could make it again.
rule keep_trace:
    input:
        run=f"{RESULTS}/runs/{{stage}}/{{case}}.json",
    output:
        trace=f"{RESULTS}/traces/{{stage}}/{{case}}.json.gz",
    log:
        f"{LOGS}/{{stage}}/{{case}}.trace.log",
    localrule: True
    conda:
        "../envs/mfubench.yaml"
    params:
        work=work_of_run,
    shell:
        'python "$MFUBENCH_SCRIPTS"/keep_trace.py --run {input.run} --work {params.work} --output {output.trace}'
        " 2>&1 | tee -i {log}"

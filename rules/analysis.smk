# Written by Snakemake itself, as a template of one value: a large study is longer than a command line may be, and a
# `run:` block would read the whole workflow anew. First of all jobs: a report of what a study has so far, or of what was
# left when it broke off, says what was declared.
rule declare_study:
    input:
        template=local(ancient(DECLARATION_TEMPLATE)),
    output:
        study=f"{RESULTS}/study.json",
    log:
        f"{LOGS}/declare_study.log",  # asked for by the linter; nothing writes it
    priority: PRIORITY["machine"]
    localrule: True
    params:
        study=lambda wildcards: STUDY.to_json(CONFIG_FILES),
    template_engine:
        "jinja2"


rule tabulate_runs:
    input:
        results=all_results(),
        traces=trace_files(),
        study=f"{RESULTS}/study.json",
        machine=MACHINE_FILE,
        ceilings=f"{RESULTS}/ceilings.json",
    output:
        runs=report(
            table_file("runs"),
            caption="../workflow/report/runs.rst",
            category="Tables",
        ),
        expectations=report(
            table_file("expectations"),
            caption="../workflow/report/expectations.rst",
            category="Tables",
        ),
        others=[
            table_file(name) for name in TABLES if name not in ("runs", "expectations")
        ],
    log:
        f"{LOGS}/tabulate_runs.log",
    conda:
        "../envs/mfubench.yaml"
    resources:
        **cpu_resources("analysis"),
    params:
        code=table_code() + PROFILE_CODE,
        facts=FACTS,
    shell:
        'python "$MFUBENCH_SCRIPTS"/tabulate_runs.py --study-dir $(dirname {input.study}) --output-dir $(dirname {output.runs}) 2>&1 | tee -i {log}'


rule plot_throughput:
    input:
        results=all_results(),
        study=f"{RESULTS}/study.json",
        machine=MACHINE_FILE,
        ceilings=f"{RESULTS}/ceilings.json",
    output:
        report(
            figure_file("throughput"),
            caption="../workflow/report/throughput.rst",
            category="Figures",
        ),
    log:
        f"{LOGS}/plot_throughput.log",
    conda:
        "../envs/mfubench.yaml"
    resources:
        **cpu_resources("analysis"),
    params:
        figure="throughput",
        code=plot_code("throughput"),
        facts=FACTS,
    shell:
        'python "$MFUBENCH_SCRIPTS"/plot_{params.figure}.py --study-dir $(dirname {input.study}) --output {output} 2>&1 | tee -i {log}'


use rule plot_throughput as plot_ladder with:
    output:
        report(
            figure_file("ladder"),
            caption="../workflow/report/ladder.rst",
            category="Figures",
        ),
    log:
        f"{LOGS}/plot_ladder.log",
    params:
        figure="ladder",
        code=plot_code("ladder"),
        facts=FACTS,


use rule plot_throughput as plot_effects with:
    output:
        report(
            figure_file("effects"),
            caption="../workflow/report/effects.rst",
            category="Figures",
        ),
    log:
        f"{LOGS}/plot_effects.log",
    params:
        figure="effects",
        code=plot_code("effects"),
        facts=FACTS,


use rule plot_throughput as plot_scaling with:
    output:
        report(
            figure_file("scaling"),
            caption="../workflow/report/scaling.rst",
            category="Figures",
        ),
    log:
        f"{LOGS}/plot_scaling.log",
    params:
        figure="scaling",
        code=plot_code("scaling"),
        facts=FACTS,


use rule plot_throughput as plot_memory with:
    output:
        report(
            figure_file("memory"),
            caption="../workflow/report/memory.rst",
            category="Figures",
        ),
    log:
        f"{LOGS}/plot_memory.log",
    params:
        figure="memory",
        code=plot_code("memory"),
        facts=FACTS,


use rule plot_throughput as plot_loss with:
    output:
        report(
            figure_file("loss"),
            caption="../workflow/report/loss.rst",
            category="Figures",
        ),
    log:
        f"{LOGS}/plot_loss.log",
    params:
        figure="loss",
        code=plot_code("loss"),
        facts=FACTS,


use rule plot_throughput as plot_mfu_over_time with:
    output:
        report(
            figure_file("mfu_over_time"),
            caption="../workflow/report/mfu_over_time.rst",
            category="Figures",
        ),
    log:
        f"{LOGS}/plot_mfu_over_time.log",
    params:
        figure="mfu_over_time",
        code=plot_code("mfu_over_time"),
        facts=FACTS,


use rule plot_throughput as plot_waterfall with:
    input:
        traces=trace_files(),
        results=all_results(),
        study=f"{RESULTS}/study.json",
        machine=MACHINE_FILE,
        ceilings=f"{RESULTS}/ceilings.json",
    output:
        report(
            figure_file("waterfall"),
            caption="../workflow/report/waterfall.rst",
            category="Figures",
        ),
    log:
        f"{LOGS}/plot_waterfall.log",
    params:
        figure="waterfall",
        code=plot_code("waterfall") + PROFILE_CODE,
        facts=FACTS,


use rule plot_waterfall as plot_roofline with:
    output:
        report(
            figure_file("roofline"),
            caption="../workflow/report/roofline.rst",
            category="Figures",
        ),
    log:
        f"{LOGS}/plot_roofline.log",
    params:
        figure="roofline",
        code=plot_code("roofline") + PROFILE_CODE,
        facts=FACTS,


rule write_report:
    input:
        traces=trace_files(),
        tables=table_file("runs"),
        figures=[figure_file(name) for name in FIGURES],
        study=f"{RESULTS}/study.json",
        machine=MACHINE_FILE,
    output:
        html=report(
            f"{RESULTS}/report.html",
            caption="../workflow/report/report.rst",
            category="Report",
        ),
        markdown=f"{RESULTS}/report.md",
        summary=report(
            f"{RESULTS}/summary.json",
            caption="../workflow/report/summary.rst",
            category="Report",
        ),
    log:
        f"{LOGS}/write_report.log",
    conda:
        "../envs/mfubench.yaml"
    resources:
        **cpu_resources("analysis"),
    params:
        code=analysis_code("analysis", "audit", "kernel_families.py") + PROFILE_CODE,
        templates=TEMPLATES,
        facts=FACTS,
    shell:
        'python "$MFUBENCH_SCRIPTS"/write_report.py --study-dir $(dirname {input.study}) --html {output.html}'
        " --markdown {output.markdown} --summary {output.summary} 2>&1 | tee -i {log}"


rule audit_study:
    input:
        results=all_results(),
        study=f"{RESULTS}/study.json",
        ceilings=f"{RESULTS}/ceilings.json",
    output:
        audit=report(
            f"{RESULTS}/audit.json",
            caption="../workflow/report/audit.rst",
            category="Report",
        ),
    log:
        f"{LOGS}/audit_study.log",
    conda:
        "../envs/mfubench.yaml"
    resources:
        **cpu_resources("analysis"),
    params:
        code=audit_code(),
        facts=FACTS,
    shell:
        'python "$MFUBENCH_SCRIPTS"/audit_study.py --study-dir $(dirname {input.study}) --output {output.audit} 2>&1 | tee -i {log}'


# The last rule: a number that cannot be fails the study, and the report and the audit stand.
rule check_audit:
    input:
        audit=f"{RESULTS}/audit.json",
        report=f"{RESULTS}/report.html",
    output:
        touch(f"{RESULTS}/audit.passed"),
    log:
        f"{LOGS}/check_audit.log",
    localrule: True
    conda:
        "../envs/mfubench.yaml"
    shell:
        'python "$MFUBENCH_SCRIPTS"/check_audit.py {input.audit} 2>&1 | tee -i {log}'

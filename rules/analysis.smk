# A `run:` block, because a large study is longer than a command line may be.
rule declare_study:
    output:
        study=f"{RESULTS}/study.json",
    params:
        study=STUDY.to_json(),
    localrule: True
    run:
        Path(output.study).write_text(params.study + "\n", encoding="utf-8")


rule tabulate_runs:
    input:
        results=all_results(),
        study=f"{RESULTS}/study.json",
        machine=MACHINE_FILE,
        ceilings=f"{RESULTS}/ceilings.json",
    output:
        report(
            f"{RESULTS}/tables/runs.csv",
            caption="../workflow/report/runs.rst",
            category="Tables",
        ),
    log:
        f"{LOGS}/tabulate_runs.log",
    params:
        code=analysis_code("analysis"),
        facts=FACTS,
    localrule: True
    conda:
        "../envs/mfubench.yaml"
    shell:
        "python workflow/scripts/tabulate_runs.py --study-dir {RESULTS} --output-dir {RESULTS}/tables 2>&1 | tee {log}"


rule plot_throughput:
    input:
        results=all_results(),
        study=f"{RESULTS}/study.json",
        ceilings=f"{RESULTS}/ceilings.json",
    output:
        report(
            f"{RESULTS}/figures/throughput.png",
            caption="../workflow/report/throughput.rst",
            category="Figures",
        ),
    log:
        f"{LOGS}/plot_throughput.log",
    params:
        code=plot_code("throughput"),
        facts=FACTS,
    localrule: True
    conda:
        "../envs/mfubench.yaml"
    shell:
        "python workflow/scripts/plot_throughput.py --study-dir {RESULTS} --output {output} 2>&1 | tee {log}"


rule write_report:
    input:
        tables=f"{RESULTS}/tables/runs.csv",
        figures=expand(f"{RESULTS}/figures/{{figure}}.png", figure=FIGURES),
        study=f"{RESULTS}/study.json",
        machine=MACHINE_FILE,
    output:
        html=f"{RESULTS}/report.html",
        markdown=f"{RESULTS}/report.md",
        summary=f"{RESULTS}/summary.json",
    log:
        f"{LOGS}/write_report.log",
    params:
        code=analysis_code("analysis", "audit"),
        facts=FACTS,
    localrule: True
    conda:
        "../envs/mfubench.yaml"
    shell:
        "python workflow/scripts/write_report.py --study-dir {RESULTS} --html {output.html}"
        " --markdown {output.markdown} --summary {output.summary} 2>&1 | tee {log}"


# The last rule: a number that cannot be fails the study, and the report stands.
rule audit_study:
    input:
        results=all_results(),
        report=f"{RESULTS}/report.html",
        ceilings=f"{RESULTS}/ceilings.json",
    output:
        audit=f"{RESULTS}/audit.json",
    log:
        f"{LOGS}/audit_study.log",
    params:
        code=analysis_code("audit"),
        facts=FACTS,
    localrule: True
    conda:
        "../envs/mfubench.yaml"
    shell:
        "python workflow/scripts/audit_study.py --study-dir {RESULTS} --output {output.audit} 2>&1 | tee {log}"

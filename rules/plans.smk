rule plan_models:
    output:
        plan=f"{RESULTS}/plans/{{case}}.json",
        table=report(
            f"{RESULTS}/plans/{{case}}.txt",
            caption="../workflow/report/plan.rst",
            category="Plans",
        ),
        isoflops=report(
            f"{RESULTS}/plans/{{case}}-isoflops.png",
            caption="../workflow/report/isoflops.rst",
            category="Plans",
        ),
        loss_surface=report(
            f"{RESULTS}/plans/{{case}}-loss-surface.png",
            caption="../workflow/report/loss_surface.rst",
            category="Plans",
        ),
    log:
        f"{LOGS}/plans/{{case}}.log",
    conda:
        "../envs/mfubench.yaml"
    resources:
        **cpu_resources("analysis"),
    params:
        plan=plan_config,
        code=PLANNER_CODE,
        facts=FACTS + PREDICTION_FACTS,
    shell:
        'python "$MFUBENCH_SCRIPTS"/plan_models.py --plan {params.plan:q} --output {output.plan} --table {output.table}'
        " --isoflops {output.isoflops} --loss-surface {output.loss_surface} 2>&1 | tee -i {log}"

use rule run_smoke as run_training with:
    input:
        data=run_inputs("training"),
        machine=MACHINE_FILE,
    output:
        run=f"{RESULTS}/runs/training/{{case}}.json",
    log:
        f"{LOGS}/training/{{case}}.log",
    priority: priority_of("training")
    retries: TRAINING_RESTARTS
    resources:
        **measured_resources("training"),
    params:
        config=config_of("training"),
        code=TRAINING_CODE,
        generation=MACHINE.generation,
        options=run_options("training"),


# A trained model for transformers: AutoModelForCausalLM.from_pretrained("results/<study>/hf/<case>").
rule export_model:
    input:
        run=f"{RESULTS}/runs/training/{{case}}.json",
        tokenizer=tokenizer_of_training,
    output:
        config=f"{RESULTS}/hf/{{case}}/config.json",
        weights=f"{RESULTS}/hf/{{case}}/model.safetensors",
    log:
        f"{LOGS}/training/{{case}}.export.log",
    conda:
        "../envs/mfubench.yaml"
    resources:
        **cpu_resources("analysis"),
    params:
        work=work_of_training,
        code=EXPORT_CODE,
    shell:
        'python "$MFUBENCH_SCRIPTS"/export_model.py --work {params.work} --tokenizer $(dirname {input.tokenizer})'
        " --output $(dirname {output.config}) 2>&1 | tee -i {log}"

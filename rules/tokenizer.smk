rule get_tokenizer:
    input:
        text=text_of_tokenizer,
    output:
        meta=f"{RESOURCES}/tokenizers/{{tokenizer}}/meta.json",
        tokenizer=f"{RESOURCES}/tokenizers/{{tokenizer}}/tokenizer.json",
    log:
        f"{RESOURCES}/logs/tokenizers/{{tokenizer}}.log",
    priority: PRIORITY["tokenizer"]
    conda:
        "../envs/mfubench.yaml"
    resources:
        **cpu_resources("preparation"),
    params:
        config=tokenizer_config,
        code=TOKENIZER_CODE,
        folder=f"{RESOURCES}/tokenizers/{{tokenizer}}",
    shell:
        'python "$MFUBENCH_SCRIPTS"/get_tokenizer.py --config {params.config:q}'
        " --output {params.folder} 2>&1 | tee -i {log}"

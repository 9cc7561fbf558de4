rule prepare_dataset:
    input:
        tokenizer=tokenizer_of_dataset,
        text=text_of_dataset,
    output:
        meta=f"{RESOURCES}/datasets/{{dataset}}/meta.json",
    log:
        f"{RESOURCES}/logs/datasets/{{dataset}}.log",
    priority: PRIORITY["dataset"]
    conda:
        "../envs/mfubench.yaml"
    threads: ALL_CORES
    resources:
        **cpu_resources("preparation"),
    params:
        config=dataset_config,
        code=DATASET_CODE,
        tokenizer=tokenizer_folder_of_dataset,
        folder=f"{RESOURCES}/datasets/{{dataset}}",
    shell:
        'python "$MFUBENCH_SCRIPTS"/prepare_dataset.py --config {params.config:q}'
        " --tokenizer {params.tokenizer} --output {params.folder} --workers {threads} 2>&1 | tee -i {log}"

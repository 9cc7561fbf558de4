from snakemake.utils import min_version

min_version("9.20")

# A study given with --configfile stands alone: merged with the default study it would run both.
if not workflow.configfiles:

    configfile: str(workflow.current_basedir.join("config/config.yaml"))


report: "workflow/report/workflow.rst"


# For --sdm apptainer; built with `apptainer build mfubench.sif envs/mfubench.def`.
container: "mfubench.sif"


include: "rules/study.smk"
include: "rules/digests.smk"
include: "rules/names.smk"
include: "rules/text.smk"
include: "rules/order.smk"
include: "rules/gates.smk"
include: "rules/resources.smk"
include: "rules/arguments.smk"
include: "rules/queue.smk"
include: "rules/tokenizer.smk"
include: "rules/dataset.smk"
include: "rules/machine.smk"
include: "rules/smoke.smk"
include: "rules/baseline.smk"
include: "rules/scaling.smk"
include: "rules/tiers.smk"
include: "rules/ablations.smk"
include: "rules/memory.smk"
include: "rules/training.smk"
include: "rules/plans.smk"
include: "rules/traces.smk"
include: "rules/analysis.smk"


localrules:
    all,
    tokenizers,
    datasets,
    smoke,
    baseline,
    scaling,
    tiers,
    ablations,
    memory,
    training,
    export,
    plans,
    analysis,


# Every artifact by name, though the report needs most of them: of a file that only others name, Snakemake does not ask
# whether it is still there.
rule all:
    default_target: True
    input:
        stage_files("smoke", gate=True),
        analysis_files(),


rule tokenizers:
    input:
        [tokenizer_file(name) for name in STUDY.config.tokenizers],


rule datasets:
    input:
        [dataset_file(name) for name in STUDY.config.datasets],


rule smoke:
    input:
        stage_files("smoke", gate=True),


rule baseline:
    input:
        stage_files("baseline"),


rule scaling:
    input:
        stage_files("scaling"),


rule tiers:
    input:
        stage_files("tiers"),


rule ablations:
    input:
        stage_files("ablations"),


rule memory:
    input:
        stage_files("memory"),
        memory_limit_files(),


rule training:
    input:
        stage_files("training"),


rule export:
    input:
        export_files(),


rule plans:
    input:
        plan_files(),


rule analysis:
    input:
        analysis_files(),


onstart:
    check_queue()


onerror:
    show_what_exists()


onsuccess:
    shutil.rmtree(f"{RESULTS}/partial", ignore_errors=True)  # of a call that failed
    name_report()

# What jobs take: GPUs and nodes; on a SLURM cluster also partition, memory and time.
from mfubench.slurm_requests import slurm_cpu, slurm_node, whole_nodes


def checked_gpus(run):
    """GPUs that a run takes. Snakemake would lower a request above its limit and say nothing: refuse instead."""
    if not HAS_GPUS or run.device == "cpu":
        return 0
    limit = workflow.global_resources.get("gpu")
    limit = getattr(limit, "value", limit)
    gpus = whole_nodes(MACHINE, run.world_size, run.nnodes)
    if limit is not None and gpus > limit:
        raise WorkflowError(
            f"{run.name} needs {gpus} GPUs, but the limit is gpu={limit} (--resources gpu=N)"
        )
    return gpus


def measured_resources(stage):
    """What a measured run takes: GPUs, nodes, and no other measurement beside it."""

    def run(wildcards):
        return STUDY.runs[f"{stage}/{wildcards.case}"]

    def gpu(wildcards):
        return checked_gpus(run(wildcards))

    def nodes(wildcards):
        return run(wildcards).nnodes

    resources = {"gpu": gpu, "nodes": nodes, "exclusive": 1}
    if MACHINE.slurm:
        # `mpi`: the job is the bare batch script, which starts itself on each node; `tasks`: as many as there are nodes
        resources |= {"mpi": "", "tasks": nodes, "tasks_per_gpu": 0}
    return slurm_node(MACHINE, stage) | resources


def node_resources(stage):
    """What a job takes that has one whole node, but is no run."""
    gpus = whole_nodes(MACHINE, largest_world_size(), 1) if MEASURES_GPUS else 0
    return slurm_node(MACHINE, stage) | {"gpu": gpus, "nodes": 1}


def resources_of_search():
    def gpu(wildcards):
        return checked_gpus(STUDY.searches[f"memory/{wildcards.case}"].run)

    return node_resources("memory") | {"gpu": gpu, "exclusive": 1}


def cpu_resources(kind):
    return slurm_cpu(MACHINE, kind)


def largest_world_size():
    """Cards of one node that the study's largest run takes."""
    return max((run.world_size // run.nnodes for run in CEILINGS_RUNS), default=1)

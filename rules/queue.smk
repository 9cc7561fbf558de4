# Before the first job, and after a failure.
from mfubench.slurm import check_status_command, refuse_orphans


def check_queue():
    """Refuse to submit what an earlier snakemake's jobs still work on, and to wait for states that never come."""
    settings = getattr(workflow, "executor_settings", None)
    if MACHINE.slurm is None and not hasattr(settings, "status_command"):
        return  # neither the study nor this call has to do with SLURM, whatever is installed here
    try:
        refuse_orphans(Path.cwd())
        check_status_command(getattr(settings, "status_command", None))
    except ConfigError as error:
        raise WorkflowError(str(error)) from None


def show_what_exists():
    """After a failure: what is there, what failed and why. In a folder of its own, since rules own the study's report."""
    shell(
        "mfubench report {RESULTS} --partial --output {RESULTS}/partial/report.html || true"
    )

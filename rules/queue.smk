# Before the first job, and at the end of a call.
import logging

from snakemake.common import NOTHING_TO_BE_DONE_MSG
from snakemake.logging import logger

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
    if Path(RESULTS, "study.json").exists() or Path(RESULTS, "work").exists():
        shell(
            "mfubench report {RESULTS} --partial --output {RESULTS}/partial/report.html || true"
        )


def name_report():
    """At the end of a call that went well: where its results are."""
    if Path(RESULTS, "report.html").exists():
        # at the end alone: every call and job reads this file
        from mfubench.audit.main import verdict_line

        audit = Path(RESULTS, "audit.json")
        said = f": {verdict_line(audit)}" if audit.exists() else ""
        print(
            f"\nReport: {RESULTS}/report.html   table: {RESULTS}/tables/runs.csv   audit: {audit}{said}",
            flush=True,
        )
    models = [str(Path(file).parent) for file in export_files() if Path(file).exists()]
    if models:
        print(f"Exported models: {', '.join(models)}", flush=True)


class NothingToDo(logging.Handler):
    """Names the report where all is up to date: Snakemake says so and calls none of its hooks."""

    def emit(self, record):
        if record.getMessage() == NOTHING_TO_BE_DONE_MSG and not workflow.dryrun:
            name_report()


if workflow.is_main_process:
    logger.addHandler(NothingToDo())

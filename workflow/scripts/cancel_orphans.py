"""End the SLURM jobs that a killed snakemake has left behind in this folder, before it is started again.

A snakemake that dies by SIGKILL or with its machine leaves its jobs in the queue. Cancelled trainings go on from their
last checkpoint; `--wait` lets the jobs end by themselves instead.
"""

import argparse
from pathlib import Path

from mfubench.endings import faults_told
from mfubench.slurm import end_orphans

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wait", action="store_true", help="let the jobs end by themselves")
    arguments = parser.parse_args()
    with faults_told():
        count = end_orphans(Path.cwd(), cancel=not arguments.wait)
    print(f"{count} job(s) of this folder {'have ended' if arguments.wait else 'were cancelled'}")

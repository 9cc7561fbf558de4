# Stages follow one another by priority, and within a stage all first repeats come before all second ones, in the order
# of the file: repeats are interleaved, so that a drift of the machine meets every case alike. Only smoke gates.
PRIORITY = {
    "tokenizer": 10_000_000,
    "dataset": 9_000_000,
    "machine": 8_000_000,
    "ceilings": 7_500_000,
    "smoke": 7_000_000,
    "baseline": 6_000_000,
    "scaling": 5_000_000,
    "tiers": 4_000_000,
    "ablations": 3_000_000,
    "memory": 2_000_000,
    "training": 1_000_000,
}


def priority_of(stage):
    def priority(wildcards):
        run = STUDY.runs[f"{stage}/{wildcards.case}"]
        return (
            PRIORITY[stage]
            - 1_000 * run.repeat
            - STUDY.cases(stage).index(wildcards.case)
        )

    return priority

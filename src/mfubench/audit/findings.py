"""What the audit says: a code, a sentence, how sure it is, and the true value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mfubench.host_load import ProcessCores

# Faults of figures that people report, in the order in which they are listed.
CODES = (
    "tokens_per_s_is_one_rank",
    "tokens_per_s_excludes_accumulation",
    "peak_is_sparse",
    "peak_is_wrong",
    "peak_unknown",
    "accumulation_differs_from_banner",
    "rate_differs_from_step_time",
    "workloads_differ",
    "above_ceiling",
    "time_contains_other_work",
    "flops_convention_unstated",
    "parameters_differ",
    "no_contrast",
    "warm_up_included",
    "resumed_tokens_counted",
    # Faults that only a run JSON can show, since it holds more than figures.
    "ranks_counted_twice",  # a global rate multiplied by the number of GPUs once more
    "ranks_disagree",  # cards, ranks and the ranks' clocks do not belong together
    "not_what_ran",  # settings or kernels other than the record says
    "steps_miscounted",  # left out, listed twice, or called what they are not
    "times_contradict",  # two records of one clock, or a part that is longer than the whole
    "memory_beyond_the_card",
    "schedule_frozen",
    "gradients_absent",
    "loss_not_finite",
    "loss_is_no_loss",  # negative, or the same in every step
    "token_ids_do_not_fit",
    "status_contradicts_steps",  # a run that went well without steps, or failed with measured ones
    "nothing_measured",
    "machine_was_busy",  # with other processes, while the run was measured
)
# Contradictions of arithmetic: a run that has one of them, and surely, fails its study.
IMPOSSIBLE = {
    "tokens_per_s_is_one_rank",
    "tokens_per_s_excludes_accumulation",
    "accumulation_differs_from_banner",
    "above_ceiling",
    "parameters_differ",
    "resumed_tokens_counted",
    "ranks_counted_twice",
    "steps_miscounted",
    "times_contradict",
    "memory_beyond_the_card",
    "loss_is_no_loss",
    "token_ids_do_not_fit",
    "status_contradicts_steps",
}
SURE = 0.9


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a run."""

    code: str  # of CODES
    sentence: str  # what is wrong, and why; without its full stop
    confidence: float  # 0 … 1
    true_value: float | str | None = None

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"unknown audit code {self.code!r}")

    @property
    def impossible(self) -> bool:
        """Whether no reading of the run makes this number possible."""
        return self.code in IMPOSSIBLE and self.confidence >= SURE

    @property
    def certainty(self) -> str:
        """How sure, in words."""
        if self.confidence >= 0.95:
            return "certain"
        if self.confidence >= 0.75:
            return "very likely"
        return "likely" if self.confidence >= 0.5 else "possible"


@dataclass
class RunVerdict:
    """One run, judged: what the true figures are and what is wrong with the stated ones."""

    name: str
    source: str  # file, or "command line"
    group: tuple | None = None  # runs of one model on one kind of card, compared by weak scaling
    world_size: int = 1
    micro_steps_per_gpu: float | None = None
    true_tokens_per_s: float | None = None  # over all GPUs
    true_mfu_palm: float | None = None  # fraction of the dense peak
    precision: str = "bf16"  # whose peak that is
    stated_mfu: float | None = None  # fraction, as the source says it
    findings: list[Finding] = field(default_factory=list)
    unit: str = "GPU"  # what a rank runs on, in words; of a CPU run "process"
    cores: ProcessCores | None = None  # of a CPU run
    checked: bool = True  # whether anything could be held against anything
    not_checked: list[str] = field(default_factory=list)  # what figures are missing for, and which

    @property
    def codes(self) -> list[str]:
        """Each code once, in the order of CODES."""
        return unique_codes(self.findings)

    @property
    def impossible(self) -> bool:
        return any(finding.impossible for finding in self.findings)


def sentence_of(error: Exception) -> str:
    """The first line of a complaint, without its full stop."""
    return str(error).splitlines()[0].removesuffix(".")


def unique_codes(findings: Iterable[Finding]) -> list[str]:
    return sorted({finding.code for finding in findings}, key=CODES.index)

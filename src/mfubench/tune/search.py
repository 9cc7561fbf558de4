"""What to try next: micro-batch, accumulation, parallelism and activation checkpointing, within the memory margin.

Layouts (parallelism x checkpointing) come in the order of what they cost: no recomputation first, sharding after
replication. Each is climbed: from the largest micro-batch that should fit, down until one does, then up or down while
that is faster. While layouts are compared, a step has the same number of sequences; last, it grows while that still
gains. Nothing here runs anything: `try_setting` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

GAIN = 0.01  # a larger micro-batch or step must be faster by this share to be worth its memory or its batch
ESTIMATE_SLACK = 0.05  # what should fit but for this share is tried: an out-of-memory costs little time
LARGEST_MICRO_BATCH = 1024
LARGEST_ACCUMULATION = 128
SEQUENCES_A_MICRO_BATCH = 4  # micro-steps of the first step tried, where the sequences of a step are free


@dataclass(frozen=True)
class Setting:
    """What is tuned."""

    parallelism: str  # none | ddp | zero1 | fsdp
    activation_checkpointing: str  # none | selective | full
    micro_batch_size: int
    gradient_accumulation_steps: int

    @property
    def name(self) -> str:
        return (
            f"{self.parallelism}-{self.activation_checkpointing}-micro-batch{self.micro_batch_size}"
            f"-accumulation{self.gradient_accumulation_steps}"
        )


@dataclass(frozen=True)
class Trial:
    """How one setting did."""

    setting: Setting
    status: str  # of the run, or `failed`
    reason: str | None
    tokens_per_s: float  # over all GPUs, median of the measured steps; 0 where there are none
    mfu: float | None  # palm, fraction; None without a known peak
    peak_memory_gib: float | None  # of the fullest rank
    seconds: float  # what it took of the budget
    cached: bool = False

    def fits(self, usable_gib: float) -> bool:
        """Trained, and left the margin free."""
        return self.status == "ok" and self.tokens_per_s > 0 and (self.peak_memory_gib or 0.0) <= usable_gib


@dataclass(frozen=True)
class Space:
    """What may be tried."""

    parallelisms: Sequence[str]
    checkpointings: Sequence[str]
    usable_gib: float  # of a process, the margin taken off
    sequences: int | None = None  # of a GPU's step, where the global batch is given
    start_at_most: int = LARGEST_MICRO_BATCH  # first micro-batch, where the estimate would allow more


class BudgetSpent(Exception):
    """There is no time for another trial, or none was left to end one: then the message says how far it came."""


class Search:
    """One search; `trials` holds what was tried, in order, and `notes` what was left out and why."""

    def __init__(
        self,
        space: Space,
        estimate_gib: Callable[[Setting], float],
        try_setting: Callable[[Setting], Trial],
        seconds_left: Callable[[], float],
    ):
        self.space = space
        self.estimate_gib, self.try_setting, self.seconds_left = estimate_gib, try_setting, seconds_left
        self.trials: dict[Setting, Trial] = {}
        self.notes: list[str] = []
        self.sequences = space.sequences or 0  # 0: not yet chosen

    def run(self) -> Trial | None:
        """Search until done or out of time. Returns the best trial; None where none fits."""
        try:
            self.compare_layouts()
            self.grow_step()
        except BudgetSpent as spent:
            within = f" ({spent})" if str(spent) else ""
            self.notes.append(f"the budget ended before everything was tried{within}; a longer one goes on from here")
        except KeyboardInterrupt:
            self.notes.append("stopped on request before everything was tried; the same command goes on from here")
        return self.best()

    def best(self) -> Trial | None:
        """The fastest that fits; of its equals in all but accumulation, the smallest step within GAIN of it."""
        fitting = [trial for trial in self.trials.values() if trial.fits(self.space.usable_gib)]
        if not fitting:
            return None
        fastest = max(fitting, key=lambda trial: trial.tokens_per_s)
        equals = [
            trial
            for trial in fitting
            if with_accumulation(trial.setting, 1) == with_accumulation(fastest.setting, 1)
            and trial.tokens_per_s * (1 + GAIN) >= fastest.tokens_per_s
        ]
        return min(equals, key=lambda trial: trial.setting.gradient_accumulation_steps)

    def compare_layouts(self) -> None:
        for checkpointing in self.space.checkpointings:
            if checkpointing != "none" and not self.memory_is_short():
                self.notes.append(
                    f"{checkpointing} activation checkpointing was left out: without it a larger micro-batch "
                    f"gains less than {GAIN:.0%}, so there is nothing to buy with the memory it frees"
                )
                continue
            for parallelism in self.space.parallelisms:
                self.climb(parallelism, checkpointing)

    def memory_is_short(self) -> bool:
        """Whether the best setting so far is the largest its layout holds, and clearly faster than the one below."""
        best = self.best()
        if best is None:
            return True
        same = [trial for trial in self.trials.values() if layout_of(trial.setting) == layout_of(best.setting)]
        smaller = [t for t in same if t.setting.micro_batch_size < best.setting.micro_batch_size]
        larger = [t for t in same if t.setting.micro_batch_size > best.setting.micro_batch_size]
        if any(trial.fits(self.space.usable_gib) for trial in larger):
            return False
        if not smaller:
            return True
        below = max(smaller, key=lambda trial: trial.setting.micro_batch_size)
        return best.tokens_per_s > below.tokens_per_s * (1 + GAIN)

    def climb(self, parallelism: str, checkpointing: str) -> None:
        """Find the fastest micro-batch of one layout."""
        sizes = self.micro_batch_sizes()
        place = self.first_place(parallelism, checkpointing, sizes)

        def setting(place: int) -> Setting:
            accumulation = max(1, round(self.sequences / sizes[place]))
            return Setting(parallelism, checkpointing, sizes[place], accumulation)

        current = self.attempt(setting(place))
        may_rise = True
        while not current.fits(self.space.usable_gib) and place > 0:
            place, may_rise = place - 1, False
            current = self.attempt(setting(place))
        if not current.fits(self.space.usable_gib):
            return
        while may_rise and place + 1 < len(sizes) and self.should_fit(current, setting(place + 1)):
            above = self.attempt(setting(place + 1))
            may_rise = above.fits(self.space.usable_gib) and above.tokens_per_s > current.tokens_per_s * (1 + GAIN)
            if may_rise:
                place, current = place + 1, above
        while place > 0:
            below = self.attempt(setting(place - 1))
            if not below.tokens_per_s > current.tokens_per_s:
                return
            place, current = place - 1, below

    def micro_batch_sizes(self) -> list[int]:
        """Powers of two and those times 1.5; where the step is given, its divisors."""
        if self.space.sequences is not None:
            return [size for size in range(1, self.space.sequences + 1) if self.space.sequences % size == 0]
        powers = [2**exponent for exponent in range(LARGEST_MICRO_BATCH.bit_length())]
        between = [3 * power // 2 for power in powers[1:-1]]
        return sorted(powers + between)

    def first_place(self, parallelism: str, checkpointing: str, sizes: Sequence[int]) -> int:
        """The largest size that the estimate lets fit; the smallest where it lets none. Chooses the step's size."""
        allowed = [
            place
            for place, size in enumerate(sizes)
            if size <= self.space.start_at_most
            and self.estimate_gib(Setting(parallelism, checkpointing, size, 1)) <= self.space.usable_gib
        ]
        place = max(allowed, default=0)
        if not self.sequences:
            self.sequences = SEQUENCES_A_MICRO_BATCH * sizes[place]
        return place

    def should_fit(self, current: Trial, larger: Setting) -> bool:
        """By the estimate, corrected by what it got wrong about the smaller micro-batch."""
        measured, estimated = current.peak_memory_gib or 0.0, self.estimate_gib(current.setting)
        expected = measured * self.estimate_gib(larger) / estimated if estimated else measured
        return expected <= (1 + ESTIMATE_SLACK) * self.space.usable_gib

    def grow_step(self) -> None:
        """More micro-steps share one optimizer step and one reduction of gradients: double them while that gains."""
        best = self.best()
        if best is None or self.space.sequences is not None:
            return
        for doublings in itertools.count(1):
            accumulation = best.setting.gradient_accumulation_steps * 2
            if accumulation > LARGEST_ACCUMULATION:
                return
            larger = self.attempt(with_accumulation(best.setting, accumulation))
            if not larger.fits(self.space.usable_gib) or larger.tokens_per_s <= best.tokens_per_s * (1 + GAIN):
                self.notes.append(
                    f"accumulation {accumulation} gains less than {GAIN:.0%} over "
                    f"{best.setting.gradient_accumulation_steps}, after {doublings} doubling(s)"
                )
                return
            best = larger

    def attempt(self, setting: Setting) -> Trial:
        """Try once; a second time costs nothing. Raises BudgetSpent where the longest trial so far would not fit in."""
        if setting in self.trials:
            return self.trials[setting]
        longest = max((trial.seconds for trial in self.trials.values()), default=0.0)
        if self.trials and self.seconds_left() < longest:
            raise BudgetSpent
        self.trials[setting] = self.try_setting(setting)
        return self.trials[setting]


def layout_of(setting: Setting) -> tuple[str, str]:
    return setting.parallelism, setting.activation_checkpointing


def with_accumulation(setting: Setting, accumulation: int) -> Setting:
    return Setting(setting.parallelism, setting.activation_checkpointing, setting.micro_batch_size, accumulation)

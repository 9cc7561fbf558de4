"""The machine's own limits, measured hot: matmuls of the models' shapes, copies, attention, collectives.

Reading needs no torch; `measure_ceilings` and `main` import it when they are called.
"""

from __future__ import annotations

from collections.abc import Sequence

from mfubench.ceilings.schema import Ceilings, read_ceilings
from mfubench.config import ModelConfig

__all__ = ["Ceilings", "main", "measure_ceilings", "read_ceilings"]


def measure_ceilings(
    models: list[ModelConfig],
    seq_len: int,
    micro_batch_size: int,
    dtypes: list[str],
    device: str,
    seconds: float,
    world_sizes: list[int],
) -> Ceilings:
    """Measure this machine; see `mfubench.ceilings.measure.measure`."""
    from mfubench.ceilings.measure import measure

    return measure(
        models=models,
        seq_len=seq_len,
        micro_batch_size=micro_batch_size,
        dtypes=dtypes,
        device=device,
        seconds=seconds,
        world_sizes=world_sizes,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """`--request JSON --output FILE`: measure and write ceilings.json."""
    from mfubench.ceilings.measure import main as measure_main

    return measure_main(argv)

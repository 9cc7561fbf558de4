"""The machine's own limits, measured hot: matmuls of the models' shapes, copies, attention, collectives.

Reading them, which is what is offered here, needs no torch; `mfubench.ceilings.measure` measures.
"""

from mfubench.ceilings.schema import Ceilings, read_ceilings

__all__ = ["Ceilings", "read_ceilings"]

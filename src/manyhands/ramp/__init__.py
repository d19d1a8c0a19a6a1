"""Choose the size of each step's batch while training: as many micro-batches as pay.

_decision.py         arithmetic: the best number of passes, and the next one
_observed.py         how sure the noise is, and how long steps take
_micro_batches.py    the micro-batches of a step, kept ready or from a loader of whole steps
_ramp.py             `Ramp`: measures, decides, and hands out micro-batches
_memory_trial.py     `largest_micro_batch`: how many samples fit into a pass, found by trying
"""

from manyhands.ramp._memory_trial import largest_micro_batch
from manyhands.ramp._ramp import Ramp

__all__ = ["Ramp", "largest_micro_batch"]

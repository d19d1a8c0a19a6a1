"""Choose the batch size of each step during training.

_decision.py         arithmetic: the best and next number of passes
_observed.py         the error of the noise estimate, and step times
_micro_batches.py    the micro-batches of a step, from any loader or from a loader of complete steps
_ramp.py             `Ramp`: measures, decides, and hands out micro-batches
_memory_trial.py     `largest_micro_batch`: find the samples that fit into a pass by trial
"""

from manyhands.ramp._memory_trial import largest_micro_batch
from manyhands.ramp._ramp import Ramp

__all__ = ["Ramp", "largest_micro_batch"]

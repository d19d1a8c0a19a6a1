"""A batch that sets itself: as many micro-batches a step as pay, decided while training.

_decision.py         arithmetic: the best number of passes, and the next one
_step_times.py       how long steps take, and the clock of one rank
_evidence.py         how sure the noise is, and how far its averages look back
_micro_batches.py    the micro-batches of a step, kept ready or from a loader of whole steps
_mistakes.py         errors of arguments, and warnings of what a growing batch does to a script
_ramp.py             `Ramp`: measures, decides, and hands out micro-batches
_memory_trial.py     `largest_micro_batch`: how many samples fit into a pass, found by trying
_adaptive_loader.py  adaptdl's loop: `AdaptiveDataLoader`, `remaining_epochs_until`
"""

from manyhands.ramp._adaptive_loader import AdaptiveDataLoader, remaining_epochs_until
from manyhands.ramp._memory_trial import largest_micro_batch
from manyhands.ramp._ramp import Ramp

__all__ = ["AdaptiveDataLoader", "Ramp", "largest_micro_batch", "remaining_epochs_until"]

"""A batch that sets itself: as many micro-batches a step as pay, decided while training.

_goodput.py      arithmetic: the best number of passes, from noise and times
_step_times.py   the time of a step by its passes, fitted to the last steps
_evidence.py     how sure the averaged noise is
_decision.py     the next number of passes: a pure function
_ramp.py         `Ramp`: measures, decides, and hands out micro-batches
"""

from manyhands.ramp._ramp import Ramp

__all__ = ["Ramp"]

"""Provide adaptdl's names, arguments and defaults: a script changes only its imports.

>>> import manyhands.adaptdl as adl
>>> from manyhands.adaptdl import AdaptiveDataParallel, AdaScale

This module also contains the names of `adaptdl.torch.scaling_rules`.

_data_parallel.py    `AdaptiveDataParallel`: binds a rule to a module
_adaptive_loader.py  `AdaptiveDataLoader` and `remaining_epochs_until`
"""

from manyhands.adaptdl._adaptive_loader import AdaptiveDataLoader, remaining_epochs_until
from manyhands.adaptdl._data_parallel import AdaptiveDataParallel
from manyhands.scaling import ScalingRuleBase
from manyhands.scaling._rules import AdamScale, AdaScale, LEGWScale, LinearScale, SqrtScale

__all__ = [
    "AdaScale",
    "AdamScale",
    "AdaptiveDataLoader",
    "AdaptiveDataParallel",
    "LEGWScale",
    "LinearScale",
    "ScalingRuleBase",
    "SqrtScale",
    "remaining_epochs_until",
]

for _public in (AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until):
    _public.__module__ = __name__  # for tracebacks and help()

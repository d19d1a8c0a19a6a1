"""manyhands: train with more workers by changing a line.

`__all__` below is the whole public surface; `help(manyhands.AdaScale)` explains each name.
"""

from manyhands.checkpoint import Saving, load, save
from manyhands.planning import plan
from manyhands.record import Record, Run, read_record
from manyhands.scaling._adaptive import AdaptiveDataParallel
from manyhands.scaling._measure import NoiseScale
from manyhands.scaling._optimizer import ScalingRuleBase
from manyhands.scaling._progress import ProgressScheduler
from manyhands.scaling._scales import AdamScale, AdaScale, LEGWScale, LinearScale, SqrtScale
from manyhands.sharding._ddp import ShardedDataParallel
from manyhands.sharding._grad_scaler import ShardedGradScaler
from manyhands.sharding._oss import OSS

__version__ = "0.1.0"

__all__ = [
    "OSS",
    "AdaScale",
    "AdamScale",
    "AdaptiveDataParallel",
    "LEGWScale",
    "LinearScale",
    "NoiseScale",
    "ProgressScheduler",
    "Record",
    "Run",
    "Saving",
    "ScalingRuleBase",
    "ShardedDataParallel",
    "ShardedGradScaler",
    "SqrtScale",
    "load",
    "plan",
    "read_record",
    "save",
]

for _name in __all__:  # tracebacks and help() show manyhands.AdaScale
    globals()[_name].__module__ = __name__
del _name

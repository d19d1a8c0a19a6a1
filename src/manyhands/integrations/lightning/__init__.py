"""Use rules and `Ramp` (callbacks), sharding and blocks (strategies) in Lightning.

_trainer.py     what both ask a Trainer, check in it, and change in it while it fits
_callbacks.py   `Scaling`: a rule around the optimizer; `BatchRamp`: a batch that sets itself, too
_strategies.py  `OSSStrategy`, `ShardedDDPStrategy`, `FullyShardedStrategy`, `BlocksStrategy`
"""

from manyhands.integrations.lightning._callbacks import BatchRamp, Scaling
from manyhands.integrations.lightning._strategies import (
    BlocksStrategy,
    FullyShardedStrategy,
    OSSStrategy,
    ShardedDDPStrategy,
)

__all__ = [
    "BatchRamp",
    "BlocksStrategy",
    "FullyShardedStrategy",
    "OSSStrategy",
    "Scaling",
    "ShardedDDPStrategy",
]

for _name in __all__:  # tracebacks and help() show where a name is imported from
    globals()[_name].__module__ = __name__
del _name

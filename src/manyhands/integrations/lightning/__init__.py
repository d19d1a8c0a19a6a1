"""Callbacks for rules and `Ramp`, and strategies for sharding and blocks, in Lightning.

_trainer.py     common code: accumulation, checks and clipping
_callbacks.py   `Scaling`: a rule around the optimizer; `BatchRamp`: `Scaling` with a `Ramp`
_strategies.py  `ShardedDDPStrategy`, `FullyShardedStrategy`, `BlocksStrategy`
"""

from manyhands.integrations.lightning._callbacks import BatchRamp, Scaling
from manyhands.integrations.lightning._strategies import (
    BlocksStrategy,
    FullyShardedStrategy,
    ShardedDDPStrategy,
)

__all__ = [
    "BatchRamp",
    "BlocksStrategy",
    "FullyShardedStrategy",
    "Scaling",
    "ShardedDDPStrategy",
]

for _name in __all__:  # for tracebacks and help()
    globals()[_name].__module__ = __name__
del _name

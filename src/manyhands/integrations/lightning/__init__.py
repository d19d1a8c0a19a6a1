"""Lightning: callbacks for scaling rules and `Ramp`, strategies for sharding and blocks.

_passes.py      how many passes a step has
_checks.py      what cannot be right, found before the first step
_clipping.py    `gradient_clip_val` for sharded gradients, and for gradients that are still scaled
_scaling.py     `Scaling`: a scaling rule around the optimizer of `configure_optimizers`
_ramp.py        `BatchRamp`: the same, with a batch that sets itself
_strategies.py  `OSSStrategy`, `ShardedDDPStrategy`, `FullyShardedStrategy`, `BlocksStrategy`
"""

from manyhands.integrations.lightning._ramp import BatchRamp
from manyhands.integrations.lightning._scaling import Scaling
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

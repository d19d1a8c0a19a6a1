"""fairscale's names, with its arguments and defaults: change the import, and nothing else.

>>> from manyhands.fairscale import OSS, AdaScale, ShardedDataParallel, wrap

fairscale has them in several modules; here they are in one.
"""

from manyhands.scaling._rules import AdaScale, AdaScaleWrapper
from manyhands.sharding._gradients import ShardedGradScaler
from manyhands.sharding.fsdp._engine import TrainingState
from manyhands.sharding.fsdp._options import DummyProcessGroup
from manyhands.sharding.fsdp._wrapper import FullyShardedDataParallel
from manyhands.sharding.fsdp._wrapping import (
    auto_wrap,
    auto_wrap_bn,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    wrap,
)
from manyhands.sharding.zero._ddp import ShardedDataParallel
from manyhands.sharding.zero._oss import OSS

__all__ = [
    "OSS",
    "AdaScale",
    "AdaScaleWrapper",
    "DummyProcessGroup",
    "FullyShardedDataParallel",
    "ShardedDataParallel",
    "ShardedGradScaler",
    "TrainingState",
    "auto_wrap",
    "auto_wrap_bn",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "wrap",
]

for _public in (
    *(AdaScaleWrapper, DummyProcessGroup, TrainingState, auto_wrap, auto_wrap_bn, enable_wrap),
    *(config_auto_wrap_policy, default_auto_wrap_policy, wrap),
):
    _public.__module__ = __name__  # what tracebacks and help() show

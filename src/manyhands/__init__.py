"""manyhands: train with more workers by changing a line.

`__all__` below is the whole public surface; `help(manyhands.AdaScale)` explains each name.
"""

from manyhands._version import __version__ as __version__
from manyhands.blocks._methods import BMUF, DiLoCo, LocalSGD, SlowMo
from manyhands.blocks._optimizer import Blocks
from manyhands.blocks._outer import Outer
from manyhands.blocks._schedule import ByDrift, Every, Seconds
from manyhands.blocks.crew._crew import Crew
from manyhands.blocks.crew._torchft import TorchftCrew
from manyhands.checkpoint import Saving, load, save
from manyhands.data._cursor import Cursor
from manyhands.data._shards import DataShards
from manyhands.engines._job import Job, start
from manyhands.engines._stopping import stopping
from manyhands.planning import Plan, plan, shard
from manyhands.probe import ProbeResult, probe_batch
from manyhands.ramp import (
    AdaptiveDataLoader,
    Ramp,
    largest_micro_batch,
    remaining_epochs_until,
)
from manyhands.record import Record, Run, StepTiming, read_record
from manyhands.scaling._adaptdl import AdaptiveDataParallel
from manyhands.scaling._example_squares import Examples
from manyhands.scaling._examples import Coverage
from manyhands.scaling._noise import NoiseAverage
from manyhands.scaling._noise_scale import NoiseScale
from manyhands.scaling._progress import ProgressScheduler
from manyhands.scaling._rule_base import ScalingRuleBase
from manyhands.scaling._rules import (
    AdamScale,
    AdaScale,
    AdaScaleWrapper,
    LEGWScale,
    LinearScale,
    SqrtScale,
)
from manyhands.scaling._settings import Accumulation
from manyhands.scaling._weighted_mean import WeightedMean
from manyhands.sharding._grad_scaler import ShardedGradScaler
from manyhands.sharding.fsdp._engine import TrainingState
from manyhands.sharding.fsdp._options import DummyProcessGroup
from manyhands.sharding.fsdp._whole_tensors import WholeTensorOptimizer
from manyhands.sharding.fsdp._wrapper import FullyShardedDataParallel
from manyhands.sharding.wrapping._policies import config_auto_wrap_policy, default_auto_wrap_policy
from manyhands.sharding.wrapping._wrap import auto_wrap, auto_wrap_bn, enable_wrap, wrap
from manyhands.sharding.zero._ddp import ShardedDataParallel
from manyhands.sharding.zero._oss import OSS

FSDP = FullyShardedDataParallel

__all__ = [
    "BMUF",
    "FSDP",
    "OSS",
    "Accumulation",
    "AdaScale",
    "AdaScaleWrapper",
    "AdamScale",
    "AdaptiveDataLoader",
    "AdaptiveDataParallel",
    "Blocks",
    "ByDrift",
    "Coverage",
    "Crew",
    "Cursor",
    "DataShards",
    "DiLoCo",
    "DummyProcessGroup",
    "Every",
    "Examples",
    "FullyShardedDataParallel",
    "Job",
    "LEGWScale",
    "LinearScale",
    "LocalSGD",
    "NoiseAverage",
    "NoiseScale",
    "Outer",
    "Plan",
    "ProbeResult",
    "ProgressScheduler",
    "Ramp",
    "Record",
    "Run",
    "Saving",
    "ScalingRuleBase",
    "Seconds",
    "ShardedDataParallel",
    "ShardedGradScaler",
    "SlowMo",
    "SqrtScale",
    "StepTiming",
    "TorchftCrew",
    "TrainingState",
    "WeightedMean",
    "WholeTensorOptimizer",
    "auto_wrap",
    "auto_wrap_bn",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "largest_micro_batch",
    "load",
    "plan",
    "probe_batch",
    "read_record",
    "remaining_epochs_until",
    "save",
    "shard",
    "start",
    "stopping",
    "wrap",
]

for _name in __all__:  # tracebacks and help() show manyhands.AdaScale
    globals()[_name].__module__ = __name__
del _name

"""manyhands: train with more workers by changing a line.

`__all__` below are the names that training scripts use; `help(manyhands.AdaScale)` explains each.

- `manyhands.fairscale`, `manyhands.adaptdl`, `manyhands.fairseq`: the names of these libraries, for
  scripts that were written for them.
- `manyhands.scaling`, `manyhands.blocks`, `manyhands.record`: what a rule, an outer step or a
  reader of records of your own needs.
- `manyhands.errors`: the errors that a correct script can meet.
"""

from manyhands._core.dry_run import dry_run
from manyhands._version import __version__ as __version__
from manyhands.blocks._methods import BMUF, DiLoCo, LocalSGD, SlowMo
from manyhands.blocks._optimizer import Blocks
from manyhands.blocks._schedule import Seconds
from manyhands.blocks.crew._crew import Crew
from manyhands.checkpoint import load, save
from manyhands.data._cursor import Cursor
from manyhands.data._order import DataShards
from manyhands.engines._job import start
from manyhands.engines._stopping import stopping
from manyhands.planning import plan, shard
from manyhands.ramp import Ramp, largest_micro_batch
from manyhands.record import Record, StepTiming, read_record
from manyhands.scaling._noise_scale import NoiseScale
from manyhands.scaling._progress import ProgressScheduler
from manyhands.scaling._rules import (
    AdamScale,
    AdaScale,
    LEGWScale,
    LinearScale,
    SqrtScale,
)
from manyhands.scaling._weighted_mean import WeightedMean
from manyhands.sharding._gradients import ShardedGradScaler
from manyhands.sharding.fsdp._whole_tensors import WholeTensorOptimizer
from manyhands.sharding.fsdp._wrapper import FullyShardedDataParallel
from manyhands.sharding.zero._ddp import ShardedDataParallel
from manyhands.sharding.zero._oss import OSS
from manyhands.weights import load_weights, save_weights

FSDP = FullyShardedDataParallel

__all__ = [
    "BMUF",
    "FSDP",
    "OSS",
    "AdaScale",
    "AdamScale",
    "Blocks",
    "Crew",
    "Cursor",
    "DataShards",
    "DiLoCo",
    "FullyShardedDataParallel",
    "LEGWScale",
    "LinearScale",
    "LocalSGD",
    "NoiseScale",
    "ProgressScheduler",
    "Ramp",
    "Record",
    "Seconds",
    "ShardedDataParallel",
    "ShardedGradScaler",
    "SlowMo",
    "SqrtScale",
    "StepTiming",
    "WeightedMean",
    "WholeTensorOptimizer",
    "dry_run",
    "largest_micro_batch",
    "load",
    "load_weights",
    "plan",
    "read_record",
    "save",
    "save_weights",
    "shard",
    "start",
    "stopping",
]

for _name in __all__:  # tracebacks and help() show manyhands.AdaScale
    globals()[_name].__module__ = __name__
del _name

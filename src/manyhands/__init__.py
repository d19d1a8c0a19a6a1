"""manyhands: train with more workers by changing a few lines.

`__all__` below are the names that training scripts use; `help(manyhands.AdaScale)` explains each.
Import other modules by name:

- `manyhands.fairscale`, `manyhands.adaptdl`, `manyhands.fairseq`: the names of these libraries, for
  scripts that were written for them.
- `manyhands.scaling`, `manyhands.blocks`, `manyhands.tools.record`: what a rule, an outer step or a
  reader of records of your own needs.
- `manyhands.data`: the classes of which `Cursor` makes one.
- `manyhands.integrations`: for Accelerate, Lightning, transformers and Ray.
- `manyhands.errors`: the errors that a correct script can meet.
"""

import importlib
import typing

from manyhands._version import __version__ as __version__

if typing.TYPE_CHECKING:
    from manyhands._names import *

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

if not typing.TYPE_CHECKING:

    def __getattr__(name):
        """Import all names with the first that is used: `manyhands --help` runs without torch."""
        if name[0] != "_":
            names = importlib.import_module("manyhands._names")
            for each in __all__:
                found = getattr(names, each)
                globals()[each] = found
                found.__module__ = __name__  # tracebacks and help() show manyhands.AdaScale
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'manyhands' has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})

"""manyhands: scale an existing PyTorch training loop to more workers.

`__all__` lists the names for training scripts; `help(manyhands.AdaScale)` documents each. Other
modules are imported by name:

- `manyhands.fairscale`, `manyhands.adaptdl`, `manyhands.fairseq`: the names of these libraries, for
  scripts written for them.
- `manyhands.scaling`, `manyhands.blocks`, `manyhands.tools.record`: base classes for custom scaling
  rules and outer steps, and readers of records.
- `manyhands.data`: the classes behind `Cursor`.
- `manyhands.integrations`: adapters for Accelerate, Lightning, transformers and Ray.
- `manyhands.errors`: exceptions that a correct script may need to catch.
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
        """Import all public names at the first use: `manyhands --help` then runs without torch."""
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

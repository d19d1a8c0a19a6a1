"""Compute which sharding a model needs: bytes held and bytes sent, before anything is trained.

The files in the order in which a model becomes a plan:

    _plan.py          `plan`: the four ways, and the cheapest that fits
    _arguments.py     arguments → a module, its optimizers, a rule, a method of blocks
    _model.py         modules and optimizers → sizes; state, read off a stand-in; activations
    _sizes.py         a model in integers, and what a worker of it costs
    _costs.py         sizes → bytes per worker, bytes sent, collectives
    _bucket_costs.py  the same for gradients in buckets: DDP, OSS, ShardedDataParallel
    _fsdp_costs.py    the same for wraps: FSDP
    _line.py          bytes sent → seconds on a line, and which way to use over it
    _table.py         the plan as rows, as a table, in words and in code to paste; "24GiB" ↔ bytes
    _shard.py         `shard`: put a row of the plan into practice
"""

from manyhands.planning._plan import plan
from manyhands.planning._shard import shard
from manyhands.planning._table import Plan, Row

__all__ = ["Plan", "Row", "plan", "shard"]

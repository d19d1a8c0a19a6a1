"""Compute which sharding a model needs: bytes held and bytes sent, before anything is trained.

The files in the order in which a model becomes a plan:

    _plan.py    `plan`: the table, a row for each way to train, and the cheapest that fits
    _model.py   a module and its optimizers → sizes; state, read off a stand-in; activations
    _costs.py   sizes → bytes per worker, bytes sent, collectives
    _shard.py   `shard`: put a row of the plan into practice
"""

from manyhands.tools.plan._plan import Plan, Row, plan
from manyhands.tools.plan._shard import shard

__all__ = ["Plan", "Row", "plan", "shard"]

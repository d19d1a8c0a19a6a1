"""Predict the memory and communication of training a model, and shard the model accordingly.

The files in the order in which a model becomes a plan:

    _plan.py    `plan`: the table with a row per way to train, and the cheapest way that fits
    _model.py   a module and its optimizers → sizes, optimizer state and activations
    _costs.py   sizes → memory per worker, bytes sent, collectives
    _shard.py   `shard`: apply a row of the plan
"""

from manyhands.tools.plan._plan import Plan, Row, plan
from manyhands.tools.plan._shard import shard

__all__ = ["Plan", "Row", "plan", "shard"]

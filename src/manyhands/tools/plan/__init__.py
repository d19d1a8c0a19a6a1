"""Predict the memory and communication of training a model, and shard the model.

_plan.py    `plan`: compare the shardings of a model
_model.py   convert a module and its optimizers to sizes
_costs.py   compute memory, bytes sent and collectives from sizes
_order.py   compare the order of collectives between the ranks of a script
_shard.py   `shard`: shard a model and its optimizers
"""

from manyhands.tools.plan._plan import Plan, Row, plan
from manyhands.tools.plan._shard import shard

__all__ = ["Plan", "Row", "plan", "shard"]

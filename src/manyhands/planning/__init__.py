"""Compute which sharding a model needs: bytes held and bytes sent, before anything is trained.

A model's way to a plan
    _model.py   modules and optimizers → sizes; activations, on tensors without memory
    _state.py   bytes of optimizer state, read off a small stand-in
    _sizes.py   a model in integers
    _costs.py   sizes → bytes per worker, bytes sent, collectives (integers)
    _plan.py    the four ways, the code to paste for each, and the cheapest that fits
    _table.py   the plan as rows, as a table and in words; "24GiB" ↔ bytes
"""

from manyhands.planning._plan import plan
from manyhands.planning._table import Plan, Row

__all__ = ["Plan", "Row", "plan"]

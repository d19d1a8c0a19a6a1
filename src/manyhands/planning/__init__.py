"""Which sharding to take: bytes held and bytes sent, computed before anything is trained.

A model's way to a plan
    _model.py        modules and optimizers → sizes, and bytes of optimizer state per element
    _state.py        an optimizer's state, read off a small stand-in
    _activations.py  what a forward pass keeps for backward, run on tensors without memory
    _costs.py        sizes → bytes per worker, bytes sent, collectives (integers)
    _plan.py         the four ways side by side, and the cheapest that fits
    _sizes.py        "24GiB" ↔ bytes
"""

from manyhands.planning._plan import Plan, Row, plan

__all__ = ["Plan", "Row", "plan"]

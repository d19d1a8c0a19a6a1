"""Optimizer wrappers, optimizer state, and searches for the modules of a model.

optimizers.py    properties of optimizer classes: divisible parameters, size of the state
wrappers.py      optimizers that wrap optimizers, signals of a gradient scaler, torch's `Join`
several.py       a list of optimizers as a single optimizer
foreign.py       objects of other libraries, and our integrations
modules.py       the wrappers around a model, and parameter names
state_parts.py   the layers of an optimizer, and their state in parts, for checkpoints
"""

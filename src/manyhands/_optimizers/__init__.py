"""Wrap optimizers, describe their state, and find the modules around a model.

optimizers.py    what an optimizer is: may parameters be cut for it, which state does it keep?
wrappers.py      optimizers around optimizers, and what a gradient scaler leaves on them
several.py       several optimizers as one
foreign.py       objects of other libraries: our integration with theirs
modules.py       modules around a model, and the names in it
uneven.py        errors for ranks with unequal numbers of batches, inside torch's `Join`
state_parts.py   the layers of an optimizer, and their state in parts, for checkpoints
"""

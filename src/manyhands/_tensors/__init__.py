"""Work with tensors and autograd. This folder imports no other folder of manyhands.

backward.py       when a backward pass begins and ends
flat.py           tensors as flat ranges, and their norm; which part of a DTensor is on this rank
random_state.py   the random generators of this rank, saved and restored
trees.py          tensors in nested containers
"""

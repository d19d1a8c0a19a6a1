"""Operations on tensors and autograd. This folder imports no other folder of manyhands.

backward.py       the beginning and end of backward passes
flat.py           tensors as flat ranges, their norms, and this rank's part of a DTensor
profiler.py       named ranges in the traces of torch.profiler
random_state.py   saved and restored random generators
trees.py          tensors in nested containers
"""

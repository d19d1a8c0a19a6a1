"""What the parts share: collectives, memory, gradients and wrappers. Imports nothing above it.

ranks.py          the ranks of a process group: identity, numbers and text between them
slices.py         reduce_scatter and all_gather of the slices of a bucket
codec.py          flat values as few bytes, and back
encoded_slices.py  a reduce_scatter of codes, and the residuals of the senders
groups.py         process groups of our own, ended with their last user
shared_memory.py  the same collectives between ranks of one host, through shared memory
agreement.py      do all ranks have the same facts? If not, every rank raises
backward.py       when a backward pass begins and ends
flat.py           tensors as flat ranges of elements, and the norm of a tensor
sharded.py        DTensors: which part of a tensor is on this rank
local_norm.py     the norm of what ranks hold slices of, for torch's clipping
sharded_gradient.py  gradients of which each rank holds slices
wrappers.py       optimizers around optimizers, and what a gradient scaler leaves on them
modules.py        modules around a model, and the names in it
stop_notice.py    whether this process was asked to stop
state_parts.py    the layers of an optimizer, and their state in parts, for checkpoints
trees.py          tensors in nested containers
"""

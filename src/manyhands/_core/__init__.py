"""What the parts share: collectives, memory, gradients and wrappers. Imports nothing above it.

ranks.py          the ranks of a process group: identity, numbers and text between them
slices.py         reduce_scatter and all_gather of the slices of a bucket; through shared memory
groups.py         process groups of our own, ended with their last user
sockets.py        find the sockets that torch and gloo have opened in this process
presence.py       which ranks have ended, or wait elsewhere; explain the error of a lost connection
standstill.py     does a thread stand still, and where?
dry_run.py        one rank of many, whose others do not exist: count what it sends
arguments.py      check numbers, flags, words and sizes ("24 GiB") that users pass
agreement.py      all ranks agree, or all raise
optimizers.py     what an optimizer is: may parameters be cut for it, which state does it keep?
backward.py       when a backward pass begins and ends
flat.py           tensors as flat ranges, and their norm; which part of a DTensor is on this rank
sharded_gradient.py  gradients of which each rank holds slices, and their norm
wrappers.py       optimizers around optimizers, and what a gradient scaler leaves on them
several.py        several optimizers as one
foreign.py        objects of other libraries: our integration with theirs
modules.py        modules around a model, and the names in it
uneven.py         errors for ranks with unequal numbers of batches, inside torch's `Join`
stop_notice.py    whether this process was asked to stop
state_parts.py    the layers of an optimizer, and their state in parts, for checkpoints
tensor_parts.py  the slices of tensors on this rank, and where slices are stored
random_state.py   the random generators of this rank, saved and restored
trees.py          tensors in nested containers
warn.py           warnings that name the user's line
"""

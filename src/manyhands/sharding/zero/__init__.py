"""ZeRO: each of N ranks stores 1/N of optimizer state and gradients.

In reading order:

_layout.py           integers: the owner of each element
_flat_params.py      tensors: parameters as views of flat memory, cut into slices; a step on slices
_ddp.py              the module around the model: buffers and `no_sync`
_reducer.py          backward: gradients into buckets, buckets to owners
_oss.py              the public optimizer: a step on this rank's slices, then an all_gather
_state.py            conversion between the state of slices and the plain optimizer's state dict
"""

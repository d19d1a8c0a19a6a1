"""ZeRO: every rank keeps 1/N of the optimizer's state, and of the gradients.

In the order in which a parameter meets them:

_layout.py           integers: which rank owns which elements of which bucket
_flat_params.py      tensors: parameters as views of flat memory, and this rank's slices of them
_slice_optimizer.py  the optimizer that the user asked for: may parameters be cut; steps on slices
_ddp.py              the module around the model: buffers and `no_sync`
_reducer.py          backward: gradients into buckets, buckets to their owners
_oss.py              the optimizer that users see: a step on this rank's slices, then an all_gather
_state.py            its state, between slices and the plain optimizer's dict
"""

"""Sharded parameters: FullyShardedDataParallel, based on torch's `fully_shard`.

_options.py          ranks and device from the options
_wrapper.py          FullyShardedDataParallel: the methods for a training loop
_transparent.py      the wrapped module's attributes, parameter names and state dicts
_wrapping.py         the choice of submodules to wrap
_places.py           devices of a wrap's parameters, and checks; casts on a single rank
_engine.py           sharding of a wrap; the only file that calls `fully_shard`
_root.py             state of all wraps: prefetch order, used parameters
_collectives.py      all_gather and reduce_scatter on gloo
_gradient.py         the DTensor in `param.grad`, with a cheap norm
_whole_tensors.py    optimizers that need unsharded tensors: Muon, Shampoo, LAMB
"""

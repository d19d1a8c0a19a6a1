"""Sharded parameters: FullyShardedDataParallel, on torch's `fully_shard`.

_options.py          the ranks and the device that options stand for
_wrapper.py          FullyShardedDataParallel: the methods for a training loop
_transparent.py      a wrap in place of the module inside: attributes, names, state dicts
_wrapping.py         which submodules of a model to wrap
_places.py           where a wrap's parameters are, and checks of them; casts on one rank
_engine.py           shard one wrap; the only file that calls `fully_shard`
_root.py             the state of all wraps: the next to gather, and the parameters used
_collectives.py      all_gather and reduce_scatter on gloo
_gradient.py         the DTensor in `param.grad`, with a cheap norm
_whole_tensors.py    an optimizer that steps whole tensors, each on one rank: Muon, Shampoo, LAMB
"""

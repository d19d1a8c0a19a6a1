"""Sharded parameters: FullyShardedDataParallel, on torch's `fully_shard`.

_options.py          the options, named once, and what follows from them
_places.py           where a wrap's parameters are
_checks.py           checks of modules, parameters, groups and agreement between ranks
_wrapper.py          FullyShardedDataParallel: the documented names
_root.py             what all wraps of a model do together; which wrap is gathered next
_engine.py           shard one wrap; the only file that calls `fully_shard`
_outputs.py          show the engine the tensors of inputs and outputs
_collectives.py      all_gather and reduce_scatter on gloo
_used_params.py      which parameters got a gradient, on this rank and on any
_gradient.py         the DTensor in `param.grad`, with a cheap norm
_optimizer_guard.py  refuse optimizers that cannot train sharded parameters
_full_tensors.py     from slices to full tensors and back
_state_dicts.py      the plain model's state dict, saved and loaded
_training_state.py   what a wrap is doing
_transparent.py      a wrapper that can be used in place of its module
_single_rank.py      one rank, without an engine
"""

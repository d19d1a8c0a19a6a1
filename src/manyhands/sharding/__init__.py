"""Sharding: each of N ranks keeps 1/N of optimizer state, gradients and parameters.

zero/            optimizer state (`OSS`) and gradients (`ShardedDataParallel`)
fsdp/            parameters too (`FullyShardedDataParallel`)
_agreement.py    what ranks must have in common to shard a model, and waiting for all of them
_divided.py      the step of an optimizer whose tensors are divided among ranks
_gradients.py    clip sharded gradients; loss scaling: an overflow on one rank skips the step on all
"""

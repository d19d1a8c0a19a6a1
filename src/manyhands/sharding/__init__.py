"""Sharding: each of N ranks keeps 1/N of optimizer state, gradients and parameters.

zero/            optimizer state (`OSS`) and gradients (`ShardedDataParallel`)
fsdp/            parameters too (`FullyShardedDataParallel`)
wrapping/        which submodules of a model to wrap
_agreement.py    what ranks must have in common to shard a model, and waiting for all of them
_clip.py         the norm of sharded gradients, and their clipping
_grad_scaler.py  loss scaling: an overflow on one rank skips the step on all
"""

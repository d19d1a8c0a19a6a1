"""Sharding: each of N ranks keeps 1/N of optimizer state, gradients and parameters.

zero/            optimizer state (`OSS`) and gradients (`ShardedDataParallel`)
fsdp/            parameters too (`FullyShardedDataParallel`)
wrapping/        which submodules of a model to wrap
_agreement.py    do all ranks have the same parameters and options? If not, every rank raises
_clip.py         the norm of sharded gradients, and their clipping
_grad_scaler.py  loss scaling: an overflow on one rank skips the step on all
"""

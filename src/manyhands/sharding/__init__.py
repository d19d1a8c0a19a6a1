"""Sharding: each of N ranks keeps 1/N of optimizer state, gradients and parameters.

zero/            optimizer state (`OSS`) and gradients (`ShardedDataParallel`)
fsdp/            parameters too (`FullyShardedDataParallel`)
_agreement.py    facts that ranks must share to shard a model; waiting for all ranks
_divided.py      the step of an optimizer whose tensors are divided among ranks
_gradients.py    clip sharded gradients; loss scaling: an overflow on one rank skips the step on all
"""

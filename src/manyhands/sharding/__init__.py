"""Sharding: each of N ranks stores 1/N of optimizer state, gradients and parameters.

zero/            optimizer state (`OSS`) and gradients (`ShardedDataParallel`)
fsdp/            parameters as well (`FullyShardedDataParallel`)
_agreement.py    facts that ranks compare before sharding a model; waiting for all ranks
_divided.py      the step of an optimizer that divides tensors among ranks
_gradients.py    gradient clipping and loss scaling for sharded gradients
"""

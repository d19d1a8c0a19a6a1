"""Tensors as flat runs of their elements, in the order in which these lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def shaped(flat: Tensor, like: Tensor) -> Tensor:
    """These elements as a tensor of `like`'s shape, in its order of memory if it is dense."""
    if like.is_contiguous() or not _dense(like):
        return flat.view(like.shape)
    return flat.as_strided(like.size(), like.stride())


def flattened(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements in the order in which `shaped(..., like)` has them; a view if it can be."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if like.is_contiguous() or not _dense(like):
        return tensor.reshape(-1)
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(
            like.size(), like.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def order_of_dims(like: Tensor) -> list[int]:
    """The dimensions, from the slowest to the fastest, as `flattened(..., like)` goes through."""
    if like.is_contiguous() or not _dense(like):
        return list(range(like.dim()))
    return sorted(range(like.dim()), key=like.stride, reverse=True)


def _dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps."""
    expected = 1
    for size, stride in sorted(
        zip(tensor.size(), tensor.stride(), strict=True), key=lambda dim: dim[1]
    ):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True

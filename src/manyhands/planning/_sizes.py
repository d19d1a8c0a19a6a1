"""A model in integers, and what one worker of it costs.

All that is known of a model here are sizes, so costs can be computed, and tested, for any model
that somebody makes up.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from manyhands._core.codec import Codec
from manyhands._core.encoded_slices import message_size, residual_size

MIB = 2**20


@dataclass(frozen=True)
class ParamSize:
    """A parameter's size, and the size of its optimizer state.

    Each shard of the parameter has `state_fixed` bytes of state, and `state_per_element` bytes for
    each of its elements.
    """

    elements: int
    itemsize: int
    kind: Hashable = "float32"  # dtype and device; only parameters of one kind share a bucket
    trained: bool = True
    state_fixed: int = 0
    state_per_element: int = 0
    rows: int = 1  # the first dimension, along which FSDP shards
    real: bool = True  # complex gradients are not encoded

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize

    def state_bytes(self, elements: int) -> int:
        return self.state_fixed + self.state_per_element * elements

    def shard_elements(self, workers: int) -> int:
        """Elements of FSDP's largest shard, to which all other shards are padded."""
        return -(-self.rows // workers) * (self.elements // max(1, self.rows))


@dataclass(frozen=True)
class OptimizerParams:
    """The parameters of one optimizer, and whether it updates each element by itself.

    Of those that do not, and some others, the ranks of FSDP own tensors whole to step them.
    """

    params: tuple[ParamSize, ...]
    elementwise: bool = True
    owned_whole: bool = False

    @property
    def trained(self) -> list[ParamSize]:
        return [param for param in self.params if param.trained and param.elements]


@dataclass(frozen=True)
class WrapParams:
    """The parameters of one FSDP wrap, and the number of the wrap around it."""

    params: tuple[ParamSize, ...]
    outer: int | None = None


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model: the parameters of its optimizers, all others, and its buffers."""

    optimizers: tuple[OptimizerParams, ...]
    others: tuple[ParamSize, ...] = ()
    wraps: tuple[WrapParams, ...] = ()  # in the order in which a forward pass finishes them
    buffers: int = 0  # bytes
    buffer_messages: int = 0  # broadcasts of buffers from rank 0 before each forward

    @property
    def trained(self) -> list[ParamSize]:
        return [param for optimizer in self.optimizers for param in optimizer.trained]

    @property
    def parameter_bytes(self) -> int:
        optimized = sum(param.bytes for one in self.optimizers for param in one.params)
        return optimized + sum(param.bytes for param in self.others)

    @property
    def gradient_bytes(self) -> int:
        return sum(param.bytes for param in self.trained)

    @property
    def state_bytes(self) -> int:
        return sum(param.state_bytes(param.elements) for param in self.trained)


@dataclass(frozen=True)
class Cost:
    """Bytes that one worker holds, and its bytes and collectives in one step."""

    parameters: int
    gradients: int
    optimizer: int
    in_flight: int
    sent: int
    collectives: int
    replicas: int = 0  # of the second moments, for AdamScale
    blocks: int = 0  # the anchor and the outer step's memories
    residuals: int = 0  # what a codec of the gradients has left out


@dataclass(frozen=True)
class SliceBytes:
    """How a slice of gradients travels to its owner."""

    message: int  # bytes on the way
    residual: int  # bytes that its sender keeps

    @staticmethod
    def of(elements: int, itemsize: int, codec: Codec | None) -> SliceBytes:
        if codec is None:
            return SliceBytes(elements * itemsize, 0)
        dtype = summed_in(itemsize)
        message = message_size(codec, elements, dtype)
        return SliceBytes(message, residual_size(codec, elements, dtype))


def summed_in(itemsize: int) -> torch.dtype:
    """Return the type in which real numbers of so many bytes are summed."""
    return torch.float64 if itemsize > 4 else torch.float32


def sent_per_worker(size: int, workers: int) -> int:
    """Return the bytes each worker sends in one all-gather or reduce-scatter of `size` bytes."""
    return round(size * (workers - 1) / workers)

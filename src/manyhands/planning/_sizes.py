"""A model in integers: all that `_costs.py` has to know of it.

No tensors and no modules here, so costs can be computed, and tested, for any made-up model.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


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
    """The parameters of one optimizer, and whether it updates each element by itself."""

    params: tuple[ParamSize, ...]
    elementwise: bool = True

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

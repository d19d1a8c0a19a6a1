"""Replace tensors by tensors without memory, for dry runs of models larger than memory.

    fake   results of factories such as `torch.empty`, and of operations with a fake tensor
    real   tensors of Python or NumPy values, small integer tensors, and results computed from these

Messages, step counts, seeds and positions of data loaders are therefore real. If this library reads
a fake value, such as a gradient norm, the number is 0. If the script or a block reads one, an error
follows: the schedule of a block depends on values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp._fully_shard import _fsdp_param

from manyhands._warn import is_passed_over, user_line

LARGEST = 2**24  # bytes of real tensors from factories: flags, seeds, orders, tokens
FUNCTIONAL = {  # names of torch's functions, and of `DryRun.calls`
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
# Words of torch's errors outside of operations.
NO_MEMORY = ("FakeTensor", "not supported for tensor subclasses")


class PartlyFakeMode(FakeTensorMode):
    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        is_factory = not types and not _has_tensor(args) and not _has_tensor(named.values())
        if not types and not is_factory:
            return func(*args, **named)
        if types:
            _check_no_real_parameters(args)
        try:
            made: Any = super().__torch_dispatch__(func, types, args, named)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if func is torch.ops.aten._local_scalar_dense.default and _library_reads():
                dtype = args[0].dtype
                return dtype == torch.bool or torch.zeros((), dtype=dtype).item()
            raise RuntimeError(_no_value(user_line(sys._getframe()))) from error
        if func.namespace == "_c10d_functional":
            _record(func.overloadpacket.__name__, args, made)
        if is_factory and isinstance(made, FakeTensor) and _is_small_integer(made):
            return func(*args, **named)
        return made


@contextmanager
def fake_tensors() -> Iterator[None]:
    module: Any = _fsdp_param
    chunk = module._chunk_with_empty
    # torch makes a view per rank, and uses two: at 8,192 ranks, minutes for a large model.
    module._chunk_with_empty = _FewChunks
    try:
        with PartlyFakeMode():
            yield
    except (RuntimeError, TypeError) as error:
        if not any(words in str(error) for words in NO_MEMORY):
            raise
        raise RuntimeError(_no_value(f"the script ({error})")) from error
    finally:
        module._chunk_with_empty = chunk


class _FewChunks:
    """The chunks of a tensor, created when read."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self.tensor = tensor
        self.dim = dim
        self.length = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, rank: int) -> Tensor:
        start = rank * self.length
        length = min(self.length, self.tensor.size(self.dim) - start)
        if length <= 0:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, length)


def _record(name: str, args: Sequence[Any], made: Any) -> None:
    """Record a collective of DTensor, which torch does not pass to the group of fake tensors."""
    for words, counted in FUNCTIONAL.items():
        if name.startswith(words):
            tensors = made if counted == "all_gather" else args[0]
            group: Any = _resolve_process_group(args[-1])
            group._done(counted, tensors, (2 if counted == "all_reduce" else 1) * group.others)


def _check_no_real_parameters(args: Sequence[Any]) -> None:
    for arg in args:
        if type(arg) is nn.Parameter:
            raise RuntimeError(
                f"the parameter of shape {tuple(arg.shape)} has memory. Create the model inside of "
                "dry_run(fake=True), and parameters with functions such as torch.empty."
            )


def _no_value(reader: str) -> str:
    return (
        f"{reader} reads the value of a tensor, and tensors of dry_run(fake=True) have no values. "
        "Leave the line out of the dry run, or use fake=False."
    )


def _library_reads() -> bool:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and name.partition(".")[0] == "manyhands":
            return not name.startswith("manyhands.blocks")
        if not is_passed_over(frame):
            return False
        frame = frame.f_back
    return False


def _has_tensor(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, Tensor):
            return True
        if isinstance(value, list | tuple) and _has_tensor(value):
            return True
    return False


def _is_small_integer(made: FakeTensor) -> bool:
    integer = not made.dtype.is_floating_point and not made.dtype.is_complex
    return made.device.type == "cpu" and integer and made.nbytes <= LARGEST

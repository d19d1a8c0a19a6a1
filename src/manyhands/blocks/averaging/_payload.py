"""Contributions to a sync round, and results.

Work             steps and samples of a worker
WorkerReport     a few numbers about a worker, sent with the chunks
RoundResult      all reports and squared lengths; equal on all workers
Payload          tensors of a type from a worker, read and written in ranges
TensorPayload    buffers, optimizer state or gradients, averaged in place
SnapshotPayload  a copy of a `TensorPayload`, later overwritten with the mean
Extras           buffers and optimizer state, averaged or reset

The mean excludes workers with non-finite values. A finite norm proves that all values are finite,
and reads the memory once. If the norm overflows (in float32 the square of 3e19 is infinite), the
maximum absolute value decides.

Each tensor has a *key*, equal on all workers and across restarts: the index of a buffer in the
model, or the index of a parameter with the name of its state. The mean is written to the current
tensors with these keys, because tensors may be replaced during a round.
"""

from __future__ import annotations

import copy
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._optimizers.modules import modules_holding
from manyhands._optimizers.wrappers import params_of, unwrap
from manyhands._tensors.flat import (
    FlatTensors,
    accumulation_dtype,
    group_by_type,
    local_shard,
    norm,
)
from manyhands.blocks.averaging._codec import CODECS, Codec

STATE_OPTIONS = ("keep", "average", "reset", "average_moments")
MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam; fairseq's `average_sync` averages them

MAX_CHUNK = 1 << 20  # elements; 4 MiB of float32 fit in the cache

# Values of `WorkerReport.status` other than 1.
NOT_FINITE = 0.0  # excluded and reported
NO_CONTRIBUTION = -1.0  # excluded, because the worker has just joined

# Values of `WorkerReport.samples` below 0: the samples of no step, or only of some, are known.
SAMPLES_UNKNOWN = -1.0
SAMPLES_INCOMPLETE = -2.0


class Work(NamedTuple):
    steps: int = 0
    counted: int = 0  # steps with a known number of samples
    samples: int = 0  # of the counted steps

    def plus(self, samples: int | None) -> Work:
        if samples is None:
            return self._replace(steps=self.steps + 1)
        return Work(self.steps + 1, self.counted + 1, self.samples + samples)

    def minus(self, other: Work) -> Work:
        return Work(
            self.steps - other.steps, self.counted - other.counted, self.samples - other.samples
        )


NO_WORK = Work()


class WorkerReport(NamedTuple):
    """Numbers about a worker, sent as float64 in the message with the values."""

    step: float = 0.0  # must be equal on all workers
    status: float = 1.0  # 1: in the mean; NOT_FINITE or NO_CONTRIBUTION: excluded
    options: float = 0.0  # a checksum; must be equal on all workers
    state_elements: float = 0.0  # averaged only if above 0 on every worker
    seconds: float = 0.0  # per step on this worker
    lr: float = 0.0
    length: float = 0.0  # of the next block; the first worker's applies to all
    drawn: float = 0.0  # samples from a `Cursor` since the last completed round
    stop: float = 0.0  # 1 after a stop notice (`_ranks/stop_notice.py`)
    taken: float = 0.0  # this worker's steps in these values
    samples: float = SAMPLES_UNKNOWN  # of these steps
    weight: float = 1.0  # in the mean; above 0

    @property
    def included(self) -> bool:
        return self.status > 0

    @property
    def work(self) -> Work:
        steps = int(self.taken)
        if self.samples < 0.0:
            return Work(steps)
        return Work(steps, steps, int(self.samples))

    def with_work(self, work: Work) -> WorkerReport:
        samples = SAMPLES_UNKNOWN
        if work.counted == work.steps > 0:
            samples = float(work.samples)
        elif work.counted:
            samples = SAMPLES_INCOMPLETE
        return self._replace(taken=float(work.steps), samples=samples)


# Numbers sent with a chunk: a report, and squared lengths of the values as sent and unrounded.
REPORT = len(WorkerReport._fields) + 2


class Payload:
    """Tensors of a common type and device, as a flat sequence of `length` elements."""

    length: int
    dtype: torch.dtype
    device: torch.device
    codec: Codec = CODECS["float32"]
    residual: Tensor | None = None  # (length,): accumulated rounding error
    first_only = False  # broadcast the first worker's values instead of averaging
    measured = False  # whether the drift includes this payload

    def read(self, start: int, out: Tensor) -> None:
        raise NotImplementedError

    def write(self, start: int, mean: Tensor, result: RoundResult) -> None:
        """Store the mean of the elements from `start`, which are not read again.

        The caller reuses `mean`. `result.reports` is complete, but squared lengths are not.
        """
        raise NotImplementedError


def fingerprint(options: object) -> float:
    """Return a checksum as a float, which all collectives transfer exactly."""
    return float(zlib.crc32(repr(options).encode()))


@dataclass
class RoundResult:
    """The result of a sync round, bitwise equal on all workers."""

    reports: list[WorkerReport] = field(default_factory=list)  # by rank
    # Squared lengths of the differences:
    squares: list[float] = field(default_factory=list)  # by rank, as sent; 0 if not finite
    exact_squares: list[float] = field(default_factory=list)  # by rank, before rounding
    square_of_mean: float = 0.0

    @property
    def included(self) -> list[int]:
        return [rank for rank, report in enumerate(self.reports) if report.included]

    def weights(self, ranks: Sequence[int]) -> list[float]:
        weights = [self.reports[rank].weight for rank in ranks]
        return [1.0] * len(weights) if len(set(weights)) == 1 else weights

    @property
    def first_report(self) -> WorkerReport:
        """The first included rank's report, which decides learning rate and block length."""
        return self.reports[(self.included or [0])[0]]

    @property
    def averages_state(self) -> bool:
        return min(report.state_elements for report in self.reports) > 0


def are_finite(tensors: Sequence[Tensor]) -> bool:
    for same in group_by_type([local_shard(tensor).detach() for tensor in tensors]):
        if same[0].is_complex():
            same = list(map(torch.view_as_real, same))
        # A fused kernel, with a single device synchronization.
        lengths = torch._foreach_norm(same, dtype=accumulation_dtype(same[0].dtype))
        if torch.stack(lengths).isfinite().all():
            continue
        for tensor, length in zip(same, lengths, strict=True):
            if not length.isfinite() and not _has_finite_maximum(tensor):
                return False
    return True


def _has_finite_maximum(values: Tensor) -> bool:
    # Unlike `isfinite()`, this allocates no tensor of this size.
    return bool(torch.linalg.vector_norm(values, float("inf")).isfinite())


def is_payload_finite(payload: Payload) -> bool:
    memory = torch.empty(min(MAX_CHUNK, payload.length), dtype=payload.dtype, device=payload.device)
    for start in range(0, payload.length, MAX_CHUNK):
        chunk = memory[: payload.length - start]
        payload.read(start, chunk)
        if not torch.isfinite(norm(chunk)) and not _has_finite_maximum(chunk):
            return False
    return True


# -- tensors averaged in place ---------------------------------------------------------------------


class TensorPayload(Payload):
    def __init__(self, tensors: Mapping[str, Tensor], first_only: bool = False) -> None:
        first = local_shard(next(iter(tensors.values())))
        self.tensors = tensors
        self._vector = FlatTensors(list(tensors.values()))
        self.length = len(self._vector)
        self.device = first.device
        self.dtype = accumulation_dtype(first.real.dtype)  # 16-bit tensors are summed in float32
        self.first_only = first_only

    def snapshot(self) -> SnapshotPayload:
        copied = torch.empty(self.length, dtype=self.dtype, device=self.device)
        self.read(0, copied)
        sizes = [stop - start for start, stop in self._vector.spans]
        return SnapshotPayload(self.tensors, sizes, copied, self.first_only)

    def read(self, start: int, out: Tensor) -> None:
        self._vector.read(start, out)

    def write(self, start: int, mean: Tensor, result: RoundResult) -> None:
        if result.included:
            self._vector.write(start, mean)


class SnapshotPayload(Payload):
    """A copy of a `TensorPayload`, overwritten with the mean. `copy_to` writes the mean back.

    Used if the tensors change during the round (overlap), or if the round may be undone (crew).
    """

    def __init__(
        self, keys: Iterable[str], sizes: Sequence[int], values: Tensor, first_only: bool = False
    ) -> None:
        self.keys = list(keys)
        self.sizes = list(sizes)
        self.values = values  # flat, of sum(sizes) elements
        self.length = values.numel()
        self.dtype = values.dtype
        self.device = values.device
        self.first_only = first_only

    def read(self, start: int, out: Tensor) -> None:
        out.copy_(self.values[start : start + out.numel()])

    def write(self, start: int, mean: Tensor, result: RoundResult) -> None:
        self.values[start : start + mean.numel()].copy_(mean)

    def copy_to(self, result: RoundResult, tensors: Mapping[str, Tensor]) -> None:
        if not result.included:
            return
        for key, mean in zip(self.keys, self.values.split(self.sizes), strict=True):
            if key not in tensors:
                continue
            vector = FlatTensors([tensors[key]])
            if len(vector) == len(mean):
                vector.write(0, mean)


def make_payloads(tensors: Mapping[str, Tensor], first_only: bool = False) -> list[TensorPayload]:
    groups: dict[object, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            groups.setdefault((tensor.dtype, tensor.device), {})[key] = tensor
    return [TensorPayload(group, first_only) for group in groups.values()]


def by_index(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(number): tensor for number, tensor in enumerate(tensors)}


def trainable_params(optimizer: Optimizer) -> list[Tensor]:
    return [param for param in params_of(optimizer.param_groups) if param.requires_grad]


# -- averaged or reset at the end of a block ------------------------------------------------------


def state_tensors(optimizer: Optimizer, only: Sequence[str] | None = None) -> dict[str, Tensor]:
    found = {}
    for number, param in enumerate(params_of(optimizer.param_groups)):
        if not param.requires_grad:
            continue
        for name, value in sorted(optimizer.state.get(param, {}).items()):
            if only is not None and name not in only:
                continue
            if isinstance(value, Tensor) and value.shape == param.shape:
                found[f"{number}.{name}"] = value
    return found


def drop_nonfinite_state(optimizer: Optimizer) -> bool:
    dropped = False
    for param, state in list(optimizer.state.items()):
        if not isinstance(param, Tensor):
            continue
        numbers = []
        for value in state.values():
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                numbers.append(value)
        if not are_finite(numbers):
            del optimizer.state[param]
            dropped = True
    return dropped


class Extras:
    """Buffers and optimizer state, averaged or reset at the end of a block.

    `buffers` and `state` are options of `Blocks`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None,
        buffers: str,
        state: str,
        resets_after_warmup: bool,
    ) -> None:
        self.optimizer = optimizer
        if model is None:
            modules = _find_modules(params_of(optimizer.param_groups))
        else:
            modules = [model]
        # Weak references, because an optimizer must not extend the model's lifetime.
        self._modules = [weakref.ref(module) for module in modules]
        self.buffers = buffers
        self.state = state
        # The state before the first step, which `reset_state` restores (Adagrad has some).
        self.initial_state: dict[Any, Any] = {}
        inner = self._innermost
        if (resets_after_warmup or state == "reset") and inner.state:
            self.initial_state = copy.deepcopy(inner.state_dict()["state"])

    @property
    def modules(self) -> list[nn.Module]:
        found = []
        for reference in self._modules:
            module = reference()
            if module is not None:
                found.append(module)
        return found

    def buffer_tensors(self) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        if self.buffers != "keep":
            for module in self.modules:
                for buffer in module.buffers():
                    found[id(buffer)] = buffer
        return list(found.values())

    def buffer_payloads(self) -> list[TensorPayload]:
        return make_payloads(by_index(self.buffer_tensors()), self.buffers == "broadcast")

    @property
    def averages_state(self) -> bool:
        return self.state not in ("keep", "reset")

    def state_payloads(self) -> list[TensorPayload]:
        if not self.averages_state:
            return []
        only = MOMENTS if self.state == "average_moments" else None
        return make_payloads(state_tensors(self.optimizer, only))

    @property
    def _innermost(self) -> Optimizer:
        # Scaling rules around this optimizer preserve their statistics.
        return unwrap(self.optimizer)[-1]

    def reset_state(self) -> None:
        """Reset the inner optimizer's state, but not options such as `lr`."""
        inner = self._innermost
        inner.state.clear()
        if self.initial_state:
            now = inner.state_dict()
            inner.load_state_dict({**now, "state": copy.deepcopy(self.initial_state)})


def _find_modules(params: Sequence[Tensor]) -> list[nn.Module]:
    """Return the smallest module with all parameters, or the outermost modules with some."""
    candidates = list(modules_holding(params))
    complete = [module for module, found in candidates if len(found) == len(set(map(id, params)))]
    if complete:
        return [min(complete, key=lambda module: len(list(module.modules())))]
    children: set[int] = set()
    for module, _ in candidates:
        children.update(map(id, module.children()))
    roots = [(module, found) for module, found in candidates if id(module) not in children]
    # The collector's order differs between workers, but the parameters' order does not.
    roots.sort(key=lambda pair: min(pair[1]))
    return [module for module, _ in roots]

"""Describe the contributions of a worker to a sync round, and the result of the round.

Work             steps and samples of a worker: its weight in the mean
WorkerReport     a few numbers about the worker itself, sent with every chunk
RoundResult      all workers' reports and the squared lengths; equal on all workers
Payload          tensors of one type that a worker contributes, read and written in ranges
TensorPayload    tensors that are averaged as they are: buffers, optimizer state, gradients
SnapshotPayload  a copy of a `TensorPayload`, and later the mean
Extras           the model's buffers and the optimizer state, to be averaged or reset

Parameters come as differences from the anchor; those payloads are in `blocks/_anchor.py`.

A worker whose numbers are not all finite is left out of the mean. A norm reads the memory once, and
it is finite only if all numbers are. The reverse does not hold: in float32 the square of 3e19 is
infinite, and 3e19 is not. So where a norm is not finite, the largest absolute value decides.

Each tensor has a *key* that is equal on all workers and in a later run: the index of a buffer in
its model, or the index of a parameter and the name of its state. With an overlap the mean arrives
while training goes on. It is then written to the tensors that have these keys by that time: they
may have been replaced meanwhile, or belong to a run that was resumed from a checkpoint.
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
from manyhands._optimizers.wrappers import unwrap
from manyhands._tensors.flat import (
    FlatTensors,
    accumulation_dtype,
    group_by_type,
    local_shard,
    norm,
)
from manyhands.blocks.averaging._codec import CODECS, Codec

STATES = ("keep", "average", "reset", "average_moments")
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's: what fairseq's `average_sync` averages

LARGEST = 1 << 20  # elements in one chunk at most: 4 MiB of float32 stay in the cache

# Values of `WorkerReport.status` other than 1.
NOT_FINITE = 0.0  # a NaN or an infinity: leave this worker out, and report it
NOTHING_YET = -1.0  # a worker that has just joined has nothing to contribute

# Values of `WorkerReport.samples` below 0: the samples of no step, or only of some, are known.
SAMPLES_UNKNOWN = -1.0
SAMPLES_INCOMPLETE = -2.0


class Work(NamedTuple):
    """Steps of one worker, and their samples: its weight in a sync round."""

    steps: int = 0
    counted: int = 0  # of these, the steps whose samples are known
    samples: int = 0  # of the counted steps

    def plus(self, samples: int | None) -> Work:
        """Add a step on this many samples; None: not known."""
        if samples is None:
            return self._replace(steps=self.steps + 1)
        return Work(self.steps + 1, self.counted + 1, self.samples + samples)

    def minus(self, other: Work) -> Work:
        return Work(
            self.steps - other.steps, self.counted - other.counted, self.samples - other.samples
        )


NO_WORK = Work()


class WorkerReport(NamedTuple):
    """A worker's description of itself.

    All fields are floats, because a report travels as float64 in the same message as the values.
    """

    step: float = 0.0  # has to be equal on all workers
    status: float = 1.0  # 1: in the mean; NOT_FINITE or NOTHING_YET: left out of it
    options: float = 0.0  # a checksum; has to be equal on all workers
    state_elements: float = 0.0  # of optimizer state, averaged only if every worker has some
    seconds: float = 0.0  # a step takes on this worker
    lr: float = 0.0
    length: float = 0.0  # steps of the next block; the first worker's number holds for all
    drawn: float = 0.0  # samples of a `Cursor` that were taken since the last kept round
    stop: float = 0.0  # 1 if it was asked to stop (`_ranks/stop_notice.py`)
    taken: float = 0.0  # own steps that its values are the result of
    samples: float = SAMPLES_UNKNOWN  # on which it took these steps, if they were counted
    weight: float = 1.0  # of its values in the mean; above 0

    @property
    def included(self) -> bool:
        """Whether this worker's values are in the mean."""
        return self.status > 0

    @property
    def work(self) -> Work:
        """The work that this worker's values are the result of."""
        steps = int(self.taken)
        if self.samples < 0.0:
            return Work(steps)
        return Work(steps, steps, int(self.samples))

    def with_work(self, work: Work) -> WorkerReport:
        """Return the report of values that are the result of this work."""
        samples = SAMPLES_UNKNOWN
        if work.counted == work.steps > 0:
            samples = float(work.samples)
        elif work.counted:
            samples = SAMPLES_INCOMPLETE
        return self._replace(taken=float(work.steps), samples=samples)


# Numbers that travel with a chunk: a report, and the squared lengths of the values as they are sent
# and before they are rounded.
REPORT = len(WorkerReport._fields) + 2


class Payload:
    """Tensors of one type on one device, as one flat sequence of `length` elements."""

    length: int
    dtype: torch.dtype
    device: torch.device
    codec: Codec = CODECS["float32"]
    residual: Tensor | None = None  # (length,): what rounding has cut off so far, if it rounds
    first_only = False  # broadcast the first worker's values instead of averaging
    measured = False  # whether its squared length is part of the drift
    part = 0  # payloads of one part are measured together

    def read(self, start: int, out: Tensor) -> None:
        """Fill `out` with the elements from `start` on."""
        raise NotImplementedError

    def write(self, start: int, mean: Tensor, result: RoundResult) -> None:
        """Take in the mean of the elements from `start` on. They are not read again.

        `mean` belongs to the caller and is reused: copy what has to stay. `result.reports` is
        complete; the squared lengths are not yet.
        """
        raise NotImplementedError


def fingerprint(options: object) -> float:
    """Return a checksum of the options as a float, which all collectives can carry exactly."""
    return float(zlib.crc32(repr(options).encode()))


class Squares:
    """Squared lengths of the differences of a part of the payloads."""

    def __init__(self, workers: int) -> None:
        self.by_rank = [0.0] * workers  # as sent; 0 for those that are not finite
        self.exact = [0.0] * workers  # before rounding; not saved
        self.of_mean = 0.0


@dataclass
class RoundResult:
    """The result of a sync round. Equal on all workers, bit for bit."""

    reports: list[WorkerReport] = field(default_factory=list)  # by rank
    parts: list[Squares] = field(default_factory=list)  # one for each optimizer

    @property
    def included(self) -> list[int]:
        """The ranks whose values are in the mean."""
        return [rank for rank, report in enumerate(self.reports) if report.included]

    def weights(self, ranks: Sequence[int]) -> list[float]:
        """Return the weights of these ranks in their mean: all 1 if they are equal."""
        weights = [self.reports[rank].weight for rank in ranks]
        return [1.0] * len(weights) if len(set(weights)) == 1 else weights

    @property
    def first_report(self) -> WorkerReport:
        """The first included rank's report. Its learning rate and block length hold for all."""
        return self.reports[(self.included or [0])[0]]

    @property
    def averages_state(self) -> bool:
        """Whether every worker had optimizer state to average."""
        return min(report.state_elements for report in self.reports) > 0


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all numbers in these tensors are finite."""
    for same in group_by_type([local_shard(tensor).detach() for tensor in tensors]):
        if same[0].is_complex():
            same = list(map(torch.view_as_real, same))
        # One fused kernel and one wait for the device, instead of one for each tensor.
        lengths = torch._foreach_norm(same, dtype=accumulation_dtype(same[0].dtype))
        if torch.stack(lengths).isfinite().all():
            continue
        for tensor, length in zip(same, lengths, strict=True):
            if not length.isfinite() and not _has_finite_maximum(tensor):
                return False
    return True


def _has_finite_maximum(values: Tensor) -> bool:
    # The maximum norm needs no second tensor of this size, as `isfinite()` would.
    return bool(torch.linalg.vector_norm(values, float("inf")).isfinite())


def is_payload_finite(payload: Payload) -> bool:
    """Return whether all numbers in a payload are finite, read chunk by chunk."""
    memory = torch.empty(min(LARGEST, payload.length), dtype=payload.dtype, device=payload.device)
    for start in range(0, payload.length, LARGEST):
        chunk = memory[: payload.length - start]
        payload.read(start, chunk)
        if not torch.isfinite(norm(chunk)) and not _has_finite_maximum(chunk):
            return False
    return True


# -- tensors that are averaged as they are ---------------------------------------------------------


class TensorPayload(Payload):
    """Tensors of one type on one device, read and written in place."""

    def __init__(self, tensors: Mapping[str, Tensor], first_only: bool = False) -> None:
        first = local_shard(next(iter(tensors.values())))
        self.tensors = tensors
        self._vector = FlatTensors(list(tensors.values()))
        self.length = len(self._vector)
        self.device = first.device
        self.dtype = accumulation_dtype(first.real.dtype)  # 16-bit tensors are summed in float32
        self.first_only = first_only

    def snapshot(self) -> SnapshotPayload:
        """Return a copy of the values as they are now."""
        copied = torch.empty(self.length, dtype=self.dtype, device=self.device)
        self.read(0, copied)
        sizes = [stop - start for start, stop in self._vector.spans]
        return SnapshotPayload(self.tensors, sizes, copied, self.first_only)

    def read(self, start: int, out: Tensor) -> None:
        self._vector.read(start, out)

    def write(self, start: int, mean: Tensor, result: RoundResult) -> None:
        if result.included:  # with no finite worker there is no mean: keep what is here
            self._vector.write(start, mean)


class SnapshotPayload(Payload):
    """A copy of a `TensorPayload`. The mean overwrites the copy, and `copy_to` writes it back.

    Needed where the tensors change while the copy travels (overlap), or where the sync round may
    be undone (elastic members).
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
        """Set the tensors with these keys to the mean; skip keys that are gone."""
        if not result.included:
            return
        for key, mean in zip(self.keys, self.values.split(self.sizes), strict=True):
            if key not in tensors:
                continue
            vector = FlatTensors([tensors[key]])
            if len(vector) == len(mean):
                vector.write(0, mean)

    def saved(self) -> dict[str, object]:
        """Return the mean in plain values and a tensor."""
        return {"keys": self.keys, "sizes": self.sizes, "mean": self.values}


def make_payloads(tensors: Mapping[str, Tensor], first_only: bool = False) -> list[TensorPayload]:
    """Return one payload for each type and device. Integer and bool tensors are left out."""
    groups: dict[object, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            groups.setdefault((tensor.dtype, tensor.device), {})[key] = tensor
    return [TensorPayload(group, first_only) for group in groups.values()]


def by_index(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the tensors with their index as key."""
    return {str(number): tensor for number, tensor in enumerate(tensors)}


def all_params(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups."""
    params: list[Tensor] = []
    for group in optimizer.param_groups:
        params.extend(group["params"])
    return params


def trainable_params(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that are not frozen."""
    return [param for param in all_params(optimizer) if param.requires_grad]


# -- averaged at the end of a block ---------------------------------------------------------------


def state_tensors(optimizer: Optimizer, only: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Return the state tensors that have their parameter's shape, in one order on all workers."""
    # Steps and other scalars are not averaged: they are equal, or each worker's own.
    found = {}
    for number, param in enumerate(all_params(optimizer)):
        if not param.requires_grad:
            continue
        for name, value in sorted(optimizer.state.get(param, {}).items()):
            if only is not None and name not in only:
                continue
            if isinstance(value, Tensor) and value.shape == param.shape:
                found[f"{number}.{name}"] = value
    return found


def drop_nonfinite_state(optimizer: Optimizer) -> bool:
    """Delete the state of each parameter whose state is not all finite; return if there was one."""
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
    """The model's buffers and the optimizer state, which are averaged or reset at a block's end.

    An optimizer does not know its model. Without `model`, the garbage collector is searched for
    the smallest module that has all of the parameters, or for those that have some of them.

    `buffers` and `state` are the options of `Blocks`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None,
        buffers: str,
        state: str,
        resets_state: bool,
    ) -> None:
        self.optimizer = optimizer
        modules = [model] if model is not None else _find_modules(all_params(optimizer))
        # Weak references: an optimizer must not keep the model's memory alive.
        self._modules = [weakref.ref(module) for module in modules]
        self.buffers = buffers
        self.state = state
        # The state to return to, before the first step (Adagrad has some, most have none).
        self.initial_state: dict[Any, Any] = {}
        inner = self._innermost
        if resets_state and inner.state:
            self.initial_state = copy.deepcopy(inner.state_dict()["state"])

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that the buffers belong to, as far as they still exist."""
        found = []
        for reference in self._modules:
            module = reference()
            if module is not None:
                found.append(module)
        return found

    def buffer_tensors(self) -> list[Tensor]:
        """Return the model's buffers as they are now, each once; none if workers keep theirs."""
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
        """Whether optimizer state is averaged at the end of a block."""
        return self.state not in ("keep", "reset")

    def state_payloads(self) -> list[TensorPayload]:
        """Return the optimizer's state to be averaged at a block's end; none by default."""
        if not self.averages_state:
            return []
        only = MOMENTS if self.state == "average_moments" else None
        return make_payloads(state_tensors(self.optimizer, only))

    @property
    def _innermost(self) -> Optimizer:
        # A scaling rule around it has separate statistics, which stay.
        return unwrap(self.optimizer)[-1]

    def reset_state(self) -> None:
        """Reset the inner optimizer's state; options such as `lr` stay as they are."""
        inner = self._innermost
        inner.state.clear()
        if self.initial_state:
            now = inner.state_dict()
            inner.load_state_dict({**now, "state": copy.deepcopy(self.initial_state)})


def _find_modules(params: Sequence[Tensor]) -> list[nn.Module]:
    """Return the smallest module with all parameters, or the outermost ones with some of them."""
    candidates = list(modules_holding(params))
    complete = [module for module, found in candidates if len(found) == len(set(map(id, params)))]
    if complete:
        return [min(complete, key=lambda module: len(list(module.modules())))]
    children: set[int] = set()
    for module, _ in candidates:
        children.update(map(id, module.children()))
    roots = [(module, found) for module, found in candidates if id(module) not in children]
    # The collector's order differs between workers; the parameters' order does not.
    roots.sort(key=lambda pair: min(pair[1]))
    return [module for module, _ in roots]

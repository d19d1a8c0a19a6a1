"""One training of the parity benchmark: an optimizer, a way to wrap it, a precision.

Every rank has its own tokens. The plain run has those of all ranks in one batch, one process and
the bare optimizer. LAMB is written out here: it looks at the norms of whole parameters.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Muon, Optimizer

import manyhands as mh
from sharding import models

STEPS = 50
SIZE = models.SIZES["smallest"]
BUCKET = 20_000  # elements: some buckets even of so small a model
WRAPPERS = ("DDP", "OSS + DDP", "OSS + ShardedDataParallel")


class Lamb(Optimizer):
    """You et al. 2020: Adam's step, as long as each parameter is."""

    def __init__(self, params: Any, lr: float = 1e-3, eps: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state.update(step=0, mean=torch.zeros_like(param), square=torch.zeros_like(param))
        state["step"] += 1
        mean = state["mean"].lerp_(grad, 0.1) / (1 - 0.9 ** state["step"])
        square = state["square"].lerp_(grad * grad, 0.001) / (1 - 0.999 ** state["step"])
        direction = mean / (square.sqrt() + group["eps"]) + 0.01 * param
        size, step = _whole(param.norm()), _whole(direction.norm())
        length = size / step if size > 0 else 1.0
        param.sub_(direction * (group["lr"] * length))


def _whole(tensor: Any) -> Tensor:
    """The norm over all workers, where they hold slices."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


Chosen = list[tuple[type[Optimizer], list[nn.Parameter], dict[str, Any]]]


def _all(kind: type[Optimizer], **options: Any) -> Callable[[nn.Module], Chosen]:
    return lambda model: [(kind, list(model.parameters()), options)]


def _muon(model: nn.Module) -> Chosen:
    """Muon for the matrices of the blocks, AdamW for embeddings, logits, norms and biases."""
    inside = {id(p) for p in model.blocks.parameters() if p.dim() == 2}  # type: ignore[union-attr]
    matrices = [p for p in model.parameters() if id(p) in inside]
    rest = [p for p in model.parameters() if id(p) not in inside]
    return [(Muon, matrices, {"lr": 0.01}), (AdamW, rest, {"lr": 1e-3})]


OPTIMIZERS: dict[str, Callable[[nn.Module], Chosen]] = {
    "SGD, momentum": _all(SGD, lr=0.05, momentum=0.9),
    "AdamW": _all(AdamW, lr=1e-3),
    "AdamW, fused": _all(AdamW, lr=1e-3, fused=True),
    "LAMB": _all(Lamb, lr=1e-3),
    "Muon and AdamW": _muon,
}


@dataclass(frozen=True)
class Case:
    """What is trained, without how it is wrapped."""

    optimizer: str
    bf16: bool
    passes: int  # backward passes in a step


def trained(case: Case, wrapper: str | None, parts: list[list[Tensor]]) -> Tensor:
    """All parameters after `STEPS` steps; `parts` are the batches of each pass of a step."""
    model = models.decoder(SIZE)
    chosen = OPTIMIZERS[case.optimizer](model)
    wrapped: nn.Module = model
    if wrapper in (None, "DDP"):
        optimizers: list[Any] = [kind(params, **options) for kind, params, options in chosen]
    else:
        optimizers = [
            mh.OSS(params, optim=kind, bucket_size=BUCKET, **options)
            for kind, params, options in chosen
        ]
    if wrapper == "OSS + ShardedDataParallel":
        wrapped = mh.ShardedDataParallel(model, optimizers)
    elif wrapper is not None:
        wrapped = DistributedDataParallel(model)
    run(case, wrapped, optimizers, parts)
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def run(
    case: Case,
    model: nn.Module,
    optimizers: Sequence[Any],
    parts: list[list[Tensor]],
    autocast: bool | None = None,
) -> None:
    """`STEPS` steps; `autocast` is as the case says, unless the model sees to its precision."""
    autocast = case.bf16 if autocast is None else autocast
    for number in range(STEPS):
        for position in range(case.passes):
            tokens = parts[position][number % len(parts[position])]
            last = position == case.passes - 1
            with (
                _unsynchronised(model, not last),
                torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            ):
                loss = model(tokens) / case.passes
            with _unsynchronised(model, not last):
                loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@contextmanager
def _unsynchronised(model: nn.Module, wanted: bool) -> Iterator[None]:
    with model.no_sync() if wanted and hasattr(model, "no_sync") else nullcontext():
        yield


class Trials:
    """One rank; the plain run is rank 0's."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.plain: dict[Case, Tensor] = {}

    def __call__(self, order: dict[str, Any]) -> dict[str, Any]:
        """Train as ordered; how far from the plain run, and a checksum for comparing ranks."""
        case = Case(order["optimizer"], order["bf16"], order["passes"])
        ranks = [batches(SIZE, rank, case.passes) for rank in range(dist.get_world_size())]
        here = trained(case, order["wrapper"], ranks[self.rank])
        found: dict[str, Any] = {"sum": zlib.crc32(bytes(here.view(torch.uint8).tolist()))}
        if self.rank == 0:
            if case not in self.plain:
                self.plain[case] = trained(case, None, everyone(ranks))
            plain = self.plain[case]
            found["apart"] = float((here - plain).abs().max() / plain.square().mean().sqrt())
        return found


def everyone(ranks: list[list[list[Tensor]]]) -> list[list[Tensor]]:
    """The batches of all ranks as one, for each pass of a step."""
    passes = zip(*ranks, strict=True)
    return [[torch.cat(same) for same in zip(*each, strict=True)] for each in passes]


def batches(size: models.Size, rank: int, passes: int) -> list[list[Tensor]]:
    """A rank's, for each pass of a step."""
    return [models.batches(size, rank + 100 * number, 8) for number in range(passes)]

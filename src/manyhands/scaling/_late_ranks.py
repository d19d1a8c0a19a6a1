"""Is this rank the one that the others wait for?

Under DDP a rank that ran no backward, ran it inside `no_sync()`, froze a parameter or left one out
has not joined DDP's all-reduce. The others wait there until the process group's timeout, and this
rank would wait as long for their part of the scaling vector. But it can know better, by what it saw
of its own gradients: that is its *doubt*. A rank in doubt waits for `PATIENCE` seconds, and then
looks for a DDP module that cannot have averaged such gradients. If there is one, it says so.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from manyhands._core.ranks import PendingSums

PATIENCE = 2.0  # seconds


@dataclass(frozen=True)
class Doubt:
    """What was odd in this rank's gradients, and whether DDP may have been told to expect it."""

    text: str
    may_be_meant: bool = False


NO_BACKWARD = Doubt("step() was called without a backward() before it")
NOT_AVERAGED = Doubt(
    "the gradients after the step's last backward() are those that this rank computed alone. Was "
    "that pass inside no_sync()? Only the passes before it may be"
)


def without_gradient(
    expected: Sequence[int], measured: Collection[int], *, may_be_meant: bool
) -> Doubt | None:
    """The doubt about parameters that had no gradient in the step's last backward pass."""
    missing = [index for index in expected if index not in measured]
    if not missing:
        return None
    listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return Doubt(
        f"{len(missing)} of {len(expected)} parameters had no gradient in the step's last "
        f"backward() (in the optimizer's order: {listed}). Were they frozen on this rank, or not "
        "used by its loss? DistributedDataParallel waits for all of them, unless it is made with "
        "find_unused_parameters=True",
        may_be_meant,
    )


def are_the_same(squares: Sequence[float], lengths: Sequence[float]) -> bool:
    """Whether these squared lengths are of gradients of these lengths, and not all are zero."""
    pairs = zip(squares, lengths, strict=True)
    return any(squares) and all(math.isclose(s, x * x, rel_tol=1e-5) for s, x in pairs)


def wait_in(doubt: Doubt, combination: PendingSums, rank: int, params: Sequence[Tensor]) -> None:
    """Return when the other ranks' numbers are here, or may yet come; raise if they cannot."""
    if combination.done_within(PATIENCE):
        return
    modules = list(_ddp_around(params))
    if doubt.may_be_meant:
        modules = [m for m in modules if not (m.find_unused_parameters or m.static_graph)]
    if modules:
        raise RuntimeError(
            f"the other ranks have not sent their part of this step for {PATIENCE:g} s: they wait "
            f"for rank {rank}, which is this one. Here {doubt.text}."
        )


def _ddp_around(params: Sequence[Tensor]) -> Iterator[DistributedDataParallel]:
    ours = {id(param) for param in params}
    for thing in gc.get_objects():
        if issubclass(type(thing), DistributedDataParallel) and any(
            id(param) in ours for param in thing.parameters()
        ):
            yield thing

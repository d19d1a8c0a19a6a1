"""Is this rank the one that the other ranks wait for?

Under DDP a rank that ran no backward, ran it inside `no_sync()`, froze a parameter or left one out
has not joined DDP's all-reduce. The other ranks wait there until the process group's timeout, and
this rank would wait as long for their scaling payload. But it can find out: something was odd
about its own gradients. That is a `GradientAnomaly`. A rank with an anomaly waits for `PATIENCE`
seconds, and then looks for a DDP module that cannot have averaged such gradients. If there is one,
the rank raises an error.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from manyhands._core.modules import modules_holding
from manyhands._core.ranks import PendingSums

PATIENCE = 2.0  # seconds


@dataclass(frozen=True)
class GradientAnomaly:
    """What was odd about this rank's gradients, and whether DDP may be configured to expect it."""

    text: str
    may_be_intended: bool = False


NO_BACKWARD = GradientAnomaly("step() was called without a backward() before it")
NOT_AVERAGED = GradientAnomaly(
    "the gradients after the step's last backward() are those that this rank computed alone. Was "
    "that pass inside no_sync()? Only the passes before it may be"
)


def find_missing_gradients(
    expected: Sequence[int], measured: Collection[int], *, may_be_intended: bool
) -> GradientAnomaly | None:
    """Return the anomaly if some parameters had no gradient in the step's last backward pass."""
    missing = [index for index in expected if index not in measured]
    if not missing:
        return None
    listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return GradientAnomaly(
        f"{len(missing)} of {len(expected)} parameters had no gradient in the step's last "
        f"backward() (in the optimizer's order: {listed}). Were they frozen on this rank, or not "
        "used by its loss? DistributedDataParallel waits for all of them, unless it is made with "
        "find_unused_parameters=True",
        may_be_intended,
    )


def norms_match(squares: Sequence[float], norms: Sequence[float]) -> bool:
    """Return whether `squares` are the squares of `norms`, and not all zero."""
    pairs = zip(squares, norms, strict=True)
    return any(squares) and all(math.isclose(s, x * x, rel_tol=1e-5) for s, x in pairs)


def wait_for_ranks(
    anomaly: GradientAnomaly, pending: PendingSums, rank: int, params: Sequence[Tensor]
) -> None:
    """Return if the other ranks' payloads are here, or may still come; raise if they cannot."""
    if pending.done_within(PATIENCE):
        return

    def waits(module: nn.Module) -> bool:
        if not isinstance(module, DistributedDataParallel):
            return False
        # these two options make DDP average without gradients that a rank did not compute
        expected = module.find_unused_parameters or module.static_graph
        return not (expected and anomaly.may_be_intended)

    if any(modules_holding(params, waits)):
        raise RuntimeError(
            f"the other ranks have not sent their part of this step for {PATIENCE:g} s: they wait "
            f"for rank {rank}, which is this one. Here {anomaly.text}."
        )

"""Is this rank the one that the other ranks wait for?

Under DDP a rank that ran no backward, ran it inside `no_sync()`, froze a parameter or left one out
has not joined DDP's all-reduce. The other ranks wait there until the process group's timeout, and
this rank would wait as long for their scaling payload. But it can find out: something was odd
about its own gradients. That is a `GradientAnomaly`. A rank with an anomaly waits for `PATIENCE`
seconds, and then looks for a DDP module that cannot have averaged such gradients. If there is one,
the rank raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from manyhands._core.ranks import PendingSums
from manyhands._core.wrappers import modules_holding

PATIENCE = 2.0  # seconds


NO_BACKWARD = "step() was called without a backward() before it"
NOT_AVERAGED = (
    "the gradients after the step's last backward() are those that this rank computed alone. Was "
    "that pass inside no_sync()? Only the passes before it may be"
)


@dataclass(frozen=True)
class GradientAnomaly:
    """What was odd about a rank's gradients, and whether DDP may be configured to expect it."""

    rank: int
    params: Sequence[Tensor]
    text: str
    may_be_intended: bool = False

    def wait(self, pending: PendingSums) -> None:
        """Return if the other ranks' payloads are here or may still come; raise if they cannot."""
        if pending.done_within(PATIENCE):
            return

        def waits(module: nn.Module) -> bool:
            if not isinstance(module, DistributedDataParallel):
                return False
            # these two options make DDP average without gradients that a rank did not compute
            expected = module.find_unused_parameters or module.static_graph
            return not (expected and self.may_be_intended)

        if any(modules_holding(self.params, waits)):
            raise RuntimeError(
                f"the other ranks have not sent their part of this step for {PATIENCE:g} s: they "
                f"wait for rank {self.rank}, which is this one. Here {self.text}."
            )


def describe_missing(missing: Sequence[int], expected: int) -> str:
    """Return the text for parameters that had no gradient in the step's last pass."""
    listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return (
        f"{len(missing)} of {expected} parameters had no gradient in the step's last "
        f"backward() (in the optimizer's order: {listed}). Were they frozen on this rank, or not "
        "used by its loss? DistributedDataParallel waits for all of them, unless it is made with "
        "find_unused_parameters=True"
    )

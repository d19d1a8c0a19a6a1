"""The state of a wrap: idle, in a forward, in a backward, or holding full parameters."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Any


class TrainingState(Enum):
    """The state of a `FullyShardedDataParallel`, in its attribute `training_state`.

    >>> import torch, manyhands as mh
    >>> model = mh.FSDP(torch.nn.Linear(2, 2))
    >>> model.assert_state(mh.TrainingState.IDLE)
    >>> with model.summon_full_params():
    ...     print(model.training_state.name)
    SUMMON_FULL_PARAMS

    On one rank, where nothing is sent, a backward is `BACKWARD_PRE` throughout.
    """

    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()  # its parameters are being gathered, or are used, in a backward
    BACKWARD_POST = auto()  # its gradients are being sent
    SUMMON_FULL_PARAMS = auto()


# The engine's names are private to torch; these are the only ones that users see.
OF_ENGINE = {
    "IDLE": TrainingState.IDLE,
    "FORWARD": TrainingState.FORWARD,
    "PRE_BACKWARD": TrainingState.BACKWARD_PRE,
    "POST_BACKWARD": TrainingState.BACKWARD_POST,
}


def check_state(now: TrainingState, wanted: Any) -> None:
    """Raise a ValueError unless `now` is the wanted state, or one of several."""
    states = list(wanted) if isinstance(wanted, Iterable) else [wanted]
    # By name, so that members of fairscale's enum are accepted.
    names = [getattr(state, "name", state) for state in states]
    if unknown := [name for name in names if name not in TrainingState.__members__]:
        raise ValueError(
            f"a state must be one of {', '.join(TrainingState.__members__)}, got {unknown}."
        )
    if now.name not in names:
        raise ValueError(
            f"this FullyShardedDataParallel is in state {now.name}, and {' or '.join(names)} was "
            "asserted."
        )

"""Find our integration for an object of another library.

A module of `manyhands.integrations`, named after a trainer's package, describes the trainer. It is
imported when an object of this package is found:

    describe(optimizer)    returns a `PreparedOptimizer`; None if the library has not prepared it
    take_back(step)        reverts the effects of the library's own `step` after a skipped step
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch.optim import Optimizer

from manyhands._optimizers.wrappers import LossScaler, unwrap

INTEGRATIONS = "manyhands.integrations"


@dataclass(frozen=True)
class PreparedOptimizer:
    """An optimizer prepared by a trainer's loop.

    The loop calls `step()` and `zero_grad()` after every pass. The optimizer ignores these calls
    except after the last pass of a step.
    """

    optimizer: Optimizer
    loop: Any  # an `Accumulation` (`scaling/_batch.py`)
    scaler: LossScaler | None = None
    unseen: str | None = None  # the sharing of gradients, if it hides the gradients of a rank


def find_prepared(optimizer: Optimizer) -> PreparedOptimizer | None:
    """Return the description of this optimizer or an inner optimizer, or None."""
    for layer in unwrap(optimizer, every_layer=True):
        for kind in type(layer).__mro__:
            integration = _integration_of(kind)
            described: PreparedOptimizer | None = None
            if integration is not None:
                described = integration.describe(layer)
            if described is not None:
                return described
    return None


def report_skip(optimizer: Optimizer) -> None:
    """Notify the library that replaced this optimizer's `step` of a skipped step."""
    step = optimizer.__dict__.get("step")
    integration = _integration_of(step)
    if integration is not None:
        integration.take_back(step)


def advice(about: str) -> str:
    """Return remedies for the libraries in use."""
    advice = ""
    for package, text in import_module(INTEGRATIONS).ADVICE[about].items():
        if package in sys.modules:
            advice += f" {text}"
    return advice


def _integration_of(made: object) -> Any:
    package = str(getattr(made, "__module__", "")).partition(".")[0]
    if package not in import_module(INTEGRATIONS).PREPARES:
        return None
    return import_module(f"{INTEGRATIONS}.{package}")

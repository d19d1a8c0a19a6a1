"""Find our integration with the library that an object comes from.

A training loop of another library puts a wrapper around an optimizer, and a rule, a `NoiseScale` or
blocks are put around that, or are inside it. What such a loop does is known in the module of
`manyhands.integrations` that has the name of the library's package. It is imported when an object
of that package is met:

    describe(optimizer)    returns a `PreparedOptimizer`; None if the library has not prepared it
    take_back(step)        undoes what the library's own `step` has noted: it was skipped
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
    """An optimizer that another library's loop has prepared, as our integration describes it.

    The loop calls `step()` and `zero_grad()` in every pass, and the optimizer ignores these calls,
    except after the step's last pass.
    """

    optimizer: Optimizer
    loop: Any  # an `Accumulation` (`scaling/_settings.py`)
    scaler: LossScaler | None = None
    unseen: str | None = None  # how ranks share gradients, if those of one rank cannot be seen


def find_prepared(optimizer: Optimizer) -> PreparedOptimizer | None:
    """Return what is known of this optimizer or one inside it, if another library prepared it."""
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
    """Let a library that replaced this optimizer's `step` know that the step was skipped."""
    step = optimizer.__dict__.get("step")
    integration = _integration_of(step)
    if integration is not None:
        integration.take_back(step)


def advice(about: str) -> str:
    """Return what to do about a mistake in the libraries that this process uses."""
    advice = ""
    for package, text in import_module(INTEGRATIONS).ADVICE[about].items():
        if package in sys.modules:
            advice += f" {text}"
    return advice


def _integration_of(made: object) -> Any:
    """Return our integration with the library that a class or function is from; None without."""
    package = str(getattr(made, "__module__", "")).partition(".")[0]
    if package not in import_module(INTEGRATIONS).PREPARES:
        return None
    return import_module(f"{INTEGRATIONS}.{package}")

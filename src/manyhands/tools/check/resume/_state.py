"""Make digests of the state before a step. Equal states have equal digests."""

import hashlib
import random
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.tools.check._batches import digest, is_container, parts_of
from manyhands.tools.check._loaders import copy_of
from manyhands.tools.check.resume._records import Digests


def digest_of(value: Any) -> str:
    if isinstance(value, Tensor):
        value = copy_of(value)
        if value.dim():
            return digest(value)
        value = value.item()  # an optimizer's step may be a tensor or a number
    if isinstance(value, bool | int | float):
        return repr(float(value))
    if is_container(value):
        return text_digest(repr([digest_of(part) for part in parts_of(value).values()]))
    return repr(value) if isinstance(value, str) else ""


def text_digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def parameters_of(optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """Return parameters by the numbers of optimizer and parameter."""
    found = {}
    for o, optimizer in enumerate(optimizers):
        parameters: list[Tensor] = []
        for group in optimizer.param_groups:
            parameters += group["params"]
        for i, parameter in enumerate(parameters):
            found[f"{o}:{i}"] = parameter
    return found


def optimizer_digests(optimizers: list[Optimizer]) -> Digests:
    numbers = {id(parameter): number for number, parameter in parameters_of(optimizers).items()}
    found = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if id(parameter) in numbers and isinstance(state, dict):
                for key, value in state.items():
                    found[f"{key} of {numbers[id(parameter)]}"] = digest_of(value)
    return found


def random_digests() -> Digests:
    return {
        "torch": digest(torch.get_rng_state()),
        "numpy": text_digest(repr([str(part) for part in numpy.random.get_state(legacy=True)])),
        "random": text_digest(repr(random.getstate())),
    }

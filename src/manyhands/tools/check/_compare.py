"""Measure the distance between two runs, step by step.

Distances are relative: of a gradient to the largest element, of a parameter to the movement in the
step. Distances of parameters omit elements with rounding as gradients, because Adam makes a full
step from rounding. Examples: biases of keys in attention, and biases before a norm.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.tools.check._records import Recording, Tensors

ROUNDING = 1e-9  # gradients below this part of the largest gradient are rounding
PARAMETER_FLOOR = 1e-2  # least scale, as a part of the largest movement
GRADIENT_FLOOR = 1e-4  # least scale, as a part of the largest gradient
TINY = 1e-30  # replaces a scale of zero


@dataclass
class Difference:
    """The first place where two runs differ."""

    step: int
    kind: str  # an attribute of SeenStep: "before", "grads" or "params"
    distances: dict[str, float]  # of all tensors
    tolerance: float

    @property
    def names(self) -> list[str]:
        return [name for name, distance in self.distances.items() if distance > self.tolerance]


def compare(
    ranks: Recording, one: Recording, tolerance: float
) -> tuple[list[float], Difference | None]:
    """Return each step's largest distance, with the first difference."""
    largest = list[float]()
    rounding: Tensors = {}
    previous = one.start
    for number, (a, b) in enumerate(zip(ranks.steps, one.steps, strict=False)):
        mark_rounding(a.grads, b.grads, rounding)
        kinds = {
            "before": gradient_distances(a.before, b.before),
            "grads": gradient_distances(a.grads, b.grads),
            "params": parameter_distances(a.params, b.params, previous, rounding),
        }
        largest.append(0.0)
        for kind, distances in kinds.items():
            largest[-1] = max([largest[-1], *distances.values()])
            if largest[-1] > tolerance:
                return largest, Difference(number, kind, distances, tolerance)
        previous = b.params
    return largest, None


def size(tensor: Tensor | None) -> float:
    if tensor is None:
        return 0.0
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def largest_size(tensors: Tensors) -> float:
    return max(map(size, tensors.values()), default=0.0)


def distance(x: Tensor | None, y: Tensor | None, scale: float, rounding: float = 0.0) -> float:
    """Return the size of the difference, less `rounding`, relative to a scale.

    Infinite if an element is finite in only one tensor.
    """
    if x is None or y is None or x.shape != y.shape:
        return float(size(x) > 0 or size(y) > 0)
    if not torch.equal(x.isfinite(), y.isfinite()):
        return float("inf")
    return max(size(x - y) - rounding, 0.0) / scale


def gradient_distances(a: Tensors, b: Tensors) -> dict[str, float]:
    if not a or not b:
        return {}
    floor = GRADIENT_FLOOR * (largest_size(b) or TINY)
    found = {}
    for name in dict.fromkeys([*b, *a]):
        scale = max(size(b.get(name)), floor)
        found[name] = distance(a.get(name), b.get(name), scale)
    return found


def mark_rounding(a: Tensors, b: Tensors, rounding: Tensors) -> None:
    """Mark elements with rounding as gradients in both runs."""
    limit = ROUNDING * largest_size(b)
    for name, y in b.items():
        x = a.get(name)
        if x is not None and x.shape == y.shape:
            small = torch.maximum(x.abs(), y.abs()) <= limit
            rounding[name] = small | rounding.get(name, small)


def parameter_distances(
    a: Tensors, b: Tensors, previous: Tensors, rounding: Tensors
) -> dict[str, float]:
    if not a:
        return {}
    moves = {name: b[name] - previous[name] for name in b if name in previous}
    floor = PARAMETER_FLOOR * (largest_size(moves) or TINY)
    found = {}
    for name, move in moves.items():
        x = a.get(name)
        y = b[name]
        if x is not None and name in rounding:
            x = torch.where(rounding[name], y, x)
        own_rounding = 4 * torch.finfo(y.dtype).eps * size(y)
        found[name] = distance(x, y, max(size(move), floor), own_rounding)
    return found


def unequal(tensors: list[Tensors], limit: float = 1e-6) -> list[str]:
    """Return the names with a distance from the first rank above `limit`."""
    names: dict[str, None] = {}
    for other in tensors[1:]:
        for name, distance in gradient_distances(other, tensors[0]).items():
            if distance > limit:
                names[name] = None
    return list(names)

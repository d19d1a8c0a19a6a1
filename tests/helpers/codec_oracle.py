"""Codes of gradients, written plainly: what arrives of values that were encoded."""

import torch
from torch import nn
from torch.nn import functional as F

from manyhands._core.codec import CODECS


def make_model(dtype=torch.float64):
    """A model whose slices are longer than a codec's group."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 41), nn.Tanh(), nn.Linear(41, 37), nn.Tanh(), nn.Linear(37, 3)
    return nn.Sequential(*layers).to(dtype)


def integers(values, largest, group):
    """Round each to one of `largest` steps up or down, with a bfloat16 step for each group."""
    groups = F.pad(values, (0, -len(values) % group)).view(-1, group)
    step = (groups.abs().amax(dim=1, keepdim=True) / largest).bfloat16().to(values.dtype)
    codes = (groups / step).round().clamp(-largest, largest).nan_to_num(0)
    return (codes * step).flatten()[: len(values)]


def powers_of_two(values):
    codec = CODECS["fp4"]
    return codec.decode(codec.encode(values), len(values), values.dtype)


def with_residual(values, residual):
    """Values with what was left out before, unless that is longer than they are."""
    is_outlier = 0 < values.norm() < residual.norm()
    return values if is_outlier else values + residual


ROUNDED = {
    "int8": lambda values: integers(values, 127, 256),
    "int4": lambda values: integers(values, 7, 64),
    "fp4": powers_of_two,
}

"""The squared gradient norm of every example of a batch, for the parameters of one layer.

A layer has the inputs x and, in backward, the output gradients d. Example i adds c_i to the
gradient of a parameter. Here t and u run over the positions of a sequence or an image:

    linear      c_i = sum_t d_it x_it^T      |c_i|^2 = |x_i|^2 |d_i|^2 if there is one position,
                                             else sum_tu (x_it . x_iu) (d_it . d_iu)
    conv        the same, with the patches of the image as x
    embedding   one row for each token: the sum of d_it over its positions
    norm layer  c_i = sum_t d_it * n_it      n: the normalised input
    any bias    c_i = sum_t d_it

With T positions, the sum over t and u costs T^2 (inputs + outputs) operations, and the matrix c_i
itself T inputs outputs. Each layer takes the cheaper way. Sums are in float32 or better, whatever
the type of x and d.

Each layer's function returns one number per example, by parameter name, for the `wanted` names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Elements of a temporary tensor. Examples are taken a few at a time, so that it stays below this.
CHUNK = 4_194_304

Squares = dict[str, Tensor]


@dataclass(frozen=True)
class LayerKind:
    """How one kind of layer is measured.

    `group` is the name by which a user chooses it. With `batch_first` the first dimension is that
    of the examples; otherwise `Examples.batch_dim` is.
    """

    group: str
    measure: Callable[[Any, Tensor, Tensor, Collection[str]], Squares]
    batch_first: bool = False  # torch's convolutions and group norms know no other order
    dims: Callable[[Any], int] = lambda layer: 2  # the fewest dimensions of an input with a batch


def linear_squares(x: Tensor, delta: Tensor) -> Tensor:
    """Return |sum_t d_it x_it^T|^2 of x (B, T, inputs) and d (B, T, outputs), or without T.

    >>> linear_squares(torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0]]))  # |x|^2 = 25, |d|^2 = 4
    tensor([100.])
    """
    if x.dim() == 3 and x.shape[1] == 1:
        x, delta = x[:, 0], delta[:, 0]
    if x.dim() == 2:
        return _square_rows(x) * _square_rows(delta)
    positions, inputs, outputs = x.shape[1], x.shape[2], delta.shape[2]
    by_products = positions * (inputs + outputs) <= inputs * outputs
    size = max(positions * positions if by_products else inputs * outputs, 1)
    result = []
    for a, b in _chunks(size, x, delta):
        if by_products:
            products = torch.bmm(a, a.mT).mul_(torch.bmm(b, b.mT))
            # rounding can turn a sum of zero negative
            result.append(products.sum(dim=(1, 2)).clamp_(min=0.0))
        else:
            result.append(_square_rows(torch.bmm(b.mT, a).flatten(1)))
    return torch.cat(result)


def embedding_squares(tokens: Tensor, delta: Tensor, padding: int | None = None) -> Tensor:
    """Return the squared norm of each example's gradient of a table, for tokens (B, T).

    The positions of one token are added up first. No shape depends on values, so this does not
    wait for a GPU.

    >>> embedding_squares(torch.tensor([[7, 7, 1]]), torch.ones(1, 3, 1))  # 2^2 + 1^2
    tensor([5.])
    """
    batch, positions = tokens.shape
    delta = _widen(delta)
    if padding is not None:
        delta = delta * (tokens != padding).unsqueeze(2)
    ordered, order = tokens.sort(dim=1)
    # number the different tokens of each example from zero
    numbers = torch.zeros_like(ordered)
    numbers[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(dim=1)
    rows = torch.empty_like(ordered).scatter_(1, order, numbers)
    rows += positions * torch.arange(batch, device=rows.device).unsqueeze(1)
    sums = delta.new_zeros(batch * positions, delta.shape[2])
    sums.index_add_(0, rows.flatten(), delta.flatten(0, 1))
    return _square_rows(sums.view(batch, -1))


def _linear(layer: nn.Linear, x: Tensor, delta: Tensor, wanted: Collection[str]) -> Squares:
    if x.dim() > 3:
        x, delta = x.flatten(1, -2), delta.flatten(1, -2)
    result = {"weight": linear_squares(x, delta)} if "weight" in wanted else {}
    if "bias" in wanted:
        sums = delta if delta.dim() == 2 else delta.sum(dim=1, dtype=_wide(delta))
        result["bias"] = _square_rows(sums)
    return result


def _embedding(layer: nn.Embedding, x: Tensor, delta: Tensor, wanted: Collection[str]) -> Squares:
    positions = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
    delta = delta.reshape(len(x), -1, delta.shape[-1])
    return {"weight": embedding_squares(positions, delta, layer.padding_idx)}


def _normalised(
    layer: nn.LayerNorm | nn.RMSNorm, n: Tensor, delta: Tensor, wanted: Collection[str]
) -> Squares:
    features = math.prod(layer.normalized_shape)
    return _norm_squares(
        n.reshape(len(n), -1, features), delta.reshape(len(n), -1, features), wanted
    )


def _norm_squares(n: Tensor, delta: Tensor, wanted: Collection[str]) -> Squares:
    """Return the squares of the gradients of an element-wise weight and bias, for (B, T, D)."""
    delta = _widen(delta)
    result = {"weight": _square_rows((delta * n).sum(dim=1))} if "weight" in wanted else {}
    if "bias" in wanted:
        result["bias"] = _square_rows(delta.sum(dim=1))
    return result


def _layer_norm(layer: nn.LayerNorm, x: Tensor, delta: Tensor, wanted: Collection[str]) -> Squares:
    n = F.layer_norm(_widen(x), layer.normalized_shape, eps=layer.eps)
    return _normalised(layer, n, delta, wanted)


def _rms_norm(layer: nn.RMSNorm, x: Tensor, delta: Tensor, wanted: Collection[str]) -> Squares:
    eps = torch.finfo(x.dtype).eps if layer.eps is None else layer.eps
    return _normalised(layer, F.rms_norm(_widen(x), layer.normalized_shape, eps=eps), delta, wanted)


def _group_norm(layer: nn.GroupNorm, x: Tensor, delta: Tensor, wanted: Collection[str]) -> Squares:
    n = F.group_norm(_widen(x), layer.num_groups, eps=layer.eps)
    shape = (len(x), x.shape[1], -1)
    return _norm_squares(n.reshape(shape).mT, delta.reshape(shape).mT, wanted)


def _conv(
    layer: nn.Conv1d | nn.Conv2d, x: Tensor, delta: Tensor, wanted: Collection[str]
) -> Squares:
    """Measure a convolution as a linear layer on the patches of the image."""
    result: Squares = {}
    if "bias" in wanted:
        result["bias"] = _square_rows(delta.flatten(2).sum(dim=2, dtype=_wide(delta)))
    if "weight" not in wanted:
        return result
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    kernel, dilation, stride = layer.kernel_size, layer.dilation, layer.stride
    if x.dim() == 3:  # one spatial dimension: an image of height 1
        x = x.unsqueeze(2)
        kernel, dilation, stride = (1, *kernel), (1, *dilation), (1, *stride)
    groups = layer.groups
    size = layer.in_channels // groups * math.prod(kernel)  # the elements of a patch, in a group
    delta = delta.flatten(2)
    each = []
    for images, grads in _chunks(groups * size * delta.shape[2], x, delta):
        patches = F.unfold(images, kernel, dilation=dilation, stride=stride)
        # (examples x groups, positions, elements)
        a = patches.reshape(len(images) * groups, size, -1).mT
        b = grads.reshape(len(images) * groups, -1, grads.shape[2]).mT
        each.append(linear_squares(a, b).view(len(images), groups).sum(dim=1))
    result["weight"] = torch.cat(each)
    return result


def _normalised_dims(layer: nn.LayerNorm | nn.RMSNorm) -> int:
    return len(layer.normalized_shape) + 1


LAYER_KINDS: dict[type[nn.Module], LayerKind] = {
    nn.Linear: LayerKind("linear", _linear),
    nn.Embedding: LayerKind("embedding", _embedding, dims=lambda layer: 1),
    nn.LayerNorm: LayerKind(
        "norm", _layer_norm, dims=lambda layer: len(layer.normalized_shape) + 1
    ),
    nn.RMSNorm: LayerKind("norm", _rms_norm, dims=_normalised_dims),
    nn.GroupNorm: LayerKind("norm", _group_norm, batch_first=True),
    nn.Conv1d: LayerKind("conv", _conv, batch_first=True, dims=lambda layer: 3),
    nn.Conv2d: LayerKind("conv", _conv, batch_first=True, dims=lambda layer: 4),
}

GROUPS = tuple(dict.fromkeys(kind.group for kind in LAYER_KINDS.values()))


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the type in which sums of these values are made."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(_wide(tensor))


def _square_rows(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, dtype=_wide(rows)).square()


def _chunks(size: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Return examples a few at a time, widened, as `size` elements are made of each."""
    step = max(1, CHUNK // size)
    pieces = zip(*(tensor.split(step) for tensor in tensors), strict=True)
    return [tuple(_widen(piece) for piece in together) for together in pieces]


# -- what a user chooses ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Examples:
    """Which layers measure the gradients of single examples, and where the examples are.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> noise = mh.NoiseScale(optimizer, model=model, examples=mh.Examples(layers="norm"))

    Args:
        layers: "all", or some of "norm" (LayerNorm, RMSNorm, GroupNorm), "linear", "embedding" and
            "conv" (one and two dimensions), as one name or several.
        batch_dim: the dimension of the inputs along which the examples are: 0, or 1 for models
            that have time first.
    """

    layers: str | Sequence[str] = "all"
    batch_dim: int = 0

    def __post_init__(self) -> None:
        unknown = set(self.groups) - set(GROUPS)
        if unknown or not self.groups:
            raise ValueError(
                f"layers must be 'all' or some of {', '.join(map(repr, GROUPS))}, got "
                f"{self.layers!r}."
            )
        if self.batch_dim not in (0, 1):
            raise ValueError(f"batch_dim must be 0 or 1, got {self.batch_dim!r}.")

    @property
    def groups(self) -> tuple[str, ...]:
        """The kinds of layers that were asked for."""
        if self.layers == "all":
            return GROUPS
        return (self.layers,) if isinstance(self.layers, str) else tuple(self.layers)


def parse_examples(examples: bool | Examples, model: nn.Module | None) -> Examples | None:
    """Return the options, or None if examples are not measured; raise if that cannot work."""
    if not isinstance(examples, (bool, Examples)):
        raise TypeError(
            f"examples must be True, False or an mh.Examples(...), got {type(examples).__name__}. "
            "The model goes to model=."
        )
    if not examples:
        return None
    if model is None:
        raise ValueError("examples= needs the model whose layers are measured: model=...")
    return Examples() if examples is True else examples

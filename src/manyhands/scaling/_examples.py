"""The norms of single examples' gradients, from one backward pass.

A pass over B examples, each with the gradient g_i, leaves only the mean gradient G. But a layer's
inputs and output gradients say what each example adds to G, and for many layers the norm of that
costs less than the pass (`_example_squares.py`). Example i adds c_i to G, so g_i = B c_i, and

    E |g_i|^2 = sqr + var          var = trace of the covariance of one example's gradient
    E |G|^2   = sqr + var / B

are the equations of `_noise.py` with B small batches of one example. So a single pass on a single
rank shows how noisy its gradient is. A layer that is measured here is *covered*. Parameters of
other layers count in neither of the two norms.

`ExampleNorms` puts a forward hook on each covered layer, which puts a hook on the layer's output:

    forward         the forward hook keeps the input, as autograd does for the layer itself
    backward        the output's hook measures the layer
    end of pass     the layers that were used once, and by all examples, make up an `ExampleSquares`

If a layer's numbers cannot be right, it is left out from then on, and `left_out` has the reason.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from manyhands._core.backward import BackwardPasses, current_task
from manyhands.scaling._example_squares import LAYER_KINDS, Examples, LayerKind

_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


@dataclass(frozen=True)
class Coverage:
    """Which layers measure the gradients of single examples.

    `layers` are their names in the model, `left_out` has the reason for each of the others, and
    `share` is the measured share of the elements of all parameters.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    >>> noise = mh.NoiseScale(model.parameters(), model=model, examples=True)
    >>> noise.coverage.layers, noise.coverage.left_out
    (('0',), {'1': 'BatchNorm1d mixes the examples of a batch'})
    """

    layers: tuple[str, ...]
    left_out: Mapping[str, str]
    share: float


@dataclass(frozen=True)
class ExampleSquares:
    """What one pass measured.

    `mean_squares` has the mean over the examples of |g_i|^2, by the index of the parameter.
    """

    examples: int
    mean_squares: Mapping[int, Tensor | float]


@dataclass
class _Layer:
    name: str
    module: nn.Module
    kind: LayerKind
    indices: dict[str, int]  # of its measured parameters, by their names in the layer


@dataclass
class _Measured:
    """One layer's numbers of the pass under way."""

    layer: _Layer
    examples: int  # in the layer's input
    expected: int | None  # in the model's input; None if the model was not called
    squares: dict[int, Tensor | float]  # sum over examples of |c_i|^2
    total: dict[int, Tensor | float]  # |sum over examples of c_i|^2, in the first passes
    times: int = 1


class ExampleNorms:
    """Measures the examples of each backward pass, in the layers of `model` that are covered.

    `params` are the parameters to measure, which are called by their indices everywhere. `take`
    returns the numbers of the last pass. While `paused()` is true, nothing is measured.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[Tensor],
        options: Examples | None = None,
        *,
        paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self.options = options or Examples()
        self.left_out: dict[str, str] = {}
        self.problem: str | None = None  # why the last pass has no numbers
        self.skipped = False  # whether only that pass has none, and later ones may have
        self._paused = paused
        self._params = params
        self._pass: dict[int, _Measured] = {}  # by the layer's id
        self._last: ExampleSquares | None = None
        self._totals: dict[int, Tensor | float] = {}  # |sum over examples of c_i|^2, to compare
        self._mixed_by: str | None = None  # class of a layer that mixed the examples of this pass
        self._measured_before = False
        self._batch: int | None = None  # examples in the model's last training input
        self._anchor = torch.zeros((), requires_grad=True)
        norms = weakref.proxy(self)
        self._passes = BackwardPasses(
            lambda: norms._begin_pass(), lambda: norms._end_pass(), early=True
        )
        self._layers = {id(layer.module): layer for layer in self._find_layers(model)}
        if not self._layers:
            raise ValueError(
                "no layer can measure the gradients of single examples: "
                f"{self._describe_left_out()}. Without examples=, gradients of whole "
                "micro-batches are compared."
            )
        reference = weakref.ref(self)
        self._handles = [
            layer.module.register_forward_hook(_ForwardHook(_on_forward, reference))
            for layer in self._layers.values()
        ]
        self._handles += [
            module.register_forward_hook(_ForwardHook(_on_batch_norm, reference))
            for module in model.modules()
            if isinstance(module, _BatchNorm)
        ]
        self._handles.append(
            model.register_forward_pre_hook(_ForwardHook(_on_input, reference), with_kwargs=True)
        )
        weakref.finalize(self, _remove, self._handles)

    # -- which layers ------------------------------------------------------------------------

    def _find_layers(self, model: nn.Module) -> Iterator[_Layer]:
        index_of = {id(param): index for index, param in enumerate(self._params)}
        own = [
            (m, n, p) for m in model.modules() for n, p in m._parameters.items() if p is not None
        ]
        owners = Counter(id(param) for _, _, param in own)
        for name, module in model.named_modules():
            mine = {n: p for m, n, p in own if m is module and id(p) in index_of}
            if not mine:
                continue
            kind = _kind_of(module)
            if kind is None:
                mixes = isinstance(module, _BatchNorm)
                self.left_out[name] = (
                    f"{type(module).__name__} mixes the examples of a batch"
                    if mixes
                    else f"{type(module).__name__} is not a layer that can be measured"
                )
            elif kind.group not in self.options.groups:
                self.left_out[name] = f"layers={self.options.layers!r}"
            elif any(owners[id(param)] > 1 for param in mine.values()):
                self.left_out[name] = "another layer has the same parameter"
            elif getattr(module, "scale_grad_by_freq", False):
                self.left_out[name] = "scale_grad_by_freq=True mixes the examples of a batch"
            else:
                yield _Layer(name, module, kind, {n: index_of[id(p)] for n, p in mine.items()})

    @property
    def layers(self) -> list[str]:
        """The names of the layers that are measured."""
        return [layer.name for layer in self._layers.values()]

    @property
    def covered(self) -> set[int]:
        """The indices of the parameters that are measured."""
        return {i for layer in self._layers.values() for i in layer.indices.values()}

    @property
    def coverage(self) -> Coverage:
        """What is measured, and what is not."""
        total = sum(param.numel() for param in self._params)
        share = sum(self._params[i].numel() for i in self.covered) / total
        return Coverage(tuple(self.layers), dict(self.left_out), share)

    def _leave_out(self, layer: _Layer, reason: str) -> None:
        del self._layers[id(layer.module)]
        self.left_out[layer.name] = reason

    def _describe_left_out(self) -> str:
        reasons = [f"{name or 'the model'}: {why}" for name, why in self.left_out.items()]
        more = [f"and {len(reasons) - 4} more"] if len(reasons) > 4 else []
        return "; ".join(reasons[:4] + more) or "the model has none of the parameters"

    def _looks_up_positions(self, x: Tensor) -> bool:
        """Return whether an embedding's input is 0, 1, 2, ...: positions, and no batch of examples.

        This is asked only before the first measurement, because the answer waits for a GPU.
        """
        if self._measured_before or x.dim() != 1:
            return False
        return torch.equal(x, torch.arange(len(x), dtype=x.dtype, device=x.device))

    # -- one pass ----------------------------------------------------------------------------

    def _begin_pass(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop what was measured: no step will follow."""
        self._pass, self._last, self.problem, self.skipped = {}, None, None, False
        self._totals = {}

    @torch.no_grad()
    def _on_output_gradient(
        self, layer: _Layer, kept: Tensor, batch: int | None, delta: Tensor
    ) -> None:
        task = current_task()
        if task != self._passes.task:
            self._passes.enter(task)
        if id(layer.module) not in self._layers:
            return
        measured = self._pass.get(id(layer.module))
        if measured is not None:
            measured.times += 1
            return
        x = kept if kept.grad_fn is None else kept.grad_fn.saved_tensors[0]  # type: ignore[attr-defined]
        dim = 0 if layer.kind.batch_first else self.options.batch_dim
        # Pooled activations have fewer dimensions, and the examples first in any model.
        fewest = layer.kind.dims(layer.module)
        if dim and x.dim() > fewest + dim - 1:
            x, delta = x.transpose(0, dim), delta.transpose(0, dim)
        squares: dict[int, Tensor | float] = {}
        total: dict[int, Tensor | float] = {}
        examples = len(x) if x.dim() >= fewest else 0
        # Noted even if the number of examples is wrong: only the end of the pass can tell which
        # number is right.
        if examples and (batch is None or examples == batch):
            wanted = [n for n in layer.indices if self._params[layer.indices[n]].requires_grad]
            squares = _sum_squares(layer, x, delta, wanted)
            if not self._measured_before and not layer.kind.batch_first:
                # Take all positions of all examples for those of one example: that gives the norm
                # of the whole gradient, which `take` compares with autograd's.
                one = x.flatten(0, 1)[None] if x.dim() > fewest else x[None]
                delta = delta.flatten(0, 1)[None] if x.dim() > fewest else delta[None]
                total = _sum_squares(layer, one, delta, wanted)
        self._pass[id(layer.module)] = _Measured(layer, examples, batch, squares, total)

    def _end_pass(self) -> None:
        """Leave out the layers whose numbers cannot be right, and keep the others'."""
        measured, self._pass = self._pass, {}
        self._batch = None  # before the next pass, a part of the model may be called by itself
        if not measured:
            return
        sizes = Counter(entry.expected or entry.examples for entry in measured.values())
        batch = sizes.most_common(1)[0][0]
        left = len(self.left_out)
        for entry in measured.values():
            if entry.times > 1:
                self._leave_out(entry.layer, "it is used more than once in a pass")
            elif entry.examples != batch:
                self._leave_out(
                    entry.layer,
                    f"its input has {entry.examples or 'no'} examples, where the batch has {batch}",
                )
        if self._measured_before and len(self.left_out) > left:
            self._skip()
            return
        squares = {
            index: batch * total
            for key, entry in measured.items()
            if key in self._layers
            for index, total in entry.squares.items()
        }
        if not squares:
            self.problem = (
                f"no layer could measure the examples of this pass: {self._describe_left_out()}."
            )
            return
        self._totals = {i: t for entry in measured.values() for i, t in entry.total.items()}
        self._last = ExampleSquares(batch, squares)

    def take(self, norms: Mapping[int, Tensor | float]) -> ExampleSquares | None:
        """Return the numbers of the last pass, and forget them; None if there are none.

        `norms` are the norms of the parameters' gradients in that pass. If a gradient is not the
        sum of what the layer's examples add, the parameter is used elsewhere too, and the layer is
        left out.
        """
        last, self._last = self._last, None
        mixed_by, self._mixed_by = self._mixed_by, None
        if mixed_by is not None:
            self.problem = (
                f"{mixed_by} in training mode mixes the examples of a batch, so that no example "
                "has a gradient of its own. Use LayerNorm or GroupNorm, put the layer into eval "
                "mode, or leave examples= out."
            )
            return None
        if last is None:
            if not self._layers:
                self._skip()
            self.problem = self.problem or (
                "no measured layer took part in this backward pass. (Layers that torch.compile has "
                "compiled are not measured.)"
            )
            return None
        unseen = self.covered.intersection(norms).difference(last.mean_squares)
        other = {i for i in self._totals if i in norms and self._differs(i, norms[i], last)}
        for layer in list(self._layers.values()) if unseen or other else ():
            if unseen.intersection(layer.indices.values()):
                self._leave_out(layer, "its parameters are used elsewhere, or it is compiled")
            elif other.intersection(layer.indices.values()):
                self._leave_out(layer, "its gradient does not come from its output alone")
        if not self._layers or (unseen and self._measured_before):
            self._skip()
            return None
        self._measured_before = True
        covered = self.covered
        kept = {i: square for i, square in last.mean_squares.items() if i in covered}
        return ExampleSquares(last.examples, kept)

    def _differs(self, index: int, norm: Tensor | float, last: ExampleSquares) -> bool:
        """Return whether a gradient is not the sum of its examples' parts, beyond rounding."""
        if index not in last.mean_squares:
            return False
        # Rounding is relative to the examples' parts, which are g_i / B.
        parts = (float(last.mean_squares[index]) / last.examples) ** 0.5
        difference = abs(float(self._totals[index]) ** 0.5 - float(norm))
        return difference > 0.05 * float(norm) + 0.01 * parts

    def _skip(self) -> None:
        """Record that this pass has no numbers, because the covered layers have changed."""
        self.problem = f"layers are left out: {self._describe_left_out()}."
        self.skipped = bool(self._layers)

    def remove(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)


def _sum_squares(
    layer: _Layer, x: Tensor, delta: Tensor, wanted: Collection[str]
) -> dict[int, Tensor | float]:
    """Return the sum over the examples of |c_i|^2, by the index of the parameter."""
    with torch.autocast(delta.device.type, enabled=False):
        each = layer.kind.measure(layer.module, x, delta, wanted)
    sums = {n: v.sum() if v.device.type == "mps" else v.double().sum() for n, v in each.items()}
    return {
        layer.indices[name]: total.item() if total.device.type == "cpu" else total
        for name, total in sums.items()
    }


class _ForwardHook:
    """A hook that stays with its module: a copied or pickled module has none of its effects."""

    def __init__(self, call: Callable[..., None], owner: weakref.ref[ExampleNorms]) -> None:
        self._call = call
        self._owner = owner

    def __call__(self, *args: object) -> None:
        # torch.compile cannot trace hooks on outputs, so compiled layers are not measured.
        if torch.compiler.is_compiling():
            return
        owner = self._owner()
        if owner is not None and torch.is_grad_enabled():
            self._call(owner, *args)

    def __deepcopy__(self, memo: dict[int, object]) -> _ForwardHook:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _ForwardHook, (_on_forward, _nobody)


def _nobody() -> None:
    """Return no owner."""


class _Keep(torch.autograd.Function):
    """Keep a layer's input in an autograd node, as autograd itself keeps inputs.

    Activation checkpointing then computes it anew, and offloading moves it, as they do with the
    layer's own. `anchor` is a tensor that requires a gradient, so that autograd makes the node.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def _on_input(
    examples: ExampleNorms, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Record how many examples the model's input has."""
    dim = examples.options.batch_dim
    examples._batch = next((t.shape[dim] for t in _tensors((*args, kwargs)) if t.dim() > dim), None)


def _on_batch_norm(
    examples: ExampleNorms, module: nn.Module, args: tuple[object, ...], output: object
) -> None:
    """Record that the examples of this pass were mixed."""
    if module.training or not module.track_running_stats:
        examples._mixed_by = type(module).__name__


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _on_forward(
    examples: ExampleNorms, module: nn.Module, args: tuple[Tensor, ...], output: object
) -> None:
    """Put a hook on a layer's output, which measures the layer once its gradient is there."""
    layer = examples._layers.get(id(module))
    if layer is None or layer.module is not module or not isinstance(output, Tensor):
        return
    if not output.requires_grad or not args or examples._paused():
        return
    if not any(examples._params[i].requires_grad for i in layer.indices.values()):
        return
    if layer.kind.group == "embedding" and examples._looks_up_positions(args[0]):
        examples._leave_out(layer, "it looks up positions, which all examples have in common")
        return
    x = args[0].detach()
    kept: list[Tensor]
    if any(n != "bias" and examples._params[i].requires_grad for n, i in layer.indices.items()):
        # The output and not its node, because torch 2.11 empties a node whose output is gone.
        kept = [_Keep.apply(x, examples._anchor)]
    else:  # for the bias only the input's shape is needed, and autograd does not keep the input
        kept = [torch.empty_like(x, device="meta")]
    owner = weakref.ref(examples)
    output.register_hook(partial(_receive, owner, layer, kept, examples._batch))


def _receive(
    owner: weakref.ref[ExampleNorms],
    layer: _Layer,
    kept: list[Tensor],
    batch: int | None,
    delta: Tensor,
) -> None:
    examples = owner()
    if examples is None or examples._paused() or not kept:
        return
    if torch.is_grad_enabled() and id(layer.module) in examples._layers:
        examples._leave_out(layer, "its gradient is differentiated again (create_graph=True)")
        return
    examples._on_output_gradient(layer, kept[0], batch, delta.detach())
    if not _keeps_graph():
        kept.clear()  # do not keep the input longer than autograd does


def _kind_of(module: nn.Module) -> LayerKind | None:
    """Return how a layer is measured: one of torch's, or a subclass with the same `forward`."""
    for known, kind in LAYER_KINDS.items():
        if isinstance(module, known) and type(module).forward is known.forward:
            return kind
    return None


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()

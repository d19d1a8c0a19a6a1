"""Wrap optimizers in optimizers, and apply the signals of a gradient scaler.

A wrapper's `param_groups`, `state`, `defaults` and hooks belong to the inner optimizer, so
`Optimizer.__init__` is not called.

A trainer may put a proxy around our wrapper, with a class derived from the wrapper's:

    self._optimizer = optimizer
    self.__class__ = type("Proxy" + name, (Proxy, type(optimizer)), {})

Our methods are then called with the proxy as `self`. Three rules make this work:

    shared object     methods do not set attributes of `self`. All changes are made in an object
                      that the wrapper and the proxy share
    YieldingProperty  a property takes precedence over instance attributes, so it is not used for
                      names that other code sets
    setters           exist for `param_groups`, `state` and `defaults`, which trainers assign

`GradScaler.step` sets two tensors on an optimizer that declares support: `found_inf` (whether the
gradients overflowed) and `grad_scale` (the factor of the gradients; None after `unscale_`). A fused
optimizer uses these tensors. For other optimizers, we unscale and skip.

torch's `Join` and `DistributedDataParallel.join` are rejected. Inside `Join`, a rank without data
repeats the other ranks' collectives. Our collectives depend on decisions in each step
(accumulation, clipping, a gradient scaler) that such a rank does not know.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._arguments import instance
from manyhands._tensors.flat import local_shard

if TYPE_CHECKING:
    from typing_extensions import Self

EVEN_INPUTS = (
    "Give every rank the same number of batches, as manyhands.Cursor does. With "
    "ShardedDataParallel, a rank without data may call optimizer.step() without a backward pass. "
    "With DistributedDataParallel, ddp.join(throw_on_early_termination=True) ends the loop on all "
    "ranks."
)

ParamGroup: TypeAlias = dict[str, Any]

T = TypeVar("T")


def refuse_join(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} does not support torch's Join: a rank without data would not take part in its "
        f"collectives, and the other ranks would wait. {EVEN_INPUTS}"
    )


class YieldingProperty:
    """A property that an attribute of the instance overrides."""

    def __init__(self, compute: Callable[[Any], object]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        return self._compute(instance)


def _property_of_inner(name: str) -> Any:
    def get(wrapper: Any) -> Any:
        return getattr(wrapper._inner_optimizer(), name)

    def set_(wrapper: Any, value: object) -> None:
        setattr(wrapper._inner_optimizer(), name, value)

    return property(get, set_)


@dataclass
class RunningClosure:
    runs: bool = False


class OptimizerWrapper(Optimizer):
    """Base class of wrappers that replace an optimizer."""

    layer: ClassVar[str]  # "rule" or "blocks", the field of `OptimizerLayers`
    _closure: RunningClosure

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        made = super().__new__(cls)
        made._closure = RunningClosure()
        return made

    def _bound(self) -> Optimizer | None:
        raise NotImplementedError

    def _inner_optimizer(self) -> Optimizer:
        inner = self._bound()
        if inner is None:
            name = type(self).__name__
            raise RuntimeError(f"this {name} has no optimizer yet. Pass it: {name}(optimizer).")
        return inner

    @YieldingProperty
    def optimizer(self) -> Optimizer:
        return self._inner_optimizer()

    param_groups: list[ParamGroup] = _property_of_inner("param_groups")
    state: defaultdict[Tensor, Any] = _property_of_inner("state")
    defaults: dict[str, Any] = _property_of_inner("defaults")

    @YieldingProperty
    def _step_supports_amp_scaling(self) -> bool:
        """True: `GradScaler.step` passes the loss scale to us instead of unscaling."""
        # False while a closure runs. Gradients in closures are not scaled, and trainers do not clip
        # if an optimizer declares that it unscales.
        return not self._closure.runs

    def _in_step(self, closure: Callable[[], T]) -> Callable[[], T]:
        def run() -> T:
            self._closure.runs = True
            try:
                return closure()
            finally:
                self._closure.runs = False

        return run

    def stop_agreed(self) -> bool | None:
        """Return whether all ranks have agreed to stop; None without an exchange of notices."""
        return None

    def may_stop_here(self) -> bool:
        """Return whether stopping after this step loses less than continuing."""
        return True

    def join_hook(self, **kwargs: object) -> NoReturn:
        """Reject torch's `Join`, which calls this method on entry."""
        raise refuse_join(type(self).__name__)

    def state_parts(self) -> object:
        """Return the object that saves and loads this layer's state (`state_parts.py`)."""
        return self

    def __getattr__(self, name: str) -> Any:
        # Unset attributes of the wrapper are not forwarded.
        inner: Any = None
        if not name.startswith(("__", "_core", "_inner")):
            inner = self._bound()
        if inner is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if "optimizer" in inner.__dict__ and not hasattr(inner, name):
            inner = inner.optimizer  # inside a trainer's wrapper that may not forward
        return wrapped_attribute(self, inner, name)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} refers to parameters, and cannot be copied or pickled. Save "
            "state_dict()."
        )


def unwrap(optimizer: Optimizer, *, every_layer: bool = False) -> list[Optimizer]:
    """Return an optimizer and inner optimizers, outermost first."""
    # Wrappers share state and groups with the inner optimizer. An optimizer with separate state is
    # the last, unless `every_layer` is True.
    several = ""
    if isinstance(optimizer, list):
        several = "From a list, pass the last one to step."
    found = [instance("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer", several)]
    while True:
        outer = found[-1]
        inner = getattr(outer, "optimizer", None)
        # A proxy's `optimizer` may refer to an earlier layer.
        if not isinstance(inner, Optimizer) or any(inner is each for each in found):
            return found
        same = inner.state is outer.state and inner.param_groups is outer.param_groups
        if not every_layer and not same:
            return found
        found.append(inner)


Layer = TypeVar("Layer")


def find_layer(optimizer: Optimizer, kind: type[Layer]) -> Layer | None:
    for layer in unwrap(optimizer, every_layer=True):
        if isinstance(layer, kind):
            return layer
    return None


def params_of(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the parameters of all groups, or their numbers in a state dict."""
    params: list[Any] = []
    for group in groups:
        params += group["params"]
    return params


def weak_hook(method: Callable[[], object]) -> Callable[..., None]:
    """Return a hook that calls a method through a weak reference."""
    reference = weakref.WeakMethod(method)

    def hook(*_: object) -> None:
        call = reference()
        if call is not None:
            call()

    return hook


def gradient_ranks(optimizer: Optimizer) -> Any:
    """Return the `RankGroup` that averages gradients, or None."""
    for layer in unwrap(optimizer, every_layer=True):
        # Look up the class, because wrappers forward missing attributes.
        if hasattr(type(layer), "gradient_ranks"):
            return layer.gradient_ranks  # type: ignore[attr-defined]
    return None


def wrapped_attribute(wrapper: object, wrapped: object, name: str) -> Any:
    try:
        return getattr(wrapped, name)
    except AttributeError as error:
        message = (
            f"{type(wrapper).__name__!r} object has no attribute {name!r}, and neither has the "
            f"{type(wrapped).__name__} inside"
        )
        if name == "join":  # the method of torch's DDP
            message = f"{message}. {EVEN_INPUTS}"
        raise AttributeError(message, name=name, obj=wrapper) from error


@dataclass(frozen=True)
class ScalerSignals:
    """The scaler's tensors for this step; both None if there is no scaler."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @classmethod
    def read_from(cls, *optimizers: Optimizer) -> ScalerSignals:
        """Return the signals from the first of these optimizers with any."""
        for optimizer in optimizers:
            # Wrappers forward getattr, so read the instance's dict.
            own = optimizer.__dict__
            if own.get("found_inf") is not None:
                return cls(own.get("grad_scale"), own["found_inf"])
        return cls()

    @property
    def present(self) -> bool:
        return self.found_inf is not None


class LossScaler(Protocol):
    """A gradient scaler with torch's interface for the scale."""

    def get_scale(self) -> float: ...


@dataclass
class LossScale:
    """The factor of gradients when measured.

    With a known `scaler`, the scale is read in backward. Otherwise, the scaler provides the scale
    at the step.
    """

    scaler: LossScaler | None = None
    last: float | None = None  # the scale of the last step

    @property
    def known(self) -> bool:
        return self.scaler is not None

    def in_backward(self) -> Tensor | float:
        """Return the current scale, with no synchronization."""
        scaler: Any = self.scaler
        if scaler is None or (hasattr(scaler, "is_enabled") and not scaler.is_enabled()):
            return 1.0
        if not hasattr(scaler, "_scale"):
            return float(scaler.get_scale())
        scale: Tensor | None = scaler._scale  # get_scale() would synchronize
        if scale is None:
            return 1.0
        return scale

    def update(self, scale: float) -> bool:
        """Store the scale of this step; return whether it changed."""
        changed = scale != self.last
        self.last = scale
        return changed


def supports_amp(optimizer: Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@contextmanager
def _signals_left_on(signals: ScalerSignals, optimizer: Optimizer) -> Iterator[None]:
    # A scaler that stepped the inner optimizer directly has already set the signals.
    before = dict(optimizer.__dict__)
    optimizer.grad_scale = signals.grad_scale  # type: ignore[attr-defined]
    optimizer.found_inf = signals.found_inf  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in ("grad_scale", "found_inf"):
            if name in before:
                setattr(optimizer, name, before[name])
            else:
                delattr(optimizer, name)


@contextmanager
def apply_signals(
    signals: ScalerSignals, optimizer: Optimizer, supports_amp: bool
) -> Iterator[None]:
    """Pass the signals to the optimizer for a step, or unscale the gradients."""
    if supports_amp and signals.present:
        with _signals_left_on(signals, optimizer):
            yield
        return
    if signals.grad_scale is not None:
        unscale(optimizer.param_groups, signals.grad_scale)
    if "found_inf" in optimizer.__dict__:  # the scaler stepped this optimizer directly
        with _signals_left_on(ScalerSignals(), optimizer):
            yield
        return
    yield


@torch.no_grad()
def unscale(param_groups: Sequence[ParamGroup], grad_scale: Tensor) -> None:
    """Divide the gradients by the loss scale, as `GradScaler.unscale_` does."""
    # Computed in float64, for the same rounding as in torch.
    inverse = grad_scale.double().reciprocal().float()
    for param in params_of(param_groups):
        if param.grad is not None:
            local_shard(param.grad).mul_(inverse.to(param.grad.device))

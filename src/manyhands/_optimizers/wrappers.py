"""Wrap optimizers in optimizers, and read the signals that a gradient scaler leaves on them.

An optimizer around another *is* a `torch.optim.Optimizer`, without further state.

`param_groups`, `state`, `defaults` and hooks are the inner optimizer's, so that schedulers, scalers
and hooks act once and on the right thing. It therefore does not call `Optimizer.__init__`, which
would make a second set of them.

A trainer puts a proxy around ours, of a class that it derives from ours, and keeps the optimizer
in an attribute of its own:

    self._optimizer = optimizer self.__class__ = type("Proxy" + name, (Proxy, type(optimizer)), {})

A method of ours is then called with the proxy as `self`. Three things keep that right:

    one object        what a method sets on `self` would be set on the proxy, where the optimizer
                      does not see it. So methods of ours set nothing: all that changes is in an
                      object that the optimizer holds, and the proxy has or finds the same one
    YieldingProperty  a property comes before an instance's attributes. A name that others set on
                      an instance is therefore not a plain property
    setters           of `param_groups`, `state` and `defaults`, which trainers assign to

`scaler.step(optimizer)` of a gradient scaler leaves two tensors on an optimizer that declares that
it can take them: `found_inf` (did the gradients overflow?) and `grad_scale` (what they are still
multiplied with; None after `unscale_`). An optimizer with a fused step uses them itself; for the
others we unscale and skip, as the scaler would have. `LossScale` is for gradients that are measured
in backward, before the scaler leaves anything.
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
from manyhands._optimizers.uneven import EVEN_INPUTS, refuse_join
from manyhands._tensors.flat import local_shard

if TYPE_CHECKING:
    from typing_extensions import Self

ParamGroup: TypeAlias = dict[str, Any]  # "params", and options of types that only a class knows

T = TypeVar("T")


class YieldingProperty:
    """A property that gives way to an attribute of the instance."""

    def __init__(self, compute: Callable[[Any], object]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        return self._compute(instance)


def _property_of_inner(name: str) -> Any:
    """Return a property: an attribute of the optimizer inside, which may be set."""

    def get(wrapper: Any) -> Any:
        return getattr(wrapper._inner_optimizer(), name)

    def set_(wrapper: Any, value: object) -> None:
        setattr(wrapper._inner_optimizer(), name, value)

    return property(get, set_)


@dataclass
class RunningClosure:
    """Whether a step's closure runs at present."""

    runs: bool = False


class OptimizerWrapper(Optimizer):
    """Base class of wrappers that take an optimizer's place."""

    layer: ClassVar[str]  # "rule" or "blocks": which of the `OptimizerLayers` it is
    _closure: RunningClosure

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        made = super().__new__(cls)
        made._closure = RunningClosure()
        return made

    def _bound(self) -> Optimizer | None:
        """Return the optimizer inside, if there is one yet."""
        raise NotImplementedError

    def _inner_optimizer(self) -> Optimizer:
        """Return the optimizer inside, or raise."""
        inner = self._bound()
        if inner is None:
            name = type(self).__name__
            raise RuntimeError(f"this {name} has no optimizer yet. Give it one: {name}(optimizer).")
        return inner

    @YieldingProperty
    def optimizer(self) -> Optimizer:
        """The optimizer inside."""
        return self._inner_optimizer()

    param_groups: list[ParamGroup] = _property_of_inner("param_groups")
    state: defaultdict[Tensor, Any] = _property_of_inner("state")
    defaults: dict[str, Any] = _property_of_inner("defaults")

    @YieldingProperty
    def _step_supports_amp_scaling(self) -> bool:
        """`GradScaler.step` leaves the loss scale with us instead of unscaling."""
        # False while a closure runs, in which gradients are not scaled: a scaler takes no closure.
        # A trainer may clip gradients there, and refuse to if an optimizer says that it unscales.
        return not self._closure.runs

    def _in_step(self, closure: Callable[[], T]) -> Callable[[], T]:
        """Return the closure, noting while it runs that it does."""

        def run() -> T:
            self._closure.runs = True
            try:
                return closure()
            finally:
                self._closure.runs = False

        return run

    def after_sync(self, seconds: float) -> None:
        """Take note of the seconds that blocks around this optimizer took for a sync."""

    def stop_agreed(self) -> bool | None:
        """Whether the training is to stop here, as all ranks know from collectives of this layer.

        None if this layer does not know what the other ranks were told.
        """
        return None

    def may_stop_here(self) -> bool:
        """Whether stopping after this step loses less than going on, as far as this rank knows."""
        return True

    def join_hook(self, **kwargs: object) -> NoReturn:
        """Refuse torch's `Join`, which calls this when it is made."""
        raise refuse_join(type(self).__name__)

    def state_parts(self) -> object:
        """Return what saves and loads the state that this layer adds (`state_parts.py`)."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Everything else (hooks, the inner optimizer's own attributes) is the inner one's."""
        # An attribute of ours that is not set yet is no attribute of the inner one.
        inner: Any = None
        if not name.startswith(("__", "_core", "_inner")):
            inner = self._bound()
        if inner is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if "optimizer" in inner.__dict__ and not hasattr(inner, name):
            inner = inner.optimizer  # a trainer's wrapper may forward nothing
        return wrapped_attribute(self, inner, name)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is tied to its parameters, and is not pickled. Save state_dict."
        )


def unwrap(optimizer: Optimizer, *, every_layer: bool = False) -> list[Optimizer]:
    """Return an optimizer and those inside it, from the outermost in."""
    # A wrapper shows the inner one's state and parameter groups as its own, as ours do, and those
    # that trainers put around ours. An optimizer that keeps state of its own beside the one that it
    # calls is not looked into, unless `every_layer` is True.
    several = ""
    if isinstance(optimizer, list):
        several = "Of several, give the last one to step."
    found = [instance("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer", several)]
    while True:
        outer = found[-1]
        inner = getattr(outer, "optimizer", None)
        # A proxy's `optimizer` may lead back to a layer that was seen.
        if not isinstance(inner, Optimizer) or any(inner is each for each in found):
            return found
        same = inner.state is outer.state and inner.param_groups is outer.param_groups
        if not every_layer and not same:
            return found
        found.append(inner)


Layer = TypeVar("Layer")


def find_layer(optimizer: Optimizer, kind: type[Layer]) -> Layer | None:
    """Return the first layer of this class, from the outermost in; None if there is none."""
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
    """Return a hook that calls a method as long as its object lives, and keeps nothing alive."""
    reference = weakref.WeakMethod(method)

    def hook(*_: object) -> None:
        call = reference()
        if call is not None:
            call()

    return hook


def gradient_ranks(optimizer: Optimizer) -> Any:
    """Return the `RankGroup` whose gradients are averaged for a step; None if no layer says so."""
    for layer in unwrap(optimizer, every_layer=True):
        # on the class, as wrappers forward what they do not have
        if hasattr(type(layer), "gradient_ranks"):
            return layer.gradient_ranks  # type: ignore[attr-defined]
    return None


def wrapped_attribute(wrapper: object, wrapped: object, name: str) -> Any:
    """Return the wrapped object's attribute, or raise an AttributeError about the wrapper."""
    # Otherwise the error would name a class that the user has never written.
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
    """The scaler's tensors for this step; both None without a scaler."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @classmethod
    def read_from(cls, *optimizers: Optimizer) -> ScalerSignals:
        """Return what a `GradScaler` left on the first of these optimizers that has something."""
        for optimizer in optimizers:
            # Not getattr: a wrapper forwards the attributes that it does not have.
            own = optimizer.__dict__
            if own.get("found_inf") is not None:
                return cls(own.get("grad_scale"), own["found_inf"])
        return cls()

    @property
    def present(self) -> bool:
        return self.found_inf is not None


class LossScaler(Protocol):
    """A gradient scaler: torch's, or any other that says its scale."""

    def get_scale(self) -> float: ...


class LossScale:
    """What gradients are multiplied by when they are measured: the one owner of that number.

    If `scaler` is known, the scale is read in backward. If not, the scaler leaves the scale on the
    optimizer at the step, after the gradients have been measured; it is then divided out of the
    measurement, and `last` is that of the last step.
    """

    def __init__(self, scaler: LossScaler | None = None) -> None:
        self.scaler = scaler
        self.last: float | None = None

    @property
    def known(self) -> bool:
        """Whether the scale is known in backward."""
        return self.scaler is not None

    def in_backward(self) -> Tensor | float:
        """Return the scale of the gradients at present, without waiting for the device."""
        scaler: Any = self.scaler
        if scaler is None or (hasattr(scaler, "is_enabled") and not scaler.is_enabled()):
            return 1.0
        if not hasattr(scaler, "_scale"):
            return float(scaler.get_scale())
        scale: Tensor | None = scaler._scale  # get_scale() would copy it to the host
        if scale is None:
            return 1.0
        return scale

    def at_step(self, signals: ScalerSignals) -> Tensor | None:
        """Return the scale that is known only now; None if there is none."""
        if self.known:
            return None
        return signals.grad_scale

    def update(self, scale: float) -> bool:
        """Keep the scale of this step; return whether it is another one than the last step's."""
        changed = scale != self.last
        self.last = scale
        return changed


def supports_amp(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's own step unscales gradients and skips overflows."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@contextmanager
def _signals_left_on(signals: ScalerSignals, optimizer: Optimizer) -> Iterator[None]:
    """Set the signals on an inner optimizer for the length of its step."""
    # A scaler that was given the inner optimizer has left its signals there already.
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
    """Apply the signals around a step: pass them to the optimizer, or unscale in its place."""
    if supports_amp and signals.present:
        with _signals_left_on(signals, optimizer):
            yield
        return
    if signals.grad_scale is not None:
        unscale(optimizer.param_groups, signals.grad_scale)
    if (
        "found_inf" in optimizer.__dict__
    ):  # a scaler that was given this optimizer has left it there
        with _signals_left_on(ScalerSignals(), optimizer):
            yield
        return
    yield


@torch.no_grad()
def unscale(param_groups: Sequence[ParamGroup], grad_scale: Tensor) -> None:
    """Divide the gradients by the loss scale, as `GradScaler.unscale_` does."""
    # By way of float64, as torch does, so that both round alike.
    inverse = grad_scale.double().reciprocal().float()
    for param in params_of(param_groups):
        if param.grad is not None:
            local_shard(param.grad).mul_(inverse.to(param.grad.device))

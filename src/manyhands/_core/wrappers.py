"""Wrappers around optimizers and around models.

**An optimizer around another** *is* a `torch.optim.Optimizer`, without state of its own.

`param_groups`, `state`, `defaults` and hooks are the inner optimizer's, so that schedulers, scalers
and hooks act once and on the right thing. It therefore does not call `Optimizer.__init__`, which
would make a second set of them.

A trainer puts a proxy around ours, of a class that it derives from ours, and keeps the optimizer
in an attribute of its own. In Lightning and Fabric:

    self._optimizer = optimizer
    self.__class__ = type("Lightning" + name, (LightningOptimizer, type(optimizer)), {})

A method of ours is then called with the proxy as `self`. Three things keep that right:

    YieldingProperty  a property comes before an instance's attributes, so a private property of
                      ours would take the place of the proxy's attribute of that name
    SharedAttribute   what a method sets would be set on the proxy, where the optimizer does not
                      see it, and go on hiding the optimizer's own
    setters           of `param_groups`, `state` and `defaults`, which trainers assign to

**Modules around a model** put a name of their own into the names of its parameters: `module.` (data
parallelism), `_orig_mod.` (torch.compile), `_fsdp_wrapped_module.` (FSDP),
`_checkpoint_wrapped_module.` (activation checkpointing). The plain model has none of them.

An optimizer does not know its modules. What needs them searches Python's garbage collector, which
is slow: at construction, or when an error is likely.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Generic, TypeVar, overload

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

INNER = "_fsdp_wrapped_module"  # in names of parameters; torch's own tools know it, and drop it
CHECKPOINTED = "_checkpoint_wrapped_module"  # torch's wrapper takes it out of its state dict

# No user's module has these names, so they are left out wherever they occur. `module` may be a
# user's name as well, and is left out only below the classes of wrappers.
WRAPPER_NAMES = ("_orig_mod", CHECKPOINTED, INNER)
TORCH_WRAPPERS = (DistributedDataParallel, nn.DataParallel)


def wrapped_attribute(wrapper: Any, wrapped: Any, name: str) -> Any:
    """Return the wrapped object's attribute, or raise an AttributeError about the wrapper.

    Otherwise the error would name a class that the user has never written.
    """
    try:
        return getattr(wrapped, name)
    except AttributeError as error:
        raise AttributeError(
            f"{type(wrapper).__name__!r} object has no attribute {name!r}, and neither has the "
            f"{type(wrapped).__name__} inside",
            name=name,
            obj=wrapper,
        ) from error


T = TypeVar("T")

SHARED = "_manyhands_shared"  # a name that no proxy has for anything else


class YieldingProperty(Generic[T]):
    """A property that gives way to an attribute of the instance."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> YieldingProperty[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: Any, owner: type) -> YieldingProperty[T] | T:
        return self if instance is None else self._compute(instance)


class SharedAttribute(Generic[T]):
    """An attribute that an optimizer and its proxies have in common, whoever sets it.

    Its value is in a dict that the optimizer holds. A proxy that copies the optimizer's attributes
    has the same dict, and one that looks up what it lacks finds it.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> SharedAttribute[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: Any, owner: type) -> SharedAttribute[T] | T:
        if instance is None:
            return self
        try:
            value: T = getattr(instance, SHARED)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None
        return value

    def __set__(self, instance: Any, value: T) -> None:
        getattr(instance, SHARED)[self._name] = value


class SharingOptimizer(Optimizer):
    """An optimizer with `SharedAttribute`s."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        vars(made)[SHARED] = {}
        return made


class OptimizerWrapper(SharingOptimizer):
    """Base class of wrappers that take an optimizer's place; `_inner` is that optimizer."""

    layer: ClassVar[str]  # "rule" or "blocks": which of the `OptimizerLayers` it is
    _inner: Optimizer | None
    _closure_runs = SharedAttribute[bool]()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        made._closure_runs = False
        return made

    @YieldingProperty
    def _inner_optimizer(self) -> Optimizer:
        assert self._inner is not None
        return self._inner

    @YieldingProperty
    def optimizer(self) -> Optimizer:
        """The optimizer inside."""
        return self._inner_optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self._inner_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self._inner_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self._inner_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._inner_optimizer.defaults = defaults

    @YieldingProperty
    def _step_supports_amp_scaling(self) -> bool:
        """`GradScaler.step` leaves the loss scale with us instead of unscaling (see `amp.py`).

        False while a closure runs, in which gradients are not scaled: a scaler takes no closure.
        Lightning clips gradients there, and refuses to if an optimizer says that it unscales.
        """
        return not self._closure_runs

    def _in_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure, noting while it runs that it does."""

        def run() -> Any:
            self._closure_runs = True
            try:
                return closure()
            finally:
                self._closure_runs = False

        return run

    def state_parts(self) -> Any:
        """Return what saves and loads the state that this layer adds (`state_parts.py`)."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Everything else (hooks, the inner optimizer's own attributes) is the inner one's."""
        inner = self.__dict__.get("_inner")
        if inner is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return wrapped_attribute(self, inner, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} is not pickled: it is tied to its parameters. Save "
            "state_dict(), and load it into one made around the optimizer as before."
        )


def unwrap(optimizer: Optimizer, *, every_layer: bool = False) -> list[Optimizer]:
    """Return an optimizer and those inside it, from the outermost in.

    A wrapper shows the inner one's state and parameter groups as its own, as ours do, and those
    that trainers put around ours. An optimizer that keeps state of its own beside the one that it
    calls is not looked into, unless `every_layer` is True.
    """
    found = [optimizer]
    while True:
        outer, inner = found[-1], getattr(found[-1], "optimizer", None)
        if not isinstance(inner, Optimizer) or any(inner is each for each in found):
            return found
        if not every_layer and not _shows_state_of(inner, outer):
            return found
        found.append(inner)


def _shows_state_of(inner: Optimizer, outer: Optimizer) -> bool:
    return inner.state is outer.state and inner.param_groups is outer.param_groups


Layer = TypeVar("Layer")


def find_layer(optimizer: Any, kind: type[Layer]) -> Layer | None:
    """Return the first layer of this class, from the outermost in; None if there is none."""
    layers = unwrap(optimizer, every_layer=True)
    return next((each for each in layers if isinstance(each, kind)), None)


class ModuleWrapper(nn.Module):
    """Base class of our modules around a model. Names in the model do not change for it."""

    inner_name: ClassVar[str] = "module"  # of the model, among this module's children
    averages_gradients: ClassVar[bool] = False  # of the whole parameters, as DDP does

    def settle(self) -> None:
        """Bring the parameters into their state between steps. Called before they are read."""

    def check_can_save(self, model: nn.Module) -> None:
        """Raise if a checkpoint could not hold the parameters of `model`, which has this inside."""


def no_sync_of(model: nn.Module) -> Callable[[], AbstractContextManager[Any]] | None:
    """Return what makes passes of this model accumulate without averaging over the ranks.

    None: nothing in the model's own class averages them.
    """
    no_sync: Callable[[], AbstractContextManager[Any]] | None = getattr(model, "no_sync", None)
    if no_sync is not None:
        return no_sync
    set_sync = getattr(model, "set_requires_gradient_sync", None)  # of `fully_shard`
    if set_sync is None:
        return None

    @contextmanager
    def without_sync() -> Iterator[None]:
        set_sync(False)
        try:
            yield
        finally:
            set_sync(True)

    return without_sync


def plain_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with its plain prefix; a shared module comes once for each of its names."""
    yield prefix, module
    inner = module.inner_name if isinstance(module, ModuleWrapper) else "module"
    wraps = isinstance(module, (ModuleWrapper, *TORCH_WRAPPERS))
    for name, child in module._modules.items():
        if child is not None:
            is_wrapped = name in WRAPPER_NAMES or (wraps and name == inner)
            yield from plain_modules(child, prefix if is_wrapped else f"{prefix}{name}.")


def plain_name(name: str, wrappers: tuple[str, ...] = (CHECKPOINTED, INNER)) -> str:
    """Return the name of a parameter without the names of these wrappers."""
    for wrapper in wrappers:
        name = name.replace(f"{wrapper}.", "")
    return name


def check_not_averaged_inside(module: nn.Module) -> None:
    """Raise a TypeError if a module that averages gradients is inside."""
    for inside in module.modules():
        ours = isinstance(inside, ModuleWrapper) and inside.averages_gradients
        if ours or isinstance(inside, DistributedDataParallel):
            raise TypeError(
                f"the module contains a {type(inside).__name__} already, and gradients would be "
                "averaged twice. Wrap the bare module."
            )


def modules_holding(
    params: Sequence[Tensor], wanted: Callable[[nn.Module], bool] = lambda module: True
) -> Iterator[tuple[nn.Module, set[int]]]:
    """Yield every live module with any of these parameters, and the indices of those it has.

    Only `wanted` modules are looked into. Modules of before `gc.freeze()` are not found.
    """
    index_of = {id(param): index for index, param in enumerate(params)}
    for thing in gc.get_objects():
        # type(thing), because isinstance() asks `__class__`, which runs a lazy proxy's code.
        if issubclass(type(thing), nn.Module) and "_parameters" in vars(thing) and wanted(thing):
            found = {index_of[id(p)] for p in thing.parameters() if id(p) in index_of}
            if found:
                yield thing, found

"""An optimizer around another: it *is* a `torch.optim.Optimizer`, without state of its own.

`param_groups`, `state`, `defaults` and hooks are the inner optimizer's, so that schedulers, scalers
and hooks act once and on the right thing. It therefore does not call `Optimizer.__init__`, which
would make a second set of them.

Trainers wrap the wrapper once more, in a class that they derive from ours (Lightning and Fabric
do: `type("Lightning" + name, (LightningOptimizer, type(optimizer)), {})`), and keep the optimizer
in an attribute of their own. A property comes before an instance's attributes, so a private
property of ours with the name of that attribute would take its place. `yielding` makes
properties that come after them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch.optim import Optimizer

from manyhands._missing import wrapped_attribute

T = TypeVar("T")


class yielding(Generic[T]):
    """A property that an attribute of the instance, such as a trainer's proxy sets, goes before."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        return self if instance is None else self._compute(instance)  # type: ignore[return-value]


class AroundOptimizer(Optimizer):
    """Base of what is used in an optimizer's place; `_inner` is that one."""

    _inner: Optimizer | None

    @yielding
    def _inner_optimizer(self) -> Optimizer:
        assert self._inner is not None
        return self._inner

    @yielding
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
    def state(self) -> Any:  # type: ignore[override]
        return self._inner_optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._inner_optimizer.defaults

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

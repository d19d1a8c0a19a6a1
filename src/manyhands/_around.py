"""An optimizer around another: it *is* a `torch.optim.Optimizer`, without state of its own.

`param_groups`, `state`, `defaults` and hooks are the inner optimizer's, so that schedulers, scalers
and hooks act once and on the right thing. It therefore does not call `Optimizer.__init__`, which
would make a second set of them.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class AroundOptimizer(Optimizer):
    """Base of what is used in an optimizer's place; `_inner` is that one."""

    _inner: Optimizer | None

    @property
    def _optimizer(self) -> Optimizer:
        assert self._inner is not None
        return self._inner

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer inside."""
        return self._optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        """Everything else (hooks, the inner optimizer's own attributes) is the inner one's."""
        inner = self.__dict__.get("_inner")
        if inner is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(inner, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} is not pickled: it is tied to its parameters. Save "
            "state_dict(), and load it into one made around the optimizer as before."
        )

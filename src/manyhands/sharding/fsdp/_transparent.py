"""A module around another that can be used in its place: its names, attributes and members."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from manyhands._core.modules import INNER, ModuleWrapper, plain_name
from manyhands._core.wrappers import wrapped_attribute


class TransparentWrapper(ModuleWrapper):
    """Looks up attributes that it lacks in the module registered as `INNER`."""

    inner_name = INNER

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        inner = self._modules[INNER]
        assert inner is not None
        return inner

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers, by the plain model's names."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield plain_name(name), buffer

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped module's attribute."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            # While __init__ runs there is no wrapped module, and `self.module` would recurse.
            if INNER not in self.__dict__.get("_modules", {}):
                raise
            return wrapped_attribute(self, self.module, name)

    # Python looks these up on the class, so __getattr__ does not reach them.

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True  # otherwise Python would call __len__, and most modules have no length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            f"a {type(self).__name__} is not copied: a copy would have no process group. Copy the "
            "plain model before wrapping, or load state_dict() into one."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a {type(self).__name__} is not pickled: a file cannot hold its process group. Save "
            "state_dict(), or use manyhands.save."
        )

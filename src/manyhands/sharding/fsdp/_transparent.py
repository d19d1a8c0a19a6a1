"""A module around another that is used as the other one is: its names, attributes and members."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from manyhands._core.wrapper import wrapped_attribute

INNER = "_fsdp_wrapped_module"  # in names of parameters; torch's own tools know it, and drop it
CHECKPOINTED = "_checkpoint_wrapped_module"  # which torch's wrapper takes out of its state dict


def plain(name: str) -> str:
    """A parameter's name in the plain model's state dict."""
    return name.replace(f"{INNER}.", "").replace(f"{CHECKPOINTED}.", "")


class AsWrapped(nn.Module):
    """What it does not have itself is looked for in the module registered as `INNER`."""

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        inner = self._modules[INNER]
        assert inner is not None
        return inner

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Buffers, by the plain model's names."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield plain(name), buffer

    def __getattr__(self, name: str) -> Any:
        """What this module does not have is the wrapped one's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if INNER not in self.__dict__.get("_modules", {}):
                raise
            return wrapped_attribute(self, self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True  # without asking for a length, which most modules do not have

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload]

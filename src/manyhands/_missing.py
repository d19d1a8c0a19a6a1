"""What an object looks up in the one that it wraps. What neither has is missing in its own name."""

from __future__ import annotations

from typing import Any


def wrapped_attribute(wrapper: Any, wrapped: Any, name: str) -> Any:
    """The wrapped object's attribute; without one, an AttributeError about the wrapper."""
    try:
        return getattr(wrapped, name)
    except AttributeError as error:
        raise AttributeError(
            f"{type(wrapper).__name__!r} object has no attribute {name!r}, and neither has the "
            f"{type(wrapped).__name__} inside",
            name=name,
            obj=wrapper,
        ) from error

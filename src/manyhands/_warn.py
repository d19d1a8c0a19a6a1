"""Issue warnings that point to the user's line of code."""

import sys
import warnings
from types import FrameType

PASSED_OVER = {"manyhands", "torch", "contextlib", "functools"}


def is_passed_over(frame: FrameType) -> bool:
    """Return whether a frame is inside manyhands, torch or the standard library's wrappers."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in PASSED_OVER


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the location of the innermost frame in user code."""
    frame = sys._getframe(1)
    level = 2
    while frame.f_back and is_passed_over(frame):
        frame = frame.f_back
        level = level + 1
    warnings.warn(message, category, stacklevel=level)

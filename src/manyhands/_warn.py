"""Warnings that name the user's line, however deep in this package the reason was found."""

import sys
import warnings
from types import FrameType

PASSED_OVER = {"manyhands", "torch", "contextlib", "functools"}


def is_passed_over(frame: FrameType) -> bool:
    """Return whether a frame is this package's or torch's, and not the user's."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in PASSED_OVER


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that is neither this package's nor torch's."""
    frame = sys._getframe(1)
    level = 2
    while frame.f_back and is_passed_over(frame):
        frame = frame.f_back
        level = level + 1
    warnings.warn(message, category, stacklevel=level)

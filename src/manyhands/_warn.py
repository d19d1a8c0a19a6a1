"""Find the user's line of code, for warnings and errors."""

import linecache
import os
import sys
import warnings
from types import FrameType

PASSED_OVER = {"manyhands", "torch", "contextlib", "functools"}


def is_passed_over(frame: FrameType) -> bool:
    """Return whether a frame is inside manyhands, torch or the standard library's wrappers."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in PASSED_OVER


def user_line(frame: FrameType) -> str:
    """Return the innermost line of user code, as in "loss.backward() (train.py, line 12)"."""
    while frame.f_back is not None and is_passed_over(frame):
        frame = frame.f_back
    path = frame.f_code.co_filename
    code = linecache.getline(path, frame.f_lineno).strip() or f"{frame.f_code.co_name}()"
    return f"{code} ({os.path.basename(path)}, line {frame.f_lineno})"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the location of the innermost frame in user code."""
    frame = sys._getframe(1)
    level = 2
    while frame.f_back and is_passed_over(frame):
        frame = frame.f_back
        level = level + 1
    warnings.warn(message, category, stacklevel=level)

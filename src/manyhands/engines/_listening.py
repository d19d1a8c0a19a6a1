"""Where a stop notice comes from: signals, a file that appears, and what an engine says.

    SIGTERM          torchrun, `manyhands run`, Slurm, Kubernetes, systemd, most others
    SIGUSR1          Slurm, where a job asks for it: `--signal=USR1@120`
    SIGUSR2          submitit
    a file           MANYHANDS_STOP_FILE, or `mh.start(stop_file=...)`
    Ray's draining   `_ray.py`

A handler only notes the signal; the training loop finds the note at the end of its step. The
handlers that were there before are called by `Job.leave`, when everything is saved: submitit's
puts the job into the queue again.

**DataLoader workers.** Some engines signal a whole process group: torchrun's agent, systemd, Slurm.
That would kill the processes that load data, and the step under way could not be finished. So a
process that a DataLoader forks blocks these signals. It ends with its DataLoader, or when its
parent is gone, as ever.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from manyhands._core.stop_notice import stop_notice

STOP_FILE_VARIABLE = "MANYHANDS_STOP_FILE"
GRACE_VARIABLE = "MANYHANDS_GRACE"

Handler = Callable[[int, FrameType | None], Any] | int | None


class Listener:
    """The signals that this process listens to, and their earlier handlers."""

    def __init__(self) -> None:
        self.earlier: dict[int, Handler] = {}
        self._files: set[Path] = set()
        self._chosen = False  # whether the script has said which signals
        self._listens = False
        self._hooked_forks = False

    def start(self, numbers: Iterable[int] | None = None, file: str | None = None) -> None:
        """Listen to these signals and to this file. It may be called often.

        Without a choice of the script's, the signals are the engine's.
        """
        if self._listens and numbers is None and file is None:  # as `stopping` asks in every step
            return
        stop_notice.grace = _grace() or stop_notice.grace
        file = file or os.environ.get(STOP_FILE_VARIABLE)
        if file and (path := Path(file).absolute()) not in self._files:
            self._files.add(path)
            stop_notice.sources.append(lambda: str(path) if path.exists() else "")
        # Python allows handlers in the main thread only. Ray trains in another one, and says
        # itself when to stop.
        if threading.current_thread() is not threading.main_thread():
            return
        if numbers is None:
            numbers = [] if self._chosen else _signals_of_engine()
        else:
            self._chosen = True
        self._listens = True
        for number in numbers:
            if number not in self.earlier:
                # Noted first: a signal may come between the two lines.
                self.earlier[number] = signal.getsignal(number)
                signal.signal(number, _note_signal)
        if not self._hooked_forks and hasattr(os, "register_at_fork"):
            self._hooked_forks = True
            os.register_at_fork(after_in_child=self._after_fork)

    def stop(self) -> None:
        """Give the signals back to their earlier handlers, and forget the notice."""
        for number, handler in self.earlier.items():
            if signal.getsignal(number) is _note_signal:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self.earlier.clear()
        self._files.clear()
        self._chosen = self._listens = False
        stop_notice.sources.clear()
        stop_notice.clear()

    def call_earlier_handler(self) -> None:
        """Call the handler that the received signal had before, if it is a function."""
        for number, handler in list(self.earlier.items()):
            if signal.Signals(number).name == stop_notice.reason and callable(handler):
                handler(number, None)

    def _after_fork(self) -> None:
        if self.earlier and _is_data_loading(sys._getframe()):
            signal.pthread_sigmask(signal.SIG_BLOCK, self.earlier.keys())


listener = Listener()


def _note_signal(number: int, _: FrameType | None) -> None:
    stop_notice.give(signal.Signals(number).name)


def _grace() -> float | None:
    """Return the seconds from a notice to the end, if the environment says them."""
    text = os.environ.get(GRACE_VARIABLE)
    try:
        return float(text) if text else None
    except ValueError as error:
        raise ValueError(
            f"{GRACE_VARIABLE} is the number of seconds between a stop notice and the end of the "
            f"process, got {text!r}."
        ) from error


def _signals_of_engine() -> list[int]:
    """Return the signals that this process's engine stops it with, as far as the system has them.

    SIGUSR1 and SIGUSR2 mean other things elsewhere, such as "print the stack".
    """
    names = ["SIGTERM"]
    if "SLURM_JOB_ID" in os.environ:
        names.append("SIGUSR1")
    if "SUBMITIT_EXECUTOR" in os.environ:
        names.append(f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}")
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def _is_data_loading(frame: FrameType | None) -> bool:
    """Return whether a DataLoader is among the callers: a fork begins with its parent's stack."""
    from torch.utils.data import dataloader

    while frame is not None:
        if frame.f_code.co_filename == dataloader.__file__:
            return True
        frame = frame.f_back
    return False

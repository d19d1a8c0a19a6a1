"""Listen for stop notices and agree on stopping: `mh.stopping`.

**Sources of a notice**: signals, the appearance of a file, engines:

    SIGTERM          torchrun, `manyhands run`, Slurm, Kubernetes, systemd, most other engines
    SIGUSR1          Slurm, if a job requests it: `--signal=USR1@120`
    SIGUSR2          submitit
    a file           MANYHANDS_STOP_FILE
    Ray's draining   `_ray.py`

A signal handler only records the signal, for the training loop to read at the end of a step.
`Job.leave` calls the earlier handlers; submitit's handler returns the job to the queue.

**DataLoader workers.** Some engines signal a full process group (torchrun's agent, systemd, Slurm),
including processes that load data for the current step. So processes forked by a DataLoader block
these signals. These processes still end with the DataLoader, at Python's exit, or when the parent
ends.

**Hanging processes** are ended by `_hanging.py`.

**Agreement.** A notice reaches ranks at different times, or only some ranks. Ranks that train a
model together must stop after a common step. The answer travels in existing messages where
possible:

    a scaling rule   the collective of every step; all ranks know when `step` returns
    blocks           the report of each worker in a sync round; all stop at the end of the round
    a crew           no message: a worker leaves alone, also with `mh.start(survive=True)`
    otherwise        `StopVote`: a sum of a single number during the next step

A vote starts after a step and is read after the next step, so no rank waits: a notice in step k
ends the training after step k + 1.
"""

from __future__ import annotations

import atexit
import multiprocessing.util  # registers an exit function on import
import os
import re
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from manyhands._arguments import number_in
from manyhands._optimizers.wrappers import OptimizerWrapper, find_layer, gradient_ranks
from manyhands._ranks.presence import explained
from manyhands._ranks.ranks import RankGroup, members_change
from manyhands._ranks.stop_notice import stop_notice
from manyhands.engines._hanging import HangWatch

STOP_FILE_VARIABLE = "MANYHANDS_STOP_FILE"
GRACE_VARIABLE = "MANYHANDS_GRACE"

Handler = Callable[[int, FrameType | None], object] | int | None


# -- listening -------------------------------------------------------------------------------------


class Listener:
    """The signals that this process listens for, with the earlier handlers."""

    def __init__(self) -> None:
        self.earlier: dict[int, Handler] = {}
        self._files: set[Path] = set()
        self._listens = False
        self._hooked = False
        self._hang_watch: HangWatch | None = None

    def start(self) -> None:
        if self._listens:  # called in every step
            return
        stop_notice.grace = number_in(os.environ, GRACE_VARIABLE, float, 0.0) or stop_notice.grace
        file = os.environ.get(STOP_FILE_VARIABLE)
        if file and (path := Path(file).absolute()) not in self._files:
            self._files.add(path)
            stop_notice.sources.append(lambda: str(path) if path.exists() else "")
        # Python allows handlers only in the main thread. Ray trains in a different thread.
        if threading.current_thread() is not threading.main_thread():
            return
        self._listens = True
        for number in _signals_of_engine():
            if number not in self.earlier:
                # First, because a signal may arrive between the two lines.
                self.earlier[number] = signal.getsignal(number)
                signal.signal(number, _note_signal)
        default = self.earlier.get(signal.SIGTERM) is signal.SIG_DFL
        if default and self._hang_watch is None and os.name == "posix":
            self._hang_watch = HangWatch(_note_signal)
        if not self._hooked and hasattr(os, "register_at_fork"):
            self._hooked = True
            os.register_at_fork(after_in_child=self._after_fork)
            # Exit functions run in reverse: this function before multiprocessing's.
            atexit.register(_end_data_loading)

    def stop(self) -> None:
        """Restore the earlier handlers and clear the notice."""
        for number, handler in self.earlier.items():
            if signal.getsignal(number) is _note_signal:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self.earlier.clear()
        self._files.clear()
        self._listens = False
        if self._hang_watch is not None:
            self._hang_watch.end()
            self._hang_watch = None
        stop_notice.sources.clear()
        stop_notice.clear()

    def call_earlier_handler(self) -> None:
        for number, handler in list(self.earlier.items()):
            if signal.Signals(number).name == stop_notice.reason and callable(handler):
                handler(number, None)

    def _after_fork(self) -> None:
        if self._hang_watch is not None:
            self._hang_watch.forget()
            self._hang_watch = None
            self._listens = False
        if self.earlier and _is_data_loading(sys._getframe()):
            signal.pthread_sigmask(signal.SIG_BLOCK, self.earlier.keys())


listener = Listener()


def _note_signal(number: int, _: FrameType | None) -> None:
    stop_notice.give(signal.Signals(number).name)


def _signals_of_engine() -> list[int]:
    # Under other engines, SIGUSR1 and SIGUSR2 may mean "print the stack".
    names = ["SIGTERM"]
    if "SLURM_JOB_ID" in os.environ:
        names.append("SIGUSR1")
    if "SUBMITIT_EXECUTOR" in os.environ:
        names.append(f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}")
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def _end_data_loading() -> None:
    """End processes that load data. `multiprocessing` sends SIGTERM, which these block."""
    blocking = [child for child in multiprocessing.active_children() if _blocks_sigterm(child)]
    if blocking:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler would raise
    for child in blocking:
        child.kill()


def _blocks_sigterm(child: BaseProcess) -> bool:
    try:
        status = Path(f"/proc/{child.pid}/status").read_text()
    except OSError:  # not Linux, or the process has ended
        return False
    blocked = re.search(r"^SigBlk:\s*(\w+)$", status, re.MULTILINE)
    mask = int(blocked[1], 16) if blocked else 0
    return child.daemon and bool(mask >> (signal.SIGTERM - 1) & 1)


def _is_data_loading(frame: FrameType | None) -> bool:
    """Return whether a DataLoader is on the stack, which forked processes inherit."""
    from torch.utils.data import dataloader

    while frame is not None:
        if frame.f_code.co_filename == dataloader.__file__:
            return True
        frame = frame.f_back
    return False


# -- agreement -------------------------------------------------------------------------------------


def stopping(
    optimizer: Optimizer | None = None, *, process_group: dist.ProcessGroup | None = None
) -> bool:
    """Return whether to stop after this step. All ranks receive the same answer.

    Call it on every rank at the end of every step, with the optimizer: a scaling rule or blocks
    send the answer in messages that they exchange anyway. Otherwise the ranks vote during the next
    step.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for step in range(3):
    ...     optimizer.step()
    ...     if mh.stopping(optimizer):  # SIGTERM or another stop notice
    ...         mh.save("run", model=model, optimizer=optimizer, step=step)
    ...         break

    The process listens from the first call of `stopping` or `start`. After a notice it must finish
    the step and save before the engine kills it, which most engines do after 30 s. Blocks stop at
    the end of a sync round. A worker of a crew stops at the end of a round if its block ends in
    time. If not, it stops immediately and loses the steps since the last round.

    Args:
        optimizer: the optimizer of the loop.
        process_group: the ranks that vote. Default: all ranks.
    """
    listener.start()
    wanted = stop_notice.received
    stop_notice.read = stop_notice.read or wanted
    if members_change():  # this rank leaves alone
        return wanted
    layer = None if optimizer is None else find_layer(optimizer, OptimizerWrapper)
    if layer is not None:
        answer = layer.stop_agreed()
        if answer is not None:
            return answer
        wanted = wanted and layer.may_stop_here()
    ranks = None if optimizer is None or process_group is not None else gradient_ranks(optimizer)
    ranks = ranks or RankGroup.of(process_group)
    if ranks.size == 1:
        return wanted
    group = ranks.group or dist.group.WORLD
    if group not in _votes:
        _votes[group] = StopVote(ranks)
    return _votes[group].ask(wanted)


class StopVote:
    """A sum over ranks, started after a step and read after the next step."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks.with_cpu_group()
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._stopped = False

    def ask(self, wanted: bool) -> bool:
        """Start a vote; return whether any rank wanted to stop in the previous vote."""
        before = self._pending
        if before is not None:
            total, work = before
            with explained(self._ranks):
                work.wait()
            self._stopped = self._stopped or bool(total.item())
        if not self._stopped:  # equal on all ranks
            total = torch.tensor([float(wanted)])
            # `before` must live until the next vote has started: see `PendingSums`.
            self._pending = total, self._ranks.start_all_reduce(total)
        return self._stopped


# A vote lasts for the run, uses a separate group, and ends with the group of the ranks.
_votes: weakref.WeakKeyDictionary[dist.ProcessGroup | None, StopVote] = weakref.WeakKeyDictionary()

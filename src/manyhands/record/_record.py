"""Writing a record: one line a step, by one worker, without waiting for a GPU."""

from __future__ import annotations

import os
import time
from collections import deque
from datetime import datetime
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from manyhands._core.ranks import RankGroup
from manyhands.record._file import FORMAT_VERSION, HEADER, Line, append, flat, open_record


class OnItsWay:
    """A number on a GPU, copied to the host without anybody waiting for it."""

    def __init__(self, value: torch.Tensor) -> None:
        self._host = value.to("cpu", non_blocking=True)  # into pinned memory
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(value.device))

    def is_here(self) -> bool:
        return bool(self._copied.query())

    def number(self) -> int | float:
        self._copied.synchronize()
        return _plain(self._host.item())


def number(value: Any) -> int | float | OnItsWay:
    if isinstance(value, torch.Tensor):
        return OnItsWay(value.detach()) if value.is_cuda else _plain(value.item())
    return _plain(value)


def _plain(value: Any) -> int | float:
    return int(value) if isinstance(value, Integral) else float(value)


def is_number(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return isinstance(value, Real)
    # A DTensor's value takes a collective, and only one worker would call it.
    return value.numel() == 1 and not value.is_complex() and not hasattr(value, "full_tensor")


def describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of {value.dtype} and shape {list(value.shape)}"
    return f"{value!r:.50} of type {type(value).__name__}"


_OUR_KEYS = ("step", "time", HEADER)
_MOST_WAITING = 4  # lines that wait for numbers from a GPU before we wait for the GPU


class Source(Protocol):
    """What a record can ask for values: our optimizers, or anything of yours with `snapshot`."""

    def snapshot(self) -> dict[str, Any]:
        """Plain Python values for one line, under the same keys every time.

        Also called once when the record is made, to learn the keys.
        """


class Record:
    """Write one line a step: the values of each source, and your own.

    >>> import tempfile, manyhands as mh
    >>> path = tempfile.mkdtemp() + "/a.jsonl"
    >>> with mh.Record(path, name="plain SGD") as record:
    ...     for loss in (2.5, 1.5):
    ...         record.step(loss=loss)
    >>> mh.read_record(path).column("loss")
    [2.5, 1.5]

    Make it on every worker, after `init_process_group`: worker `rank` writes, on the others a
    record only checks its arguments, so that a mistake is an error everywhere. There is nothing
    collective in it.

    Surprises. A file that exists is continued (`mode="continue"`), as a resumed run needs it;
    `"new"` refuses it and `"overwrite"` empties it. With `every=10` only each tenth call of
    `step` writes. A number on a GPU is not waited for: its line is written up to four steps
    later, so end with `close()` or use `with`. Without a source that has a "step", the record
    counts its calls, and goes on from the last line of the file.

    `writer` also receives every value, as `writer.add_scalar("manyhands/gain", value, step)`:
    TensorBoard's `SummaryWriter`, or anything with that method. It stays yours to close.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *sources: Source,
        name: str | None = None,
        writer: Any = None,
        every: int = 1,
        rank: int = 0,
        mode: Literal["continue", "new", "overwrite"] = "continue",
    ) -> None:
        self.path = Path(path)
        self.name = self.path.stem if name is None else name
        workers = RankGroup.of()
        _check_options(every, rank, mode, writer, workers)
        keys = _keys(sources)

        self._sources = sources
        self._writer = writer
        self._every = every
        self._taken = frozenset(keys).union(_OUR_KEYS)
        self._calls = 0
        self._first = 0  # steps in the file before this record
        self._file: int | None = None
        self._closed = False
        self._waiting: deque[Line] = deque()
        if workers.rank == rank:
            self._file, last = open_record(self.path, mode)
            self._first = last["step"] if last else 0
            header = {
                "version": FORMAT_VERSION,
                "name": self.name,
                "date": datetime.now().astimezone().isoformat("T", "seconds"),
                "step": self._first,
                "resumed": last is not None,
                "workers": workers.size,
                "torch": torch.__version__,
                "keys": keys,
            }
            append(self._file, self.path, {HEADER: header})
        self._start = time.monotonic()

    def step(self, **values: Any) -> None:
        """Record one step, after `optimizer.step()`.

        `values` are your own: numbers or one-element tensors, under names of your choice.
        """
        self._check(values)
        self._calls += 1
        if self._file is None or self._calls % self._every:
            return
        line: Line = {"step": self._first + self._calls, "time": self._seconds()}
        for source in self._sources:
            line.update(source.snapshot())
        for key, value in values.items():
            line[key] = value if type(value) is float else number(value)
        self._waiting.append(line)
        self._write(most_waiting=_MOST_WAITING)

    def close(self) -> None:
        """Write what still waits, and close the file. A second call does nothing."""
        self._closed = True
        if self._file is not None:
            self._write(most_waiting=0)
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check(self, values: dict[str, Any]) -> None:
        """The same on every worker, whether it writes or not."""
        if self._closed:
            raise RuntimeError(
                f"the record {self.path} is closed and takes no more steps. "
                "Call close() after the last step(), or make a new Record: it continues the file."
            )
        for key, value in values.items():
            if key in self._taken:
                raise ValueError(
                    f"{key!r} is a key of the record's own, and step() got a value for it too. "
                    f"Choose another name, for example my_{key}."
                )
            if type(value) is not float and not is_number(value):
                raise TypeError(
                    f"step() takes numbers and one-element tensors, got {key}={describe(value)}. "
                    f"Give one number for {key!r}, or leave it out of this step."
                )

    def _seconds(self) -> float:
        return round(time.monotonic() - self._start, 6)

    def _write(self, most_waiting: int) -> None:
        """Write the lines whose numbers are here, in order; wait for those beyond the limit."""
        assert self._file is not None
        while self._waiting:
            line = self._waiting[0]
            awaited = [key for key, value in line.items() if type(value) is OnItsWay]
            if len(self._waiting) <= most_waiting and not all(line[k].is_here() for k in awaited):
                return
            for key in awaited:
                line[key] = line[key].number()
            append(self._file, self.path, self._waiting.popleft())
            if self._writer is not None:
                _send(self._writer, line)


def _send(writer: Any, line: Line) -> None:
    for key, value in flat(line):
        if key not in _OUR_KEYS and isinstance(value, Real):
            writer.add_scalar(f"manyhands/{key}", value, line["step"])


def _check_options(every: int, rank: int, mode: str, writer: Any, workers: RankGroup) -> None:
    if every < 1:
        raise ValueError(
            f"every must be at least 1, got {every}. It is the number of steps from one line to "
            "the next; 1 writes a line for each step."
        )
    if not 0 <= rank < workers.size:
        raise ValueError(
            f"rank is the worker that writes and must be from 0 to {workers.size - 1}, got {rank}. "
            "Leave it out to let worker 0 write; make the Record after init_process_group."
        )
    if mode not in ("continue", "new", "overwrite"):
        raise ValueError(f'mode must be "continue", "new" or "overwrite", got {mode!r}.')
    if writer is not None and not hasattr(writer, "add_scalar"):
        raise TypeError(
            "writer needs a method add_scalar(tag, value, step), as TensorBoard's SummaryWriter "
            f"has it, and {type(writer).__name__} has none."
        )


def _keys(sources: tuple[Source, ...]) -> list[str]:
    """The keys of every source, each given by one source only."""
    given_by = {"time": "the record", HEADER: "the record"}
    keys: list[str] = []
    for source in sources:
        name = type(source).__name__
        if not hasattr(source, "snapshot"):
            raise TypeError(
                f"a source needs a method snapshot(), and {name} has none. Give the optimizer "
                "that manyhands made, for example mh.AdaScale(optimizer), or leave it out."
            )
        for key in source.snapshot():
            if key in given_by:
                raise ValueError(
                    f"two sources give {key!r} for the same line: {given_by[key]} and {name}. "
                    "Leave one of them out, or rename the key in its snapshot()."
                )
            given_by[key] = name
            keys.append(key)
    return keys

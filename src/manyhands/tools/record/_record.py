"""Write a record: a line per step, from a single rank, without waiting for a GPU.

`close()` appends the header with the date of the end, so readers of a growing file know that no
line follows. A tensor on a GPU is copied without a synchronization, and the line waits in a queue
until the copy is complete.

`StepTiming` divides the seconds of this rank since the last line:

    loading   waiting for the next batch, if batches are read through `loading`
    compute   from the last line or step to the end of the last backward pass of the step
    sync      from there to the optimizer's step: DDP waits for gradients, a rule for its numbers
    update    the optimizer's step

The remaining time of a line is an evaluation, a checkpoint, or a sync round of blocks.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Protocol, SupportsFloat, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from manyhands._arguments import file_path, instance, one_of, real, whole
from manyhands._optimizers.wrappers import weak_hook
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.backward import BackwardPasses, current_task
from manyhands._warn import warn
from manyhands.tools.record._run import (
    FORMAT_VERSION,
    HEADER,
    Header,
    Line,
    not_a_record,
    open_file,
    parse_line,
    this_process,
    to_columns,
)

try:
    import fcntl
except ImportError:  # Windows does not detect two runs with the same path
    fcntl = None  # type: ignore[assignment]

_OUR_KEYS = ("step", "time", HEADER)
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_LONGEST_TEXT = 4000  # characters of a source's description or an error in a header
_MOST_WAITING = 4  # lines that may wait for numbers from a GPU
T = TypeVar("T")

KINDS = ("loading", "compute", "sync", "update")


class Source(Protocol):
    """A source of values: an optimizer of this library, or any object with a `snapshot` method."""

    def snapshot(self) -> Mapping[str, object]:
        """Return plain Python values for a line, always with equal keys.

        `Record` also calls `snapshot` at construction, to learn the keys. A source with a "step"
        may also have an attribute `steps`, which is faster to read.
        """


class Record:
    """Write a line per step, with the values of each source and your own values.

    >>> import tempfile, manyhands as mh
    >>> path = tempfile.mkdtemp() + "/a.jsonl"
    >>> with mh.Record(path, name="plain SGD") as record:
    ...     for loss in (2.5, 1.5):
    ...         record.step(loss=loss)
    >>> mh.read_record(path).column("loss")
    [2.5, 1.5]

    Create the record on every rank, after `init_process_group`. Only rank `rank` writes. Other
    ranks check the arguments, so that a mistake raises on every rank. A record uses no collectives.

    By default (`mode="continue"`) a record continues an existing file, as a resumed run needs.
    `"new"` raises if the file exists, and `"overwrite"` empties the file. A file that another
    process is writing raises an error. With `every=10` the record writes steps that are multiples
    of 10, also after a resume. Lines with numbers from a GPU are written up to four steps later, so
    call `close()` or use `with`. If no source has a "step", the record counts calls, and continues
    from the last step in the file.

    `writer` also receives every value: TensorBoard's `SummaryWriter` through
    `writer.add_scalar("manyhands/gain", value, step)`, a run of Weights & Biases through
    `writer.log({"manyhands/gain": value, ...}, step=step)`, or any object with either method. The
    record does not close the writer.

    Readers use three more options: `batch_size`, the samples of a small batch, for figures against
    samples and for samples per second; `until`, the progress (or the step, without a scaling rule)
    at which training ends, for the remaining time; and `config`, shown beside the curves.
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
        batch_size: float | None = None,
        until: float | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        self.path = Path(file_path("path", path, "Write Record(path, source, ...)."))
        if name is None:
            name = self.path.stem
        self.name = name
        ranks = RankGroup.of()
        every = whole("every", every, least=1)
        one_of("rank", rank, range(ranks.size), "It is the rank that writes the file.")
        one_of("mode", mode, ("continue", "new", "overwrite"))
        for option, value in (("batch_size", batch_size), ("until", until)):
            if value is not None:
                real(option, value, above=0)
        if not (writer is None or hasattr(writer, "add_scalar") or hasattr(writer, "log")):
            raise TypeError(f"writer needs add_scalar or log, and {writer!r:.80} has neither.")
        values, counter = _collect_values(sources)
        _to_json(values)  # raises on every rank for other types, before the file is created

        self._sources = sources
        self._writer = writer
        self._every = every
        self._counter = counter  # the source that has a "step"
        # Whether the source's `steps` is the step. The attribute may have a different meaning.
        self._says_steps = counter is not None and _steps_of(counter) == values["step"]
        self._reserved = frozenset(values).union(_OUR_KEYS)
        self._calls = 0
        self._steps_before = 0  # the step at which `_calls` was 0; an estimate if steps are skipped
        self._last_step = 0  # of the last line, or before the first call
        self._file: int | None = None
        self._header: Header = {}
        self._closed = False
        self._waiting: deque[Line] = deque()
        if ranks.rank == rank:
            self._header = {
                "workers": ranks.size,
                "keys": list(values),
                "every": every,
                "batch_size": batch_size,
                "until": until,
                "config": to_plain_json(config or {}),
                "sources": [_describe_source(source) for source in sources],
            }
            self._open(mode)
        self._start = time.monotonic()

    def _open(self, mode: str) -> None:
        self._file, last = open_record(self.path, mode)
        if last is not None:
            self._steps_before = last["step"]
        self._last_step = self._steps_before
        self._header = {
            "version": FORMAT_VERSION,
            "name": self.name,
            "date": _now(),
            "step": self._steps_before,
            "resumed": last is not None,
            "torch": torch.__version__,
            **self._header,
            "process": this_process(),
        }
        append_line(self._file, self.path, {HEADER: self._header})

    def step(self, **values: SupportsFloat) -> None:
        """Record a step, after `optimizer.step()`.

        `values` are numbers or one-element tensors under names of your choice.
        """
        self._check(values)
        self._calls += 1
        if self._file is None or not self._is_due():
            return  # before any snapshot, the most expensive part of a call
        seconds = round(time.monotonic() - self._start, 6)
        line: Line = {"step": self._count_steps(), "time": seconds}
        # A source's "step" replaces the count of calls, because a checkpoint may have been loaded.
        for source in self._sources:
            line.update(source.snapshot())
        if self._calls == 1 and line["step"] == 0 and isinstance(self._counter, Optimizer):
            warn("call record.step() after optimizer.step(), or lines describe the step before.")
        self._last_step = line["step"]
        self._steps_before = line["step"] - self._calls
        for key, value in values.items():
            line[key] = value if type(value) is float else to_number(value)
        self._waiting.append(line)
        self._write(most_waiting=_MOST_WAITING)

    def _is_due(self) -> bool:
        """Return whether the step is, or has passed, a multiple of `every`."""
        if self._every == 1:
            return True
        if self._calls == 1:  # a checkpoint may have been loaded after the record was created
            self._read_step()
            self._last_step = max(0, self._count_steps() - 1)
        if not self._passed_multiple():
            return False
        self._read_step()
        return self._passed_multiple()

    def _passed_multiple(self) -> bool:
        step = self._count_steps()
        if step < self._last_step:  # the run has resumed from an earlier checkpoint
            self._last_step = step - 1
        return step // self._every > self._last_step // self._every

    def _count_steps(self) -> int:
        """Return the step without a snapshot; estimate the step from calls if necessary."""
        steps = _steps_of(self._counter) if self._says_steps else None
        return self._steps_before + self._calls if steps is None else steps

    def _read_step(self) -> None:
        """Correct the estimated step: a gradient scaler may have skipped steps."""
        if self._counter is not None and not self._says_steps:
            step: Any = self._counter.snapshot()["step"]
            self._steps_before = step - self._calls

    def close(self) -> None:
        """Write all waiting lines and the end of the run. A second call has no effect."""
        self._close(error=None)

    def _close(self, error: str | None) -> None:
        self._closed = True
        if self._file is None:
            return
        try:
            self._write(most_waiting=0)
            step = self._last_step
            if self._calls:
                step = self._count_steps()
            self._header |= {"step": step, "ended": _now(), "error": error}
            append_line(self._file, self.path, {HEADER: self._header})
        finally:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Record:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, *_: object) -> None:
        self._close(None if kind is None else _describe_error(kind, error))

    def _check(self, values: Mapping[str, object]) -> None:
        if self._closed:
            raise RuntimeError(f"{self.path} is closed. Create a new Record to continue the file.")
        for key, value in values.items():
            if key in self._reserved:
                raise ValueError(f"step() got {key!r}, a key of the record. Choose another name.")
            if type(value) is not float and not is_number(value):
                raise TypeError(
                    f"step() takes numbers and one-element tensors, got {key}={value!r:.50}."
                )

    def _write(self, most_waiting: int) -> None:
        """Write complete lines in order; wait for the GPU while more than `most_waiting` wait."""
        assert self._file is not None
        while self._waiting:
            line = self._waiting[0]
            pending = [key for key, value in line.items() if type(value) is PendingNumber]
            if len(self._waiting) <= most_waiting and not all(line[k].is_ready() for k in pending):
                return
            for key in pending:
                line[key] = line[key].number()
            append_line(self._file, self.path, self._waiting.popleft())
            if self._writer is not None:
                _send_line(self._writer, line)


def _now() -> str:
    return datetime.now().astimezone().isoformat("T", "seconds")


def _describe_source(source: Source) -> str:
    kind = type(source)
    if kind.__repr__ is object.__repr__:
        return kind.__name__
    return repr(source)[:_LONGEST_TEXT]


def _describe_error(kind: type[BaseException], error: object) -> str | None:
    """Return the error that ends a run, or None if the script ended normally."""
    if kind is SystemExit and getattr(error, "code", None) in (None, 0):
        return None
    return f"{kind.__name__}: {error}"[:_LONGEST_TEXT].removesuffix(": ")


# -- another writer --------------------------------------------------------------------------------


def _send_line(writer: Any, line: Line) -> None:
    values = {}
    for key, value in to_columns(line):
        if key not in _OUR_KEYS and isinstance(value, Real):
            values[f"manyhands/{key}"] = value
    if hasattr(writer, "add_scalar"):
        for tag, value in values.items():
            writer.add_scalar(tag, value, line["step"])
    else:
        writer.log(values, step=line["step"])


def _steps_of(counter: object) -> int | None:
    steps = getattr(counter, "steps", None)
    return steps if type(steps) is int else None


def _collect_values(sources: tuple[Source, ...]) -> tuple[dict[str, object], Source | None]:
    """Return the values of all sources, and the source that has a "step"."""
    owners = {"time": "the record", HEADER: "the record"}
    values: dict[str, object] = {}
    counter = None
    for source in sources:
        name = type(source).__name__
        if not hasattr(source, "snapshot"):
            raise TypeError(f"a source needs a method snapshot(), and {name} has none.")
        for key, value in source.snapshot().items():
            if key in owners:
                raise ValueError(f"two sources have the key {key!r}: {owners[key]} and {name}.")
            owners[key] = name
            values[key] = value
            if key == "step":
                counter = source
    return values, counter


# -- numbers ---------------------------------------------------------------------------------------


class PendingNumber:
    """A number on a GPU while an asynchronous copy to the host runs."""

    def __init__(self, value: torch.Tensor) -> None:
        self._host = value.to("cpu", non_blocking=True)  # returns before the copy is done
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(value.device))

    def is_ready(self) -> bool:
        return bool(self._copied.query())

    def number(self) -> int | float | PendingNumber:
        self._copied.synchronize()
        return to_number(self._host)


def to_number(value: SupportsFloat) -> int | float | PendingNumber:
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            return PendingNumber(value.detach())
        value = value.item()
    if isinstance(value, Integral):
        return int(value)
    return float(value)


def is_number(value: object) -> bool:
    if not isinstance(value, torch.Tensor):
        return isinstance(value, Real)
    # Reading a DTensor requires a collective, but only the writing rank would call it.
    return value.numel() == 1 and not value.is_complex() and not hasattr(value, "full_tensor")


def to_plain_json(value: object) -> object:
    """Convert values that JSON cannot represent to text."""
    if isinstance(value, Mapping):
        return {str(key): to_plain_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_json(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if value is None or isinstance(value, int | float | str):
        return value
    return str(value)[:_LONGEST_TEXT]


# -- the file --------------------------------------------------------------------------------------


def open_record(path: Path, mode: str) -> tuple[int, Line | None]:
    """Return a descriptor for appending, and the last line of a continued record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    if mode == "new":
        flags |= os.O_EXCL
    file = open_file(path, flags)
    try:
        _lock_record(file, path)
        last, end = _last_line(path)
        if mode == "overwrite":
            last = None
            end = 0
        _lock_record(file, path)  # again, because any close() of the file releases the lock
        os.ftruncate(file, end)  # drops an incomplete line
    except BaseException:
        os.close(file)
        raise
    return file, last


def _lock_record(file: int, path: Path) -> None:
    """Lock the record against other processes until this process ends."""
    if fcntl is None:
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ValueError(
            f"another process is writing {path}, and would mix its lines with the lines of this "
            "run. Give each run a separate path."
        ) from None
    except OSError:
        pass  # a file system without locks


def _last_line(path: Path) -> tuple[Line | None, int]:
    last = b""
    end = 0
    number = 0
    with open(open_file(path), "rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1 and not raw.startswith(f'{{"{HEADER}"'.encode()):
                raise ValueError(not_a_record(path))
            if not raw.endswith(b"\n"):
                number -= 1
                break
            last = raw
            end += len(raw)
    if not last:
        return None, end
    line = parse_line(last, path, number)
    return line.get(HEADER, line), end


def append_line(file: int, path: Path, line: Line) -> None:
    data = _to_json(line).encode() + b"\n"
    try:
        written = os.write(file, data)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        written = 0
    if written < len(data):  # the disk is full: remove the incomplete line
        os.ftruncate(file, os.fstat(file).st_size - written)
        raise OSError(errno.ENOSPC, "no space left for the next line", str(path))


def _to_json(line: Line) -> str:
    try:
        return _encode(line)
    except ValueError:  # a number is not finite; checking each line in advance would cost more
        return _encode(to_plain_json(line))


class _LastPass:
    """The end of the last backward pass; None before the first pass of a step."""

    def __init__(self) -> None:
        self.ended: float | None = None

    def begin_pass(self) -> None:
        pass

    def end_pass(self) -> None:
        self.ended = time.perf_counter()


class StepTiming:
    """Measure how each step spends its time: a source for `Record`.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> times = mh.StepTiming(optimizer)
    >>> batches = [torch.ones(8, 4)] * 3
    >>> with mh.Record("runs/times.jsonl", times) as record:
    ...     for batch in times.loading(batches):
    ...         model(batch).mean().backward()
    ...         optimizer.step()
    ...         record.step()
    >>> list(times.snapshot())
    ['loading_seconds', 'compute_seconds', 'sync_seconds', 'update_seconds']

    `loading` is the wait for the next batch, `compute` the forward and backward passes, `sync` the
    wait for other ranks before the step, and `update` the optimizer's step, in seconds of this rank
    since the last line. The measurement sends no messages and reads no tensors.

    On a GPU these are seconds of the host, which runs ahead of the GPU. The GPU's work appears
    where the host waits for the GPU, mostly in `sync`. Communication of DDP that overlaps with the
    backward pass is not in `sync`. `FullyShardedDataParallel` communicates during the passes, so
    `sync` is part of `compute`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        instance("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
        trained: list[Tensor] = []
        for group in optimizer.param_groups:
            trained += [param for param in group["params"] if param.requires_grad]
        if not trained:
            raise ValueError("the optimizer has no parameter that requires a gradient.")
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._mark = time.perf_counter()  # the end of the last step or snapshot
        self._last_pass = _LastPass()
        self._step_began = 0.0
        # Most backward passes start with the gradient of the last parameter. A callback queued
        # there runs before DDP's callback, which waits for other ranks.
        passes = BackwardPasses(self._last_pass, early=True)
        node = get_gradient_edge(trained[-1]).node

        def enter(_: tuple[Tensor, ...]) -> None:
            passes.enter(current_task())

        self._node = node  # keeps the hooks alive, because torch may free an unused node
        for handle in (
            node.register_prehook(enter),
            optimizer.register_step_pre_hook(weak_hook(self._begin_step)),
            optimizer.register_step_post_hook(weak_hook(self._end_step)),
        ):
            weakref.finalize(self, handle.remove)

    def loading(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, and count the wait for each batch as `loading`."""
        iterator = iter(batches)
        while True:
            begin = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self._seconds["loading"] += time.perf_counter() - begin
                self._mark += time.perf_counter() - begin  # excluded from `compute`
            yield batch

    def snapshot(self) -> dict[str, float]:
        """Return the seconds of each kind since the last call, for `Record`."""
        seconds = {f"{kind}_seconds": round(self._seconds[kind], 6) for kind in KINDS}
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._mark = time.perf_counter()
        self._last_pass.ended = None
        return seconds

    def _begin_step(self) -> None:
        """Divide the time before the step into `compute` and `sync`, at the end of backward."""
        now = time.perf_counter()
        computed = self._last_pass.ended
        if computed is None:
            computed = now
        self._seconds["compute"] += max(0.0, computed - self._mark)
        self._seconds["sync"] += now - max(computed, self._mark)
        self._step_began = now

    def _end_step(self) -> None:
        self._mark = time.perf_counter()
        self._last_pass.ended = None
        self._seconds["update"] += self._mark - self._step_began

"""The steps of a save.

    collect     this rank's tensors, without copies; the rank's share follows from placements
    copy        only with `wait=False`: to host memory, so that training can continue
    write       this rank's file; a receipt for rank 0 lists the tensors
    publish     rank 0 checks all receipts, in which each element must occur once, and commits
    end         rank 0 tells every rank that the checkpoint exists, or why it does not

Receipts and the final answer travel through the store of the ranks (`SaveMessages`), without
collectives. Only rank 0's work grows with the number of ranks: it reads a receipt of each rank.
"""

from __future__ import annotations

import atexit
import errno
import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store, _get_default_store

from manyhands._ranks.agreement import NAMED, describe_error, raise_if_different, to_error
from manyhands._ranks.dry_run import dry_group
from manyhands._ranks.groups import name_of_ranks
from manyhands._ranks.message_box import HeartbeatMonitor, MessageBox
from manyhands._ranks.presence import Presence, name_ranks
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.profiler import Range
from manyhands._tensors.random_state import random_state
from manyhands._warn import warn
from manyhands.checkpoint import _format
from manyhands.checkpoint._folder import DryFolder, Folder, new_token
from manyhands.checkpoint._format import RANDOM, Commit, Contents, TensorEntry, file_name
from manyhands.checkpoint._model import collect_model, find_names
from manyhands.checkpoint._optimizer import collect_optimizer
from manyhands.checkpoint._tensor_parts import (
    Savers,
    Table,
    find_tensors,
    merge_tables,
    own_share,
    stored_slices,
    table_of,
)
from manyhands.checkpoint._values import RunObjects, check_scheduler, check_value, encode, escape

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
VISIBLE_AFTER = 3.0  # seconds until a network file system shows a new file
CALL_TIMEOUT = 1800.0  # seconds for all ranks to call mh.save, if the group has no timeout
SAY_AFTER = 40.0  # seconds after which a waiting rank warns
PULSE = 5.0  # seconds between heartbeats of a rank that writes
SILENCE = 60.0  # seconds without a heartbeat after which a rank counts as dead
EVERYWHERE = "Call it on every rank, not under `if rank == 0`."
LINGER = 0.25  # seconds for other ranks to read the last answer from rank 0's store


def begin_save(
    folder: Folder,
    run: RunObjects,
    options: dict[str, Any],
    process_group: dist.ProcessGroup | None,
) -> tuple[Path, Callable[[], None]]:
    """Do all of a save except for writing. Return the path, and a function that writes."""
    ranks = RankGroup.of(process_group)
    messages = SaveMessages.of(ranks)
    if isinstance(messages, DryMessages):
        folder = messages.record_save(ranks, folder)
    save = Save(folder, messages, options)
    try:
        with Range("manyhands::save collect"):
            save.collect(run)
    except Exception as error:
        if messages.size == 1:
            raise
        save.problem = error
    try:
        save.name = messages.begin(options["step"], folder)
        save.token = messages.token
        if save.problem is None:
            with Range("manyhands::save prepare"):
                save.prepare(copy=not options["wait"])
    except Exception as error:
        if not messages.begun:  # no rank waits for this rank
            raise
        save.problem = save.problem or error
    if save.problem is not None:
        save.finish()  # informs the other ranks and raises
    return folder.path / save.name, save.finish


class Save:
    """A single save on a single rank."""

    def __init__(self, folder: Folder, messages: SaveMessages, options: dict[str, Any]) -> None:
        self.folder = folder
        self.messages = messages
        self.options = options
        self.name = ""
        self.token = ""
        self.problem: Exception | None = None
        self._facts: dict[str, Any] = dict(options)  # must be equal on all ranks
        self._contents = Contents(messages.savers)
        self._described: dict[str, Any] = {}  # model, optimizers, schedulers and values as JSON
        self._to_write: list[tuple[TensorEntry, Tensor]] = []
        self._table = Table(grids=[], slices={})

    def collect(self, run: RunObjects) -> None:
        """Collect this rank's part of a checkpoint, without copying tensors."""
        contents = self._contents
        put = contents.put_of_first
        names = None
        model = None
        if run.model is not None:
            names = find_names(run.model)
            if not self.options["frozen"]:
                names.leave_out_frozen()
            model = collect_model(names, "model", contents)
        optimizers = []
        for number, optimizer in enumerate(run.optimizers):
            optimizers.append(collect_optimizer(optimizer, names, number, contents))
        schedulers = []
        for number, scheduler in enumerate(run.schedulers):
            kind = type(check_scheduler(scheduler)).__name__
            state = encode(dict(scheduler.state_dict()), f"scheduler.{number}", put)
            schedulers.append({"class": kind, "state": state})
        values: dict[str, object] = {}
        for name, value in run.values.items():
            check_value(name, value)
            key = f"value/{escape(name)}"
            if isinstance(value, nn.Module):
                module = collect_model(find_names(value), key, contents)
                values[name] = {"$": "module", "value": module}
            else:
                values[name] = encode(value, key, put)
        for name, state in random_state().items():
            contents.own[RANDOM + name] = state
        self._described = {
            "model": model,
            "optimizers": optimizers,
            "schedulers": schedulers,
            "values": values,
        }
        # Objects cannot be compared, so their presence is.
        self._facts |= {
            "model": model is not None,
            "number of optimizers": len(optimizers),
            "number of schedulers": len(schedulers),
            "values": sorted(values),
        }

    def prepare(self, *, copy: bool) -> None:
        """Decide which slices this rank writes, and copy them if training continues meanwhile."""
        share = own_share(self._contents.tensors)
        self._table = table_of(share)
        self._facts["tensors"] = self._contents.alike()
        named = dict(self._contents.own)
        for key, parts in share.items():
            for offsets, elements in stored_slices(parts):
                name = _format.slice_name(key, offsets, elements.shape, parts.shape)
                named[name] = elements.detach()
        self._contents.tensors.clear()
        for name, tensor in named.items():
            entry = TensorEntry(name, tensor.dtype, tuple(tensor.shape))
            if copy:  # to the CPU
                tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu").copy_(tensor)
            self._to_write.append((entry, tensor))
        # Written in reverse order, so that copies are freed one by one. Wide types are first, which
        # aligns each tensor.
        self._to_write.sort(key=lambda each: each[0].dtype.itemsize)

    def finish(self) -> None:
        """Write, and wait until the checkpoint is complete. Raise if any rank failed."""
        receipt: dict[str, Any] = {"facts": self._facts, "table": self._table}
        try:
            if self.problem is None:
                with Range("manyhands::save write"):
                    receipt["file"] = self._write_file()
        except Exception as error:
            self.problem = error
        if self.problem is not None:
            receipt["error"] = describe_error(self.problem)
        failed = ["RuntimeError", "stopped"]
        try:
            if self.messages.rank == 0:
                with Range("manyhands::save publish"):
                    failed = self._publish(receipt)
                self.messages.end(failed)
            else:
                self.messages.send(receipt)
                with Range("manyhands::save wait"):
                    failed = self.messages.wait_for_end(self._is_published)
        finally:
            if self.name and failed:
                self.folder.drop(self.name, file_name(self.messages.rank, self.token))
        if self.problem is not None:
            raise self.problem
        if failed:
            raise to_error(*failed)

    def _write_file(self) -> list[int]:
        entries = [entry for entry, _ in reversed(self._to_write)]
        if isinstance(self.folder, DryFolder) and self.folder.fake:
            return [0, 0, 0]
        try:
            with self.folder.create(self.name, file_name(self.messages.rank, self.token)) as file:
                return _format.write(file, entries, lambda _: self._to_write.pop()[1])
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise OSError(
                f"the checkpoint does not fit into {self.folder.path} (the disk is full, or a "
                "quota or file limit is reached). Free space. Earlier checkpoints are unchanged."
            ) from error

    def _publish(self, receipt: dict[str, Any]) -> list[str]:
        """Complete the checkpoint on rank 0. Return the error if this fails."""
        try:
            receipts = self.messages.gather(receipt)
            failed = [rank for rank, each in enumerate(receipts) if "error" in each]
            if failed:
                name, message = receipts[failed[0]]["error"]
                return [name, f"rank {', '.join(map(str, failed[:NAMED]))}: {message}"]
            advice = "Call mh.save on every rank with the same arguments and the same model."
            facts = [each["facts"] for each in receipts]
            if facts.count(facts[0]) < len(facts):
                raise_if_different(facts, advice)
            if isinstance(self.folder, DryFolder):  # the other ranks' slices are unknown
                return []
            self._commit([each["file"] for each in receipts], [each["table"] for each in receipts])
        except Exception as error:
            self.problem = self.problem or error
            return describe_error(error)
        self.folder.prune(self.options["keep"])  # last: until now the new one was incomplete
        return []

    def _commit(self, files: list[list[int]], tables: list[Table]) -> None:
        from manyhands._version import __version__

        table = merge_tables(tables)
        find_tensors(table, len(files))  # raises unless each element occurs exactly once
        expected = {file_name(rank, self.token): file[0] for rank, file in enumerate(files)}
        deadline = time.monotonic() + VISIBLE_AFTER
        while missing := expected.items() - self.folder.sizes(self.name).items():
            if time.monotonic() > deadline:
                self.folder.check_ours(self.name, self.token)
                raise ValueError(
                    f"rank 0 does not see {min(missing)[0]} in {self.folder.path / self.name}, "
                    "although another rank has written it. Pass a path that all ranks share."
                )
            time.sleep(0.05)
        commit = Commit(
            step=self.options["step"],
            token=self.token,
            versions={"manyhands": __version__, "torch": str(torch.__version__)},
            time=time.time(),
            files=files,
            table=table,
            **self._described,
        )
        self.folder.publish(self.name, self.token, commit.to_text().encode())

    def _is_published(self) -> bool:
        first = file_name(0, self.token)
        return self.folder.has_commit(self.name) and first in self.folder.sizes(self.name)


# -- messages --------------------------------------------------------------------------------------


_messages: weakref.WeakKeyDictionary[Store, dict[Sequence[int], SaveMessages]] = (
    weakref.WeakKeyDictionary()
)


class SaveMessages:
    """Messages of saves between the ranks, through a separate connection to the store.

    The token of a save identifies messages and files. Rank 0 publishes the first token under a
    fixed key; each answer contains the next token. Numbers of checkpoints increase by one. So each
    rank sends a single message per save, the receipt, and receives one, the answer.
    """

    def __init__(self, ranks: RankGroup) -> None:
        savers = Savers.of(ranks)
        self.savers = savers
        self.rank = savers.rank
        self.size = savers.size
        self.token = ""
        self.begun = False  # whether other ranks wait for this rank's receipt
        self._patience = CALL_TIMEOUT
        self._next: dict[Path, int] = {}  # by folder: the number of the next checkpoint
        self._box = MessageBox(None)  # messages of this save
        self._old: MessageBox | None = None  # messages of the previous save
        self._began = 0.0
        self._warned = False
        self._monitor = HeartbeatMonitor(SILENCE)
        self._done = threading.Event()  # set when this rank's heartbeats may end
        if self.size > 1:
            # A waiting request must not block the program's own requests.
            store: Store = _get_default_store().clone()  # type: ignore[attr-defined]
            if ranks._timeout:
                self._patience = ranks._timeout.total_seconds()
            self._presence = Presence(store)
            prefix = f"manyhands/save/{name_of_ranks(savers.ranks)}/"
            # A store may outlive a process group, including old messages.
            serial = MessageBox(store, prefix).count(str(self.rank), 1)
            self._all = MessageBox(store, f"{prefix}{serial}/")  # messages for all saves

    @staticmethod
    def of(ranks: RankGroup) -> SaveMessages:
        """Return the messages of these ranks, the same object for every save."""
        known: dict[Sequence[int], SaveMessages] = {}
        members: Sequence[int] = ()
        if ranks.size > 1:
            known = _messages.setdefault(_get_default_store(), {})
            members = tuple(ranks.ranks)
        if members not in known:
            kind = DryMessages if dry_group() else SaveMessages
            known[members] = kind(ranks)
        return known[members]

    def begin(self, step: int | None, folder: Folder) -> str:
        self._began = time.monotonic()
        self._warned = False
        self.begun = False
        number = self._next.get(folder.path)
        check = partial(self._miss, [0])
        if self.rank == 0:
            number = self._begin_as_first(number, step, folder)
        else:
            if not self.token:
                self._use(self._wait(self._all, "first", check))
            if number is None:
                told = json.loads(self._wait(self._box, "begun", check))
                self.begun = True
                if "error" in told:
                    raise to_error(*told["error"])
                number = int(told["number"])
        self.begun = True
        self._next = {folder.path: number}
        self._done = threading.Event()
        if self.size > 1:
            beat = self._box.beat
            life = (f"alive/{self.rank}", min(PULSE, self._patience / 4), self._done)
            threading.Thread(target=beat, args=life, daemon=True).start()
        return folder.name_of(number, step)

    def _begin_as_first(self, number: int | None, step: int | None, folder: Folder) -> int:
        """Begin on rank 0: publish the number and, for the first save, a token."""
        first = not self.token
        self.begun = True
        if first:
            self._use(new_token())
        told: dict[str, Any] = {}
        try:
            number = folder.begin(number, step)
            told["number"] = number
        except Exception as error:
            told["error"] = describe_error(error)
            raise
        finally:
            if self.size > 1:
                self._box.put("begun", json.dumps(told))
                if first:
                    self._all.put("first", self.token)
        return number

    def send(self, receipt: dict[str, Any]) -> None:
        self._done.set()
        self._box.put(f"receipt/{self.rank}", json.dumps(receipt))

    def gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        receipts = [own]
        for rank in range(1, self.size):
            key = f"receipt/{rank}"
            check = partial(self._check_called, rank)
            receipts.append(json.loads(self._wait(self._box, key, check)))
            self._box.delete(key)
        return receipts

    def _check_called(self, first: int) -> None:
        """Check on rank 0 whether the ranks from `first` on have called mh.save."""
        absent = []
        for rank in range(first, self.size):
            if not (self._box.has(f"receipt/{rank}") or self._box.has(f"alive/{rank}")):
                absent.append(rank)
        if absent:
            self._miss(absent)
        else:
            self._check_alive(first)

    def end(self, failed: list[str]) -> None:
        self._done.set()
        after = new_token()
        if self.size > 1:
            self._box.put("end", json.dumps([failed, after]))
            atexit.unregister(_linger)
            atexit.register(_linger, time.monotonic() + LINGER + self.size / 1000)
            # Each receipt shows that the rank has read the previous answer.
            if self._old is not None and not failed:
                self._old.delete("end")
            self._old = self._box
        self._prepare_next(failed, after)

    def wait_for_end(self, is_published: Callable[[], bool]) -> list[str]:
        """Return the result of the save: the type and message of an error, or an empty list."""
        try:
            failed, after = json.loads(self._wait(self._box, "end", self._check_rank_0))
        except dist.DistNetworkError:
            # Rank 0 may have finished and ended together with the store.
            if is_published():
                return []
            raise
        self._prepare_next(failed, after)
        return list(failed)

    def _check_rank_0(self) -> None:
        """Check that rank 0 lives. Rank 0 decides for all ranks when to give up."""
        if self._box.has("begun"):
            self._check_alive(0)
        else:
            self._miss([0])

    def _prepare_next(self, failed: list[str], token: str) -> None:
        self._use(token)
        for path in self._next:
            self._next[path] += 1
        if failed:
            self._next.clear()

    # -- who is there --------------------------------------------------------------------------

    def _check_alive(self, rank: int) -> None:
        """Raise RuntimeError if a rank has ended or sends no heartbeats."""
        count = int(self._box.read(f"alive/{rank}") or 0)
        self._monitor.observe({f"{self.token}/{rank}": count}, time.monotonic())
        problem = ""
        if self._monitor.silent:
            problem = f"has sent no heartbeat for {SILENCE:g} s while it saved. Check its process."
        if self._presence.may_look() and self._presence.find_ended([self.savers.ranks[rank]]):
            problem = "has ended while it saved."
        if problem:
            raise RuntimeError(
                f"rank {rank} {problem} This checkpoint is discarded; earlier ones are unchanged."
            )

    def _miss(self, absent: Sequence[int]) -> None:
        """Raise if absent ranks have ended or waiting took too long. Otherwise warn once."""
        names = name_ranks(absent)
        text = f"rank {self.rank} has called mh.save, and"
        if self._presence.may_look():
            reason = self._presence.why_absent([self.savers.ranks[rank] for rank in absent])
            if reason:
                raise RuntimeError(f"{text} {reason}. {EVERYWHERE}")
        waited = time.monotonic() - self._began
        if waited > self._patience:
            raise RuntimeError(f"{text} {names} not within {self._patience:g} s. {EVERYWHERE}")
        if waited > SAY_AFTER and not self._warned:
            self._warned = True
            warn(
                f"{text} {names} not for {waited:.0f} s. {EVERYWHERE} (This rank waits for a total "
                f"of {self._patience:g} s.)"
            )

    def _use(self, token: str) -> None:
        self.token = token
        if self.size > 1:
            self._box = MessageBox(self._all.store, f"{self._all.prefix}{token}/")

    def _wait(self, box: MessageBox, key: str, check: Callable[[], None]) -> str:
        """Wait for a message. Call `check` from time to time, which raises to stop waiting."""
        text = box.wait_for(key, min(SAY_AFTER, self._patience) / 2)
        while not text:
            try:
                check()
            except RuntimeError:
                if not box.has(key):  # it may have arrived meanwhile
                    raise
            # Not a single long request: gloo's store prints a warning when a request times out.
            time.sleep(min(0.5, self._patience / 20))
            text = box.read(key)
        return text


class DryMessages(SaveMessages):
    """Messages in a dry run: other ranks' messages are assumed to equal this rank's."""

    def __init__(self, ranks: RankGroup) -> None:
        super().__init__(ranks)
        self._counted: Any = dry_group().counted
        self._receipt = ""

    def record_save(self, ranks: RankGroup, folder: Folder) -> DryFolder:
        """Count a save, and return the folder to use instead."""
        ranks._process_group.record("save")
        dry = DryFolder(folder.path)
        dry.fake = self._counted.fake
        return dry

    def gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        self._receipt = json.dumps(own)
        return super().gather(own)

    def end(self, failed: list[str]) -> None:
        super().end(failed)
        atexit.unregister(_linger)

    def _wait(self, box: MessageBox, key: str, check: Callable[[], None]) -> str:
        told = {"first": new_token(), "begun": '{"number": 1}', "end": f'[[], "{new_token()}"]'}
        text = told.get(key, self._receipt)
        self._counted.requests["get"] += 1
        self._counted.store_bytes += len(box.prefix + key) + len(text)
        return text


def _linger(until: float) -> None:
    """Keep the store alive at exit of rank 0 while other ranks read the answer."""
    time.sleep(max(until - time.monotonic(), 0.0))

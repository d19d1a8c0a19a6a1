"""Load a run: verify everything, then change the objects.

    open        the newest complete checkpoint, which rank 0 selects
    compare     the run's objects with the commit, slices with checksums
    hand over   states that only foreign code can load (`_handover.py`)
    read        slices into the memory of model and optimizer
    finish      rule, blocks and random generators

If a step fails on any rank, every rank raises and undoes the hand-over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

from manyhands._ranks.agreement import agree, run_on_all
from manyhands._ranks.dry_run import dry_group
from manyhands._ranks.presence import KILLED, Presence, explained, have_ended
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.random_state import check_random_state, set_random_state
from manyhands.checkpoint._commit import check_form
from manyhands.checkpoint._folder import Folder
from manyhands.checkpoint._format import RANDOM, ModelMeta, StateMeta
from manyhands.checkpoint._handover import ForeignState, ForeignStates
from manyhands.checkpoint._model import find_names, list_names, match_model
from manyhands.checkpoint._optimizer import Replica, prepare_to_load
from manyhands.checkpoint._optimizer_loader import OptimizerLoader
from manyhands.checkpoint._reader import Reader
from manyhands.checkpoint._tensor_parts import Savers, StoredSlice, TensorParts, find_reads
from manyhands.checkpoint._values import (
    HasState,
    RunObjects,
    check_has_state,
    check_scheduler,
    check_value,
    decode,
    escape,
)

DISK_TIMEOUT = timedelta(hours=2)  # for the slowest disk of all ranks


# A tensor's key, a stored slice, offsets inside the slice, and memory to read into.
SliceToRead: TypeAlias = tuple[str, StoredSlice, tuple[int, ...], Tensor]


def load_newest(
    folder: Folder, run: RunObjects, process_group: dist.ProcessGroup | None
) -> dict[str, object]:
    """Load the newest checkpoint. If it is replaced by a newer checkpoint meanwhile, load that."""
    dry = dry_group()
    if dry is not None and dry.counted.fake:
        raise ValueError(
            f"mh.load cannot read {folder.path} into tensors of dry_run(fake=True), which have no "
            "memory. Leave mh.load out of the dry run, or use fake=False."
        )
    ranks = _join(process_group)
    with explained(ranks, f"while it loaded a checkpoint. {KILLED}"):
        prepare_to_load(run.optimizers)
        savers = Savers.of(ranks)
        replicas = run_on_all(ranks, lambda: [Replica.of(each, savers) for each in run.optimizers])
        decides = ranks.rank == 0 or dry_group() is not None
        before = None
        while True:
            # Rank 0 decides, because a checkpoint may appear between the reads of two ranks. The
            # folder's path may differ between ranks. An empty name means the folder itself.
            found = run_on_all(ranks, lambda: folder.find_newest() if decides else "")
            name = ranks.all_gather_text(found)[0]
            try:
                return _load_checkpoint(folder, name, ranks, run, replicas)
            except FileNotFoundError:
                if name == before:  # missing, not replaced by a newer checkpoint
                    raise
                before = name


def _join(process_group: dist.ProcessGroup | None) -> RankGroup:
    """Return the ranks in a separate group, after each rank has called."""
    # Later, disks may take hours. A closed connection shows that a rank has died.
    ranks = RankGroup.of(process_group)
    try:
        return replace(ranks.with_cpu_group(), patience=DISK_TIMEOUT)
    except RuntimeError as error:
        ended, _ = Presence(_get_default_store()).find_first_ended(ranks.ranks)
        reason = f"not every rank has called within the group's timeout ({error})"
        if ended:
            reason = have_ended(ended)
        raise RuntimeError(
            f"rank {ranks.rank} has called mh.load, and {reason}. Call it on every rank."
        ) from error


def _load_checkpoint(
    folder: Folder, name: str, ranks: RankGroup, run: RunObjects, replicas: Sequence[Replica]
) -> dict[str, object]:
    with run_on_all(ranks, lambda: Reader(folder, name)) as reader, reader.explain():
        advice = f"Pass a path that all ranks share instead of {reader.path}."
        agree(ranks, {"checkpoints": reader.crc32}, advice)

        def compare() -> RunLoader:
            with reader.explain():
                return RunLoader(reader, run, replicas, ranks)

        loader = run_on_all(ranks, compare)
        # The next steps change objects. Each `run_on_all` ends with an exchange of errors, so
        # either every rank continues or every rank undoes.
        try:
            for step in (loader.foreign_states.apply, loader.fill, loader.finish):
                run_on_all(ranks, step)
        except BaseException:
            loader.foreign_states.undo()
            raise
        return loader.result


class RunLoader:
    """Loads a checkpoint into the objects of a run.

    The constructor compares objects and checksums without changing the run. `foreign_states` are
    loaded before model and optimizer, and undone if a later step fails on any rank.
    """

    def __init__(
        self, reader: Reader, run: RunObjects, replicas: Sequence[Replica], ranks: RankGroup
    ) -> None:
        self.result: dict[str, object] = {}
        self._reader = reader
        self._targets: dict[str, TensorParts] = {}
        self.foreign_states = ForeignStates()
        self._optimizers: list[OptimizerLoader] = []
        self._random: dict[str, Tensor] = {}
        commit = reader.commit
        own: dict[str, Tensor] = {}  # tensors of the saved rank with this number
        if run.optimizers:
            # Read all files, including files that no rank here uses: all must be undamaged.
            for number in range(ranks.rank, commit.workers, ranks.size):
                found = reader.read_own(number)
                if number == ranks.rank:
                    own = found
                    for key, state in own.items():
                        if key.startswith(RANDOM):
                            self._random[key.removeprefix(RANDOM)] = state
                    check_random_state(self._random)
        if commit.step is not None:
            self.result["step"] = commit.step
        names = None
        # The model is first: the optimizer's state is found by the model's names.
        if run.model is not None:
            names = find_names(run.model)
            if commit.model is None:
                raise ValueError("the checkpoint was saved without model=. Load it without model=.")
            self._add_model(*match_model(names, commit.model, "model", reader))
        if run.optimizers:
            if len(run.optimizers) != len(commit.optimizers):
                raise _wrong_number("optimizer", len(run.optimizers), len(commit.optimizers))
            for number, (each, replica) in enumerate(zip(run.optimizers, replicas, strict=True)):
                self._optimizers.append(OptimizerLoader(number, each, replica, names, reader, own))
        for loader in self._optimizers:
            self._targets |= loader.targets
            if commit.step is not None:
                self.result["step"] = loader.step_of_run(commit.step)
        if run.schedulers:
            self._add_schedulers(run.schedulers, commit.schedulers)
        missing = sorted(set(run.values) - set(commit.values))
        if missing:
            others = "and no other value"
            if commit.values:
                others = f"but {list_names(sorted(commit.values))}"
            raise ValueError(f"the checkpoint has no {list_names(missing)}, {others}.")
        for name, value in commit.values.items():
            self.result[name] = self._add_value(name, value, run.values.get(name))
        self._slices: list[SliceToRead] = []
        for key, target in self._targets.items():
            for stored, at, memory in find_reads(key, target, reader.tensors[key]):
                self._slices.append((key, stored, at, memory))
        reader.verify((key, stored, at, memory.shape) for key, stored, at, memory in self._slices)

    def _add_model(self, targets: dict[str, TensorParts], states: list[ForeignState]) -> None:
        self._targets |= targets
        self.foreign_states.states += states

    def _add_schedulers(self, here: Sequence[HasState], saved: Sequence[StateMeta]) -> None:
        if len(here) != len(saved):
            raise _wrong_number("scheduler", len(here), len(saved))
        for each, meta in zip(here, saved, strict=True):
            check_scheduler(each)
            if type(each).__name__ != meta["class"]:
                raise ValueError(
                    f"the checkpoint has the state of a {meta['class']}, but the scheduler here is "
                    f"a {type(each).__name__}. Create the scheduler that was saved."
                )
            self._add_object("the scheduler", each, meta["state"])

    def _add_object(self, name: str, each: HasState, meta: object) -> None:
        state = decode(meta, self._reader.read_once)
        foreign = ForeignState(name, each.state_dict, each.load_state_dict, state)
        self.foreign_states.states.append(foreign)

    def _add_value(self, name: str, meta: Any, target: object) -> object:
        """Return a value for the user: the decoded value, or `target`, which is loaded in place."""
        get = self._reader.read_once
        prefix = f"value/{escape(name)}"
        is_module = isinstance(meta, Mapping) and meta.get("$") == "module"
        if is_module:
            meta = meta["value"]
            check_form(meta, ModelMeta)
        if target is None:
            if is_module:
                return {each: get(f"{prefix}/{each}") for each in meta["params"] + meta["buffers"]}
            return decode(meta, get)
        check_value(name, target)
        holder = check_has_state(f"{name}=", target)
        if not is_module:
            self._add_object(f"{name}=", holder, meta)
        elif isinstance(target, nn.Module):
            names = find_names(target)
            self._add_model(*match_model(names, meta, prefix, self._reader, name))
        else:
            raise ValueError(
                f"the checkpoint has the state of a module for {name}=, and a "
                f"{type(target).__name__} was given."
            )
        return target

    def fill(self) -> None:
        """Read the slices, and pass the filled state to the optimizers."""
        try:
            for each in self._slices:
                self._reader.read(*each)
            for optimizer in self._optimizers:
                optimizer.load()
        except (OSError, ValueError) as error:
            # The only failure that cannot be undone: this would need a copy of the model.
            raise RuntimeError(
                f"{self._reader.path} was verified, but the load failed: {error} The model and the "
                "optimizer are now partially loaded."
            ) from error

    def finish(self) -> None:
        """Load rules, blocks and random generators. These steps cannot fail."""
        # Blocks need the complete model: a new anchor starts at the parameters.
        for optimizer in self._optimizers:
            optimizer.finish()
        if self._random:
            set_random_state(self._random)


def _wrong_number(what: str, here: int, saved: int) -> ValueError:
    if not saved:
        return ValueError(
            f"the checkpoint was saved without {what}=. Load it without {what}=: the {what} then "
            f"starts with new state. Pass {what}= to mh.save from now on."
        )
    return ValueError(
        f"the checkpoint has {saved} {what}(s), but {here} were passed. Pass all, in order."
    )

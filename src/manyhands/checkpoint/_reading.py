"""A load, step by step: first compare everything with its checksums, then change something.

    open        the newest complete checkpoint, the same on all ranks
    compare     the objects of the run with the commit, and its slices with their checksums
    hand over   the states that only foreign code can load (`_handover.py`)
    read        the slices, into the memory of the model and the optimizer
    finish      what follows from them: the rule, the blocks, the random generators

If a step fails on any rank, every rank raises, and what had been handed over is undone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import Optimizer

from manyhands._ranks.agreement import agree, run_on_all
from manyhands._ranks.dry_run import dry_group
from manyhands._ranks.presence import KILLED, Presence, explained, have_ended
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.random_state import check_random_state, set_random_state
from manyhands.checkpoint import _optimizer
from manyhands.checkpoint._folder import Folder
from manyhands.checkpoint._format import StateMeta
from manyhands.checkpoint._handover import (
    ForeignState,
    ForeignStates,
    OptimizerSnapshot,
    check_kinds,
)
from manyhands.checkpoint._model import ModelLoader, find_names, list_names, read_tensors
from manyhands.checkpoint._optimizer import OptimizerLoader, Replica, match_saved
from manyhands.checkpoint._reader import Reader
from manyhands.checkpoint._tensor_parts import Savers, StoredSlice, TensorParts, find_reads
from manyhands.checkpoint._values import (
    GetTensor,
    HasState,
    check_has_state,
    check_scheduler,
    check_value,
    decode,
    escape,
)

DISK_TIMEOUT = timedelta(hours=2)  # for the slowest rank's disk


# A tensor's key, a stored slice of it, where in that to read, and the memory to read into.
SliceToRead: TypeAlias = tuple[str, StoredSlice, tuple[int, ...], Tensor]


def load_newest(
    folder: Folder,
    model: nn.Module | None,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[HasState],
    values: Mapping[str, object],
    process_group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Load the newest checkpoint; if it is removed meanwhile for a newer one, load that."""
    ranks = _join(process_group)
    with explained(ranks, f"while it loaded a checkpoint. {KILLED}"):
        return _load_newest(folder, model, optimizers, schedulers, values, ranks)


def _load_newest(
    folder: Folder,
    model: nn.Module | None,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[HasState],
    values: Mapping[str, object],
    ranks: RankGroup,
) -> dict[str, Any]:
    _optimizer.prepare_to_load(optimizers)
    savers = Savers.of(ranks)
    replicas = run_on_all(ranks, lambda: [Replica.of(each, savers) for each in optimizers])
    run = Goal(model, optimizers, schedulers, values, replicas)
    first = ranks.rank == 0 or dry_group() is not None
    path = folder.path
    before = None
    problem = None
    while True:
        # Rank 0 decides: a checkpoint may be completed between two ranks' looks.
        found = run_on_all(ranks, lambda: folder.find_newest() if first else "")
        # Its name only, as this rank may have the folder under another path. An empty name means
        # that `path` itself is the checkpoint.
        name = ranks.all_gather_text(found)[0]
        if name == before:  # not removed for a newer one: really missing
            assert problem is not None
            raise problem
        try:
            return _load_checkpoint(folder, name, ranks, run)
        except FileNotFoundError as error:
            before = name
            problem = error
        except ValueError as error:
            if str(path / name) in str(error):
                raise
            raise ValueError(f"{path / name} cannot be loaded: {error}") from error


def _join(process_group: dist.ProcessGroup | None) -> RankGroup:
    """Return the ranks, in a group of their own, once each has called."""
    # From then on no rank is late by mistake: the slowest disk has hours, and a worker that dies is
    # noticed when its connections close.
    ranks = RankGroup.of(process_group)
    try:
        return replace(ranks.with_cpu_group(), patience=DISK_TIMEOUT)
    except RuntimeError as error:
        ended, _ = Presence(_get_default_store()).find_first_ended(ranks.ranks)
        reason = f"not every rank has within the group's timeout ({error})"
        if ended:
            reason = have_ended(ended)
        raise RuntimeError(
            f"rank {ranks.rank} has called mh.load, and {reason}. Call it on every rank."
        ) from error


@dataclass
class Goal:
    """The objects to load into."""

    model: nn.Module | None
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[HasState]
    values: Mapping[str, object]
    replicas: Sequence[Replica]  # for each optimizer
    own: Mapping[str, Tensor] = field(default_factory=dict)  # the saved rank's of this number


def _load_checkpoint(folder: Folder, name: str, ranks: RankGroup, run: Goal) -> dict[str, Any]:
    with run_on_all(ranks, lambda: Reader(folder, name)) as reader:
        advice = f"Give a path that they share, not {reader.path}."
        agree(ranks, {"checkpoints": reader.crc32}, advice)
        random: dict[str, Tensor] = {}

        def prepare() -> tuple[RunLoader, list[SliceToRead]]:
            """Compare everything, and change nothing; return the loader and what it will read."""
            run.own = _read_own(reader, ranks) if run.optimizers else {}
            found = {key.partition("random/")[2]: state for key, state in run.own.items()}
            random.update({key: state for key, state in found.items() if key})
            if run.optimizers and ranks.rank < reader.commit.workers:
                check_random_state(random)
            with reader.explain():
                loader = RunLoader(reader, run)
            slices = [
                (key, *each)
                for key, target in loader.targets.items()
                for each in find_reads(key, target, reader.tensors[key])
            ]
            reader.verify((key, stored, at, target.shape) for key, stored, at, target in slices)
            return loader, slices

        loader, slices = run_on_all(ranks, prepare)

        def fill() -> None:
            try:
                for each in slices:
                    reader.read(*each)
            except (OSError, ValueError) as error:
                # The one failure that cannot be undone without a copy of the whole model.
                raise RuntimeError(
                    f"{reader.path} was verified, and could then not be read again: {error} The "
                    "model and the optimizer are loaded in part now."
                ) from error
            loader.load_optimizers()

        def finish() -> None:
            """Continue from what is filled on all ranks. None of this can be refused."""
            loader.finish()
            if random:
                set_random_state(random)

        # From here on things change. Each `run_on_all` ends with an exchange of errors, so that
        # either every rank goes on or every rank undoes.
        try:
            run_on_all(ranks, loader.load_foreign_states)
            run_on_all(ranks, fill)
            run_on_all(ranks, finish)
        except BaseException:
            loader.undo()
            raise
        return loader.result


def _read_own(reader: Reader, ranks: RankGroup) -> dict[str, Tensor]:
    """Return what the saved rank of this rank's number had for itself."""
    # A run that continues wants the whole checkpoint sound, also what has no successor here.
    for other in range(ranks.rank + ranks.size, reader.commit.workers, ranks.size):
        reader.read_own(other)
    return reader.read_own(ranks.rank)


# -- the objects of a run --------------------------------------------------------------------------


class RunLoader:
    """Loads a checkpoint into the objects of a run.

    Creating a loader compares everything with the commit and reads small values, but changes
    nothing. The next steps are `load_foreign_states`, filling the `targets`, `load_optimizers` and
    `finish`; if any of them fails on any rank, `undo`.
    """

    def __init__(self, reader: Reader, run: Goal) -> None:
        commit = reader.commit
        get = reader.read_once
        self.targets: dict[str, TensorParts] = {}
        self.result: dict[str, object] = {} if commit.step is None else {"step": commit.step}
        self._foreign_states = ForeignStates()
        self._optimizers: list[OptimizerLoader] = []
        self._snapshot: OptimizerSnapshot | None = None
        model = run.model
        optimizers = run.optimizers
        values = run.values
        names = None
        # The model first: the optimizer's state is found by the model's names.
        if model is not None:
            names = find_names(model)
            if commit.model is None:
                raise ValueError("the checkpoint was saved without model=. Load it without model=.")
            self._add_model(ModelLoader(names, commit.model, "model", reader))
        matches = match_saved(optimizers, commit.optimizers) if optimizers else []
        if matches is None:
            raise _wrong_number("optimizer", len(optimizers), len(commit.optimizers))
        for each, replica, match in zip(optimizers, run.replicas, matches, strict=True):
            layout = run.own.get(f"layout.{match.numbers.start}")
            own_layout = _optimizer.to_bytes(replica.layout)
            same = layout is not None and layout.tolist() == own_layout.tolist()
            loader = OptimizerLoader(each, match, names, reader, replica, same)
            self.targets |= loader.targets
            self._optimizers.append(loader)
            if commit.step is not None:
                self.result["step"] = loader.step_of_run(commit.step)
        self._add_schedulers(run.schedulers, commit.schedulers, get)
        missing = sorted(set(values) - set(commit.values))
        if missing:
            saved = list_names(sorted(commit.values))
            others = f"but {saved}" if saved else "and no other value"
            raise ValueError(f"the checkpoint has no {list_names(missing)}, {others}.")
        for name, value in commit.values.items():
            self._add_value(name, value, values.get(name), reader)

    def _add_model(self, loader: ModelLoader) -> None:
        self.targets |= loader.targets
        self._foreign_states.add(*loader.foreign_states)

    def _add_schedulers(
        self, here: Sequence[HasState], saved: Sequence[StateMeta], get: GetTensor
    ) -> None:
        """Prepare to load the schedulers, in the order in which they were saved."""
        if here and len(here) != len(saved):
            raise _wrong_number("scheduler", len(here), len(saved))
        # Not strict: with no scheduler here, the saved ones are left out.
        for each, meta in zip(here, saved, strict=False):
            check_scheduler(each)
            if type(each).__name__ != meta["class"]:
                raise ValueError(
                    f"the checkpoint has the state of a {meta['class']}, and the scheduler here is "
                    f"a {type(each).__name__}."
                )
            state = decode(meta["state"], get)
            self._add_object("the scheduler", each, state)

    def _add_object(self, name: str, each: HasState, state: object) -> None:
        """Prepare to load the state of an object, in place."""
        check_kinds(name, each, state)
        self._foreign_states.add(ForeignState(name, each.state_dict, each.load_state_dict, state))

    def _add_value(self, name: str, meta: object, target: object, reader: Reader) -> None:
        """Prepare one of the user's values; `target`, if not None, is the object to load into."""
        holder = None
        if target is not None:
            check_value(name, target)
            holder = check_has_state(f"{name}=", target)
        if isinstance(meta, Mapping) and meta.get("$") == "module":
            prefix = f"value/{escape(name)}"
            if holder is None:
                self.result[name] = read_tensors(meta["value"], prefix, reader.read_once)
                return
            if not isinstance(target, nn.Module):
                raise ValueError(
                    f"the checkpoint has the state of a module for {name}=, and a "
                    f"{type(target).__name__} was given."
                )
            names = find_names(target)
            self._add_model(ModelLoader(names, meta["value"], prefix, reader, what=name))
            self.result[name] = target
            return
        value = decode(meta, reader.read_once)
        if holder is None:
            self.result[name] = value
            return
        self._add_object(f"{name}=", holder, value)
        self.result[name] = target

    def load_foreign_states(self) -> None:
        """Load what only foreign code can load, while the model and optimizer are unchanged."""
        self._foreign_states.apply()
        # The copies cost memory, so they are made only if an optimizer may refuse its state.
        if not all(each.is_sure for each in self._optimizers):
            inner = [each.inner for each in self._optimizers]
            self._snapshot = OptimizerSnapshot(inner, self.targets.values())

    def load_optimizers(self) -> None:
        """Hand the filled targets to the optimizers, which may run the user's code."""
        for optimizer in self._optimizers:
            optimizer.load()

    def finish(self) -> None:
        """Let rules and blocks continue."""
        # Blocks need the model complete: a new anchor begins at the parameters.
        for optimizer in self._optimizers:
            optimizer.finish()

    def undo(self) -> None:
        """Put everything back as it was, after some rank could not load."""
        if self._snapshot is not None:
            self._snapshot.restore()
        failed = self._foreign_states.undo()
        if failed:
            raise RuntimeError(
                f"the load failed, and {', '.join(failed)} did not take its earlier state back."
            )


def _wrong_number(what: str, here: int, saved: int) -> ValueError:
    """Return the error for another number of schedulers, say, than were saved."""
    if not saved:
        return ValueError(
            f"the checkpoint was saved without {what}=. Load it without {what}=: the {what} then "
            f"starts with new state. Give mh.save {what}= from now on."
        )
    return ValueError(
        f"the checkpoint has {saved} {what}(s), and {here} were given. Give all, in order."
    )

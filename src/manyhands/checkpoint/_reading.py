"""A load, step by step: compare everything with the index and its checksums, then change something.

    open        the newest complete checkpoint, the same on all ranks
    compare     the objects of the run with the index, and the files with their checksums
    hand over   the states that only foreign code can load (`_values.py`)
    read        slices, into the memory of the model and the optimizer
    finish      what follows from them: the rule, the blocks, the random generators

If a step fails on any rank, every rank raises, and what had been handed over is undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan
from torch.optim import Optimizer

from manyhands._core.agreement import agree, run_on_all
from manyhands._core.random_state import check_random_state, set_random_state
from manyhands._core.ranks import RankGroup
from manyhands.checkpoint import _folder, _index
from manyhands.checkpoint._index import Reader
from manyhands.checkpoint._model import ModelLoader, find_names, list_names, read_tensors
from manyhands.checkpoint._optimizer import (
    OptimizerLoader,
    OptimizerSnapshot,
    has_foreign_loading,
    prepare_to_load,
)
from manyhands.checkpoint._ranks import Replica, find_replicas, join_ranks
from manyhands.checkpoint._slices import LoadPlanner, Parts, count_elements
from manyhands.checkpoint._values import (
    ForeignState,
    ForeignStates,
    GetTensor,
    HasState,
    check_has_state,
    check_value,
    decode,
    escape,
)


def load_newest(
    path: Path,
    model: nn.Module | None,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[HasState],
    values: Mapping[str, object],
    process_group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Load the newest checkpoint; if it is removed meanwhile for a newer one, load that."""
    ranks = join_ranks(process_group, "mh.load")
    prepare_to_load(optimizers)
    replicas = find_replicas(optimizers, ranks)

    def compare(index: _index.Index, get: GetTensor) -> RunLoader:
        return RunLoader(index, get, model, optimizers, schedulers, values, replicas)

    before, problem = None, None
    while True:
        # Rank 0 decides: a checkpoint may be completed between two ranks' looks.
        found = run_on_all(ranks, lambda: _folder.find_newest(path) if ranks.rank == 0 else None)
        # Its name only, as this rank may have the folder under another path. An empty name means
        # that `path` itself is the checkpoint.
        own_name = "" if found is None or _folder.is_checkpoint(path) else found.name
        name = ranks.all_gather_text(own_name)[0]
        checkpoint = path / name if name else _folder.resolve_link(path)
        if checkpoint == before:  # not removed for a newer one: really missing
            assert problem is not None
            raise problem
        try:
            return _load_checkpoint(checkpoint, ranks, compare, continues=bool(optimizers))
        except FileNotFoundError as error:
            before, problem = checkpoint, error
        except ValueError as error:
            if str(checkpoint) in str(error):
                raise
            raise ValueError(f"{checkpoint} cannot be loaded: {error}") from error


def _load_checkpoint(
    checkpoint: Path,
    ranks: RankGroup,
    compare: Callable[[_index.Index, GetTensor], RunLoader],
    *,
    continues: bool,
) -> dict[str, Any]:
    """Compare a checkpoint with what is here, then load it on all ranks, or on none."""
    with ExitStack() as stack:
        index, crc32 = run_on_all(ranks, lambda: _open_index(checkpoint, stack))
        agree(ranks, {"checkpoints": crc32}, f"Give a path that they share, not {checkpoint}.")
        reader = stack.enter_context(Reader(checkpoint, index))
        loader, plan, planner, random = run_on_all(
            ranks, lambda: _find_problems(reader, ranks, compare, continues)
        )

        def fill() -> None:
            _read_into_targets(reader, plan, planner)
            loader.finish()
            set_random_state(random)

        # From here on things change. Each `run_on_all` ends with an exchange of errors, so that
        # either every rank goes on or every rank undoes.
        try:
            run_on_all(ranks, loader.load_foreign_states)
            run_on_all(ranks, fill)
        except BaseException:
            loader.undo()
            raise
        return loader.result


# -- compare ---------------------------------------------------------------------------------------


def _open_index(checkpoint: Path, stack: ExitStack) -> tuple[_index.Index, int]:
    """Return the index and its checksum, and protect the checkpoint until the stack is closed."""
    try:
        stack.enter_context(_folder.hold_for_reading(checkpoint))
        return _index.read(checkpoint)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{checkpoint} cannot be found on this rank. Give a path that all ranks share."
        ) from error


def _find_problems(
    reader: Reader,
    ranks: RankGroup,
    compare: Callable[[_index.Index, GetTensor], RunLoader],
    continues: bool,
) -> tuple[RunLoader, LoadPlan, LoadPlanner, dict[str, Tensor]]:
    """Find everything that can be wrong, and change nothing."""
    # Return the loader, the plan of what to read, its planner, and this rank's random state.
    index = reader.index
    try:
        loader = compare(index, reader.read_whole)
    except (LookupError, AttributeError) as error:  # the index's content has another form
        raise ValueError(f"{reader.folder} has invalid content: {error!r:.200}.") from error
    planner = LoadPlanner(loader.targets, index.tensors)
    plan = planner.create_local_plan()
    _check_covered(plan, loader.targets)
    # A run that continues wants the whole checkpoint sound; an evaluation only what it reads.
    _verify_slices(reader, plan, ranks, all_of_it=continues)
    random: dict[str, Tensor] = {}
    if continues:
        prefix = f"random/{ranks.rank}/"
        for key in index.tensors:
            if key.startswith(prefix):
                random[key.removeprefix(prefix)] = reader.read_whole(key)
        check_random_state(random)
    return loader, plan, planner, random


def _check_covered(plan: LoadPlan, targets: Mapping[str, Parts]) -> None:
    """Raise ValueError unless the plan fills every element of every target."""
    found = dict.fromkeys(targets, 0)
    for item in plan.items:
        found[item.dest_index.fqn] += math.prod(item.lengths)
    for key, target in targets.items():
        needed = count_elements(target)
        # Counting is enough: stored slices do not overlap (`_index.covers_once`).
        if found[key] != needed:
            raise ValueError(
                f"the checkpoint has {found[key]:,} of {needed:,} elements of {key!r}."
            )


def _verify_slices(reader: Reader, plan: LoadPlan, ranks: RankGroup, *, all_of_it: bool) -> None:
    """Compare every slice that the plan reads with its checksum."""
    # With `all_of_it`, also verify what no rank reads, divided evenly among the ranks.
    tensors = reader.index.tensors
    needed = {
        _find_slice(reader.index, item.storage_index): tensors[item.storage_index.fqn]
        for item in plan.items
    }
    if all_of_it:
        everything = [(each, tensor) for tensor in tensors.values() for each in tensor.slices]
        needed |= dict(everything[ranks.rank :: ranks.size])
    for stored, tensor in needed.items():
        reader.check(stored, tensor.torch_dtype)


def _find_slice(index: _index.Index, place: MetadataIndex) -> _index.StoredSlice:
    """Return the index's entry for the slice that the planner asks for."""
    slices = index.tensors[place.fqn].slices
    # The planner's hint is usually right, and saves a search through all slices.
    hint = place.index
    if hint is not None and hint < len(slices) and slices[hint].offsets == place.offset:
        return slices[hint]
    return next(each for each in slices if each.offsets == tuple(place.offset or ()))


# -- read ------------------------------------------------------------------------------------------


def _read_into_targets(reader: Reader, plan: LoadPlan, planner: LoadPlanner) -> None:
    """Read into the model's own memory, after all of it has been read once and was right."""
    try:
        for item in plan.items:
            stored = _find_slice(reader.index, item.storage_index)
            target = planner.resolve_tensor(item)
            reader.read(stored, item.storage_offsets, item.lengths, target)
    except (OSError, ValueError) as error:
        # The one failure that cannot be undone without a copy of the whole model.
        raise RuntimeError(
            f"{reader.folder} was verified, and could then not be read again: {error} The model "
            "and the optimizer are loaded in part now."
        ) from error


# -- the objects of a run --------------------------------------------------------------------------


class RunLoader:
    """Loads a checkpoint into the objects of a run.

    Creating a loader compares everything with the index and reads small values, but changes
    nothing. The next steps are `load_foreign_states`, filling the `targets`, and `finish`; if any
    of them fails on any rank, `undo`.
    """

    def __init__(
        self,
        index: _index.Index,
        get: GetTensor,
        model: nn.Module | None,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[HasState],
        values: Mapping[str, object],
        replicas: Sequence[Replica],
    ) -> None:
        self.targets: dict[str, Parts] = {}
        self.result: dict[str, object] = {} if index.step is None else {"step": index.step}
        self._foreign_states = ForeignStates()
        self._models: list[ModelLoader] = []
        self._optimizers: list[OptimizerLoader] = []
        self._snapshot: OptimizerSnapshot | None = None
        tensors, names = index.tensors, None
        # The model first: the optimizer's state is found by the model's names.
        if model is not None:
            names = find_names(model)
            if index.model is None:
                raise ValueError("the checkpoint was saved without model=. Load it without model=.")
            self._add_model(ModelLoader(names, index.model, "model", tensors, get))
        if optimizers:
            _check_as_many("optimizer", len(optimizers), len(index.optimizers))
        for number, (each, replica) in enumerate(zip(optimizers, replicas, strict=True)):
            meta = index.optimizers[number]
            loader = OptimizerLoader(each, meta, names, tensors, get, number, replica)
            self.targets |= loader.targets
            self._optimizers.append(loader)
        self._add_schedulers(schedulers, index.schedulers, get)
        missing = sorted(set(values) - set(index.values))
        if missing:
            saved = list_names(sorted(index.values))
            raise ValueError(f"the checkpoint has no {list_names(missing)}, but {saved}.")
        for name, value in index.values.items():
            self._add_value(name, value, values.get(name), tensors, get)

    def _add_model(self, loader: ModelLoader) -> None:
        self.targets |= loader.targets
        self._models.append(loader)
        self._foreign_states.add(*loader.foreign_states)

    def _add_schedulers(
        self, here: Sequence[HasState], saved: Sequence[_index.StateMeta], get: GetTensor
    ) -> None:
        """Prepare to load the schedulers, in the order in which they were saved."""
        if here:
            _check_as_many("scheduler", len(here), len(saved))
        # Not strict: with no scheduler here, the saved ones are left out.
        for each, meta in zip(here, saved, strict=False):
            check_has_state("scheduler", each)
            if type(each).__name__ != meta["class"]:
                raise ValueError(
                    f"the checkpoint has the state of a {meta['class']}, and the scheduler here is "
                    f"a {type(each).__name__}."
                )
            state = decode(meta["state"], get)
            self._foreign_states.add(
                ForeignState("the scheduler", each.state_dict, each.load_state_dict, state)
            )

    def _add_value(
        self,
        name: str,
        meta: object,
        target: object,
        tensors: Mapping[str, _index.StoredTensor],
        get: GetTensor,
    ) -> None:
        """Prepare one of the user's values; `target`, if not None, is the object to load into."""
        holder = None
        if target is not None:
            check_value(name, target)
            holder = check_has_state(f"{name}=", target)
        if isinstance(meta, Mapping) and meta.get("$") == "module":
            prefix = f"value/{escape(name)}"
            if holder is None:
                self.result[name] = read_tensors(meta["value"], prefix, get)
                return
            names = find_names(target)
            self._add_model(ModelLoader(names, meta["value"], prefix, tensors, get, what=name))
            self.result[name] = target
            return
        value = decode(meta, get)
        if holder is None:
            self.result[name] = value
            return
        self._foreign_states.add(
            ForeignState(f"{name}=", holder.state_dict, holder.load_state_dict, value)
        )
        self.result[name] = target

    def load_foreign_states(self) -> None:
        """Load what only foreign code can load, while the model and optimizer are unchanged."""
        self._foreign_states.apply()
        # The copies cost memory, so they are made only if an optimizer may refuse its state.
        if any(has_foreign_loading(each.inner) for each in self._optimizers):
            inner = [each.inner for each in self._optimizers]
            self._snapshot = OptimizerSnapshot(inner, self.targets.values())

    def finish(self) -> None:
        """Hand the filled targets over: first what may run the user's code, then ours alone."""
        for optimizer in self._optimizers:
            optimizer.load()
        for model in self._models:
            model.finish()
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


def _check_as_many(what: str, here: int, saved: int) -> None:
    """Raise unless as many schedulers, say, are given as were saved."""
    if here != saved:
        raise ValueError(
            f"the checkpoint has {saved} {what}(s), and {here} were given. Give all, in order."
        )

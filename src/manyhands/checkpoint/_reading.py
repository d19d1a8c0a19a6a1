"""The steps of a load; see `_load.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlan

from manyhands.checkpoint import _folder, _index
from manyhands.checkpoint import _planner as _plan
from manyhands.checkpoint._contents import Restoring, at_rest, listed_as
from manyhands.checkpoint._random import check_random_state, set_random_state
from manyhands.checkpoint._ranks import Team
from manyhands.checkpoint._replicas import Replica, replicas_of
from manyhands.checkpoint._storage import Reader


def load_newest(
    path: Path, given: Mapping[str, Any], values: Mapping[str, Any], process_group: Any
) -> dict[str, Any]:
    """Load; should the checkpoint be removed meanwhile for a newer one, that one."""
    team = Team.of(process_group, "mh.load")
    at_rest(given["optimizer"], to_load=True)
    replicas = replicas_of(listed_as(given["optimizer"]), team)
    before, problem = None, None
    while True:
        found = team.together(lambda: _folder.newest(path) if team.rank == 0 else None)
        # By its name, as this worker may have the folder elsewhere; none, if it is `path` itself.
        name = team.tell("" if found is None or _folder.is_checkpoint(path) else found.name)
        checkpoint = path / name if name else _folder.itself(path)
        if checkpoint == before:
            assert problem is not None
            raise problem
        try:
            return _loaded(checkpoint, team, given, values, replicas)
        except FileNotFoundError as error:
            before, problem = checkpoint, error


def _loaded(
    checkpoint: Path,
    team: Team,
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    replicas: Sequence[Replica],
) -> dict[str, Any]:
    with ExitStack() as stack:
        index, total = team.together(lambda: _opened(checkpoint, stack))
        totals = team.gather(str(total))
        if len(set(totals)) > 1:
            raise ValueError(
                f"{checkpoint} is not the same on all workers. Give a path on a file system that "
                "they share."
            )
        reader = stack.enter_context(Reader(checkpoint, index))
        restoring, plan, planner, random = team.together(
            lambda: _compared(reader, given, values, team, replicas)
        )

        def fill() -> None:
            _read(reader, plan, planner)
            restoring.finish()
            set_random_state(random)

        try:
            team.together(restoring.ask_others)
            team.together(fill)
        except BaseException:
            restoring.undo()
            raise
        return restoring.result


def _read(reader: Reader, plan: LoadPlan, planner: _plan.LoadPlanner) -> None:
    """Into the model's own memory, once all of it has been read and found right."""
    try:
        reader.read_data(plan, planner).wait()
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"{reader.folder} was read and found right, and could then not be read again: {error} "
            "The model and the optimizer are loaded in part now. Load a checkpoint, or start anew."
        ) from error


def _opened(checkpoint: Path, stack: ExitStack) -> tuple[_index.Index, int]:
    try:
        stack.enter_context(_folder.reading(checkpoint))
        return _index.read(checkpoint)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{checkpoint} cannot be found. If rank 0 does not say so, too, this worker has "
            "another file system: give a path that all workers share."
        ) from error


def _compared(
    reader: Reader,
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    team: Team,
    replicas: Sequence[Replica],
) -> tuple[Restoring, LoadPlan, _plan.LoadPlanner, dict[str, Tensor]]:
    """All that can be wrong is found here, and nothing is changed."""
    index = reader.index
    restoring = Restoring(index, reader.whole, **given, values=values, replicas=replicas)
    planner = _plan.LoadPlanner(restoring.targets, reader.read_metadata())
    plan = planner.create_local_plan()
    _check_covered(plan, restoring.targets)
    goes_on = bool(listed_as(given["optimizer"]))
    reader.verify(plan, team.rank, team.size, all_of_it=goes_on)
    random: dict[str, Tensor] = {}
    if goes_on:
        prefix = f"random/{team.rank}/"
        for key in index.tensors:
            if key.startswith(prefix):
                random[key.removeprefix(prefix)] = reader.whole(key)
        check_random_state(random)
    return restoring, plan, planner, random


def _check_covered(plan: LoadPlan, targets: Mapping[str, Any]) -> None:
    """Every element that is wanted must be somewhere in the checkpoint."""
    found = dict.fromkeys(targets, 0)
    for item in plan.items:
        found[item.dest_index.fqn] += math.prod(item.lengths)
    for key, target in targets.items():
        needed = sum(math.prod(chunk.sizes) for chunk in target.__create_chunk_list__())
        if found[key] != needed:
            raise ValueError(
                f"the checkpoint has {found[key]:,} of the {needed:,} elements of {key!r} that are "
                "needed here: its index is damaged. Load another checkpoint."
            )

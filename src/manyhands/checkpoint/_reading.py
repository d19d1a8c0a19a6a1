"""The steps of a load: compare everything with the index and its checksums, then change something.

Apart from `_save_and_load.py` because it imports torch.distributed.checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlan

from manyhands.checkpoint import _folder, _index
from manyhands.checkpoint._blocks import Replica, find_replicas
from manyhands.checkpoint._contents import RunLoader, as_list, prepare_optimizers
from manyhands.checkpoint._planner import LoadPlanner
from manyhands.checkpoint._random import check_random_state, set_random_state
from manyhands.checkpoint._ranks import CheckpointRanks
from manyhands.checkpoint._storage import Reader


def load_newest(
    path: Path, objects: Mapping[str, Any], values: Mapping[str, Any], process_group: Any
) -> dict[str, Any]:
    """Load the newest checkpoint; if it is removed meanwhile for a newer one, load that."""
    ranks = CheckpointRanks.join(process_group, "mh.load")
    prepare_optimizers(objects["optimizer"], to_load=True)
    replicas = find_replicas(as_list(objects["optimizer"]), ranks)
    before, problem = None, None
    while True:
        # Rank 0 decides: a checkpoint may be completed between two ranks' looks.
        found = ranks.run_on_all(lambda: _folder.find_newest(path) if ranks.rank == 0 else None)
        # Its name only, as this rank may have the folder under another path. An empty name means
        # that `path` itself is the checkpoint.
        own_name = "" if found is None or _folder.is_checkpoint(path) else found.name
        name = ranks.broadcast_text(own_name)
        checkpoint = path / name if name else _folder.resolve_link(path)
        if checkpoint == before:  # not removed for a newer one: really missing
            assert problem is not None
            raise problem
        try:
            return _load_checkpoint(checkpoint, ranks, objects, values, replicas)
        except FileNotFoundError as error:
            before, problem = checkpoint, error


def _load_checkpoint(
    checkpoint: Path,
    ranks: CheckpointRanks,
    objects: Mapping[str, Any],
    values: Mapping[str, Any],
    replicas: Sequence[Replica],
) -> dict[str, Any]:
    with ExitStack() as stack:
        index, crc32 = ranks.run_on_all(lambda: _open_index(checkpoint, stack))
        if len(set(ranks.all_gather_text(str(crc32)))) > 1:
            raise ValueError(
                f"{checkpoint} is not the same on all ranks. Give a path on a file system that "
                "they share."
            )
        reader = stack.enter_context(Reader(checkpoint, index))
        loader, plan, planner, random = ranks.run_on_all(
            lambda: _compare(reader, objects, values, ranks, replicas)
        )

        def fill() -> None:
            _read_into_targets(reader, plan, planner)
            loader.finish()
            set_random_state(random)

        # From here on things change. Each `run_on_all` ends with an exchange of errors, so that
        # either every rank goes on or every rank undoes.
        try:
            ranks.run_on_all(loader.load_foreign_states)
            ranks.run_on_all(fill)
        except BaseException:
            loader.undo()
            raise
        return loader.result


def _read_into_targets(reader: Reader, plan: LoadPlan, planner: LoadPlanner) -> None:
    """Read into the model's own memory, after all of it has been read once and was right."""
    try:
        reader.read_data(plan, planner).wait()
    except (OSError, ValueError) as error:
        # The one failure that cannot be undone without a copy of the whole model.
        raise RuntimeError(
            f"{reader.folder} was verified, and could then not be read again: {error} The model "
            "and the optimizer are loaded in part now. Load a checkpoint, or start anew."
        ) from error


def _open_index(checkpoint: Path, stack: ExitStack) -> tuple[_index.Index, int]:
    """Return the index and its checksum, and protect the checkpoint until the stack is closed."""
    try:
        stack.enter_context(_folder.hold_for_reading(checkpoint))
        return _index.read(checkpoint)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{checkpoint} cannot be found. If rank 0 does not say so, too, this rank has "
            "another file system: give a path that all ranks share."
        ) from error


def _compare(
    reader: Reader,
    objects: Mapping[str, Any],
    values: Mapping[str, Any],
    ranks: CheckpointRanks,
    replicas: Sequence[Replica],
) -> tuple[RunLoader, LoadPlan, LoadPlanner, dict[str, Tensor]]:
    """Find everything that can be wrong, and change nothing.

    Return the loader, the plan of what to read, its planner, and this rank's random state.
    """
    index = reader.index
    loader = RunLoader(index, reader.read_whole, **objects, values=values, replicas=replicas)
    planner = LoadPlanner(loader.targets, reader.read_metadata())
    plan = planner.create_local_plan()
    _check_covered(plan, loader.targets)
    continues = bool(as_list(objects["optimizer"]))
    # A run that continues wants the whole checkpoint sound; an evaluation only what it reads.
    reader.verify(plan, ranks.rank, ranks.size, all_of_it=continues)
    random: dict[str, Tensor] = {}
    if continues:
        prefix = f"random/{ranks.rank}/"
        for key in index.tensors:
            if key.startswith(prefix):
                random[key.removeprefix(prefix)] = reader.read_whole(key)
        check_random_state(random)
    return loader, plan, planner, random


def _check_covered(plan: LoadPlan, targets: Mapping[str, Any]) -> None:
    """Raise ValueError unless the plan fills every element of every target."""
    found = dict.fromkeys(targets, 0)
    for item in plan.items:
        found[item.dest_index.fqn] += math.prod(item.lengths)
    for key, target in targets.items():
        needed = sum(math.prod(chunk.sizes) for chunk in target.__create_chunk_list__())
        # Counting is enough: stored slices do not overlap (`_index.covers_once`).
        if found[key] != needed:
            raise ValueError(
                f"the checkpoint has {found[key]:,} of the {needed:,} elements of {key!r} that are "
                "needed here: its index is damaged. Load another checkpoint."
            )

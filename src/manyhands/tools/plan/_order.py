"""Compare the order of collectives between ranks of a script (`compare_order`).

Ranks with different collectives on a process group hang. Three processes run the script in dry runs
as ranks 0, 1 and N - 1.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed._tools import MemTracker
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from manyhands._arguments import format_bytes
from manyhands._ranks.dry_run import Collective, DryGroup, DryRun, dry_run
from manyhands.tools.check._files import keep_files, put_back
from manyhands.tools.check._job import CheckedScript
from manyhands.tools.check._processes import Rank, run, run_script, single_thread

BETWEEN_PAIRS = ("send", "receive")  # differ between ranks by design
UNEVEN = ("all_to_all",)  # bytes may differ between ranks
GroupKey: TypeAlias = tuple[tuple[int, ...], int]  # ranks, and a number for equal ranks
TIMEOUT = 600.0  # seconds
NAMED = 4  # maximum number of ranks in the name of a group


@dataclass(frozen=True)
class RankOrder:
    rank: int
    sequence: tuple[Collective, ...]
    groups: tuple[tuple[int, ...], ...]  # the ranks of each process group
    peak: int  # bytes

    def group_keys(self) -> list[GroupKey]:
        seen = Counter[tuple[int, ...]]()
        keys = []
        for ranks in self.groups:
            seen[ranks] += 1
            keys.append((ranks, seen[ranks]))
        return keys

    def on_group(self, key: GroupKey) -> list[tuple[int, Collective]]:
        """Return collectives with places in the sequence."""
        found: list[tuple[int, Collective]] = []
        keys = self.group_keys()
        if key not in keys:
            return found
        number = keys.index(key)
        for place, each in enumerate(self.sequence):
            if each.group == number and each.operation not in BETWEEN_PAIRS:
                found.append((place, each))
        return found


@dataclass(frozen=True)
class CollectiveOrder:
    world_size: int
    ranks: tuple[RankOrder, ...]

    @property
    def difference(self) -> str:
        """The first difference between ranks; "" if equal."""
        found = []
        keys = dict.fromkeys(key for rank in self.ranks for key in rank.group_keys())
        for key in keys:
            members = [rank for rank in self.ranks if rank.rank in key[0]]
            on_ranks = {rank.rank: rank.on_group(key) for rank in members}
            found += _first_difference(name_of_group(*key), on_ranks)
        return min(found)[1] if found else ""

    def __str__(self) -> str:
        lines = []
        for rank in self.ranks:
            used = len({each.group for each in rank.sequence})
            lines.append(
                f"rank {rank.rank:,}: {len(rank.sequence):,} collectives in {used} of "
                f"{len(rank.groups)} communicators, peak memory {format_bytes(rank.peak)}"
            )
        first = self.ranks[0]
        names = [name_of_group(*key) for key in first.group_keys()]
        calls = Counter[tuple[int, str]]()
        sent = Counter[tuple[int, str]]()
        for each in first.sequence:
            calls[each.group, each.operation] += 1
            sent[each.group, each.operation] += each.sent
        lines += ["", f"collectives of rank {first.rank}, with sent bytes:"]
        for key, number in calls.items():
            group, operation = key
            lines.append(f"    {names[group]}: {number:,} {operation}, {format_bytes(sent[key])}")
        return "\n".join([*lines, "", self.difference or "The order of collectives is equal."])


def name_of_group(ranks: Sequence[int], number: int) -> str:
    listed = ", ".join(map(str, ranks[:NAMED]))
    if len(ranks) > NAMED:
        listed += f", ... {ranks[-1]}"
    name = f"group of ranks {listed}"
    if number > 1:
        name += f" (number {number})"
    return name


def _first_difference(
    name: str, on_ranks: Mapping[int, Sequence[tuple[int, Collective]]]
) -> list[tuple[int, str]]:
    """Return places in the sequence with messages."""
    elsewhere = ""  # the first row in which ranks are in different lines
    for number, row in enumerate(zip_longest(*on_ranks.values())):
        present = [entry for entry in row if entry is not None]
        differs = len(present) < len(row) or len({_compared(each) for _, each in present}) > 1
        if not elsewhere and (differs or len({each.line for _, each in present}) > 1):
            parts = [f"Ranks differ first at collective {number + 1} of the {name}:"]
            for rank, entry in zip(on_ranks, row, strict=True):
                parts.append(f"    rank {rank}: {_describe(entry)}")
            elsewhere = "\n".join(parts)
        if differs:
            text = f"{elsewhere}\nFrom collective {number + 1} on, ranks would hang or mix tensors."
            return [(min(place for place, _ in present), text)]
    return []


def _compared(each: Collective) -> tuple[object, ...]:
    if each.operation in UNEVEN:
        return (each.operation,)
    return each.operation, each.nbytes, each.shape


def _describe(entry: tuple[int, Collective] | None) -> str:
    if entry is None:
        return "no further collective"
    each = entry[1]
    if each.operation == "save":
        return f"mh.save in {each.line}"
    return f"{each.operation} of {format_bytes(each.nbytes)}, shape {each.shape}, in {each.line}"


# -- a run of the script ---------------------------------------------------------------------------


class EnoughSteps(BaseException):
    pass


@dataclass(frozen=True)
class DryRank:
    script: CheckedScript
    world_size: int
    numbers: tuple[int, ...]
    fake: bool

    def run(self, rank: Rank) -> None:
        keep_files(rank.out)
        number = self.numbers[rank.number]
        os.environ.update(
            RANK=str(number), WORLD_SIZE=str(self.world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"
        )
        memory = PeakMemory()
        with dry_run(self.world_size, number, fake=self.fake) as counted, memory:
            _run_in_this_group(self.script.steps)
            with suppress(EnoughSteps):
                run_script(self.script)
            rank.leave(_as_record(counted, memory))


def compare_order(
    script: str,
    arguments: Sequence[str] = (),
    *,
    world_size: int,
    steps: int = 5,
    fake: bool = True,
) -> CollectiveOrder:
    """Run a script as ranks 0, 1 and N - 1 until an optimizer takes more than `steps` steps."""
    numbers = tuple(sorted({0, min(1, world_size - 1), world_size - 1}))
    checked = CheckedScript(script, tuple(arguments), steps)
    with TemporaryDirectory() as folder, single_thread():
        job = DryRank(checked, world_size, numbers, fake)
        out = Path(folder, "run")
        out.mkdir()
        try:
            found = run(job, len(numbers), out, TIMEOUT, forks=len(numbers))
        finally:
            put_back(out)
        if found.late:
            raise RuntimeError(f"the script takes longer than {TIMEOUT:g} s. Lower --steps.")
        if found.failed:
            last = f"rank {len(numbers) - 1} is rank {numbers[-1]:,} of {world_size:,}"
            reason = found.why(f"In the dry run, in which {last}")
            if "have no values" in reason:
                reason += " On the command line, use --values."
            raise RuntimeError(reason)
    orders = []
    for number, record in zip(numbers, found.records, strict=True):
        sequence = tuple(Collective(**each) for each in record.pop("sequence"))
        orders.append(RankOrder(number, sequence, **record))
    return CollectiveOrder(world_size, tuple(orders))


class PeakMemory(MemTracker):
    """Measures peaks without statistics of modules."""

    def _pre_fw_hook(self, module: Any, inputs: Any) -> None:
        pass

    def _post_fw_hook(self, module: Any, inputs: Any, outputs: Any) -> None:
        pass

    def _pre_bw_hook(self, module: Any, args: Any) -> None:
        pass

    def _post_bw_hook(self, module: Any, args: Any) -> None:
        pass

    def restart(self) -> None:
        self._peak_mem.clear()
        self._peak_mem_snap.clear()

    @property
    def peak(self) -> int:
        return total_peak(self)


def total_peak(tracker: MemTracker) -> int:
    return sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())


def _as_record(counted: DryRun, memory: PeakMemory) -> dict[str, Any]:
    for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
        if isinstance(group, DryGroup):  # also unused groups
            counted.groups[group.number] = list(ranks)
    sequence = [asdict(each) for each in counted.sequence]
    groups = tuple(tuple(ranks) for ranks in counted.groups)
    return {"sequence": sequence, "groups": groups, "peak": memory.peak}


def _run_in_this_group(steps: int) -> None:
    """Let a script use the existing process group, and end it after `steps` steps.

    The process ends afterwards, so torch's functions are not restored.
    """
    modules: list[Any] = [dist, dist.distributed_c10d]
    for module in modules:
        module.init_process_group = lambda *args, **kwargs: None
        module.destroy_process_group = lambda *args, **kwargs: None
    taken = Counter[int]()

    def count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        taken[id(optimizer)] += 1
        if taken[id(optimizer)] > steps:
            raise EnoughSteps

    register_optimizer_step_pre_hook(count)

"""What a worker saves of the synchronisation, and how it is taken up again.

`saved` is a worker's own part of its optimizer's `state_dict`: everything, also in the middle of a
block. `counters` and `go_on` are for checkpoints that all workers share: numbers only, since
`checkpoint/_blocks_state.py` saves anchor and memories by parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from manyhands._core.dtensor import is_dtensor
from manyhands.blocks._anchor import OuterState
from manyhands.blocks._checks import memory_order
from manyhands.blocks._outer import Outer
from manyhands.blocks._sync import Sync

Names = Mapping[str, str]


def settings_of(outer: Outer) -> dict[str, Any]:
    """An outer step by its kind and settings; by what it says of itself, if it does so."""
    if type(outer).__repr__ is not Outer.__repr__ and not is_dataclass(outer):
        return {"outer": repr(outer)}
    plain = {
        name: value if isinstance(value, bool | int | float | str | None) else repr(value)
        for name, value in sorted(vars(outer).items())
    }
    return {"outer": type(outer).__name__, **{f"outer.{name}": v for name, v in plain.items()}}


def as_named(options: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Options by the names of the class."""
    return {names.get(name, name): value for name, value in options.items()}


def sorted_out(
    who: str,
    overrides: Mapping[str, Any],
    options: Mapping[str, Any],
    names: Names,
    groups: Iterable[Mapping[str, Any]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Which overrides are of the blocks, by the engine's names, and which of parameter groups.

    `groups` are those that are here and those that were saved: what no group has is a mistake.
    """
    ours = {name: name for name in options} | {names.get(name, name): name for name in options}
    known = {name for group in groups for name in group} - {"params", "param_names"}
    for_blocks, for_groups = {}, {}
    for name, value in overrides.items():
        if name in ours:
            for_blocks[ours[name]] = value
        elif name in known:
            for_groups[name] = value
        else:
            raise ValueError(
                f"optimizer_overrides has {name}={value!r}, which is an option neither of the "
                f"parameter groups ({', '.join(sorted(known))}) nor of {who} "
                f"({', '.join(as_named(options, names))})."
            )
    return for_blocks, for_groups


def check_options(
    saved: Mapping[str, Any], options: Mapping[str, Any], changed: Mapping[str, Any], names: Names
) -> None:
    """Raise where the saved run had other options, unless they were `changed` on purpose."""
    meant = set(changed)
    for name, value in changed.items():
        here = options[name]
        if name == "outer" and isinstance(value, Outer):  # all of its settings are meant
            value, here = settings_of(value), _outer_in(options)
            meant |= here.keys()
        if value != here and str(value) != str(here):
            raise ValueError(
                f"optimizer_overrides has {names.get(name, name)}={changed[name]!r}, and the "
                f"optimizer was made with {here}. Make it with what you want to change to."
            )
    differ = [n for n in options if n not in meant and saved.get(n) != options[n]]
    if differ:
        called = {name: names.get(name, name) for name in differ}
        listed = "; ".join(f"{called[n]}: saved {saved.get(n)}, now {options[n]}" for n in differ)
        overrides = {called[name]: options[name] for name in differ}
        raise ValueError(
            f"this state dict is of a run with other options: {listed}. Make the optimizer with "
            "the options it was saved with, or say that the change is meant: "
            f"load_state_dict(state, optimizer_overrides={overrides})."
        )


def _outer_in(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in options.items() if name.partition(".")[0] == "outer"}


KEY = "blocks"
FORMAT = 2


def saved(sync: Sync) -> dict[str, Any]:
    """Everything a bitwise continuation needs; waits for what is under way to arrive."""
    workers = sync.team.workers
    return {
        **common(sync),
        "workers": [workers.size, workers.rank],
        "apart": sync.apart,
        "residual": [segment.residual for segment in sync.point.segments],
        "fresh": sync.fresh,
        "last": [sync.news.workers, *sync.news.left_out],
        "clock": sync.clock(),
        # (in a crew they are sent again when they are due, and nobody is waited for)
        "pending": [] if sync.team.elastic else [pending.saved() for pending in sync.pending],
    }


def common(sync: Sync) -> dict[str, Any]:
    """What any worker can go on from."""
    return {
        "format": FORMAT,
        "workers": [0, 0],  # nobody's in particular
        **sync.common_state(),
        "apart": False,
        "residual": [],
        "pending": [],
        "counts": [sync.news.left_out_ever, sync.news.undone],
    }


def check_together(sync: Sync) -> None:
    """Raise inside a block, where each worker has parameters of its own."""
    if sync.apart and not sync.alone:
        raise RuntimeError(
            "a checkpoint for all workers has one model, and inside a block each worker has "
            "its own. Call optimizer.synchronize() on every worker first, or save each worker's "
            "state_dict()."
        )


def check_whole(sync: Sync) -> None:
    """Raise where a rank has not all of the anchor."""
    if sync.point.inner.size > 1 or any(is_dtensor(param) for param in sync.point.params):
        raise ValueError(
            "with an inner_group, or sharded parameters, each rank has a part of the anchor. Save "
            "with mh.save, which takes the parts together, or state_dict() on every rank, to load "
            "it on the same."
        )


def counters(sync: Sync, options: Mapping[str, Any]) -> dict[str, Any]:
    """The plain numbers that any worker can go on from."""
    check_together(sync)
    return {
        "format": FORMAT,
        "options": dict(options),
        **sync.counters(),
        "alone": sync.alone,
        "counts": [sync.news.left_out_ever, sync.news.undone],
    }


def go_on(ours: Mapping[str, Any], sync: Sync, unsaved: Sequence[OuterState]) -> None:
    """Go on from these counters, where anchor and memories have been filled.

    `unsaved` are those that were not: of parameters that were not trained, or by one worker.
    """
    _drop_pending(sync)
    sync.load_counters(dict(ours))
    sync.news.left_out_ever, sync.news.undone = ours["counts"]
    for each in unsaved:
        each.begin()
    if ours["alone"]:  # its steps were not in blocks
        sync.begin_block()
    sync.agreed = sync.steps >= sync.warmup or not sync.local_warmup
    sync.apart = False
    sync.restart_clock()


def checked(
    ours: Any,
    options: Mapping[str, Any],
    changed: Mapping[str, Any],
    names: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """Our part of a state dict (None: it was of the bare optimizer)."""
    if ours is None:
        return None
    if not isinstance(ours, dict) or ours.get("format") != FORMAT:
        raise ValueError(
            'the "blocks" part of this state dict is not one that this version of manyhands has '
            "written. Load it with the version that saved it."
        )
    check_options(ours["options"], options, changed, names or {})
    # (with other options it is cut otherwise; their differences are sent when due)
    return {**ours, "pending": []} if changed else ours


def check_fits(ours: Mapping[str, Any], sync: Sync) -> None:
    """Raise where the saved anchor is not of the parameters here."""
    if sync.alone or not ours["anchor"]:  # of one worker, there or here: it has none
        return
    sizes = [anchor.numel() for anchor in ours["anchor"]]
    here = [segment.anchor.numel() for segment in sync.point.segments]
    memories = {len(memories) for memories in ours["memories"]}
    if memories - {sync.point.outer.memories}:
        raise ValueError(
            f"this state dict has {max(memories)} memories of its outer step, and the one here has "
            f"{sync.point.outer.memories}. Continue with an outer step of the same kind."
        )
    if ours["order"] != memory_order(sync.point.params):
        raise ValueError(
            "this state dict is of parameters that lay in memory in another order. Convert the "
            "model as it was, such as by model.to(memory_format=torch.channels_last), and make the "
            "optimizer then."
        )
    if sizes != here:
        raise ValueError(
            f"this state dict is of {sum(sizes):,} elements in {len(sizes)} types of parameters, "
            f"and the optimizer has {sum(here):,} in {len(here)}. Load it into one made for the "
            "same model (and the same size of inner_group), to which parameters were added, or "
            "thawed, in the same order."
        )


def load(ours: Mapping[str, Any] | None, sync: Sync) -> None:
    """Go on from there; from the parameters as they are, if nothing was saved."""
    _drop_pending(sync)
    if ours is None:
        sync.point.begin()
        sync.restart_clock()
    else:
        _take_over(ours, sync)


def _drop_pending(sync: Sync) -> None:
    for pending in sync.pending:
        pending.errand.finished()  # it may write to what is loaded now
    sync.pending.clear()
    sync.is_new = False


def _take_over(ours: Mapping[str, Any], sync: Sync) -> None:
    if sync.alone:
        sync.load_counters(dict(ours))
        sync.restart_clock()
    elif ours["anchor"]:
        sync.load_common(dict(ours))
        _take_own(ours, sync)
    else:
        _grow(ours, sync)
    sync.agreed = ours["steps"] >= sync.warmup or not sync.local_warmup
    sync.apart = ours["apart"] and bool(ours["anchor"])
    sync.news.left_out_ever, sync.news.undone = ours["counts"]
    sync.news.workers, *sync.news.left_out = ours.get("last", [0])
    if ours.get("fresh") is not None:
        sync.fresh = ours["fresh"]
    for pending in ours["pending"] if sync.point.segments else []:
        sync.take_up(pending)


def _grow(ours: Mapping[str, Any], sync: Sync) -> None:
    """Go on from what one worker has saved: its steps count, and were in no blocks."""
    sync.load_counters(dict(ours))
    sync.point.begin()
    sync.begin_block()
    sync.restart_clock()


def _take_own(ours: Mapping[str, Any], sync: Sync) -> None:
    """What this rank alone had. What rounding has left is of slices that no other rank has."""
    workers = sync.team.workers
    if list(ours["workers"]) != [workers.size, workers.rank]:
        sync.point.forget_residuals()
        sync.restart_clock()
        return
    for segment, residual in zip(sync.point.segments, ours["residual"], strict=True):
        if segment.residual is not None and residual is not None:
            segment.residual.copy_(residual)
    sync.restart_clock(*ours["clock"])

"""Agree on the rules of a cursor: the samples, and the order and sizes in which they are taken.

A position in an epoch means the same samples only under the same rules. So all ranks agree on them
when a cursor is made, the workers of blocks compare them in each sync round, and a saved position
is refused where the order is another one.

    samples, shards, seed, shuffle    the order of the epochs
    drop_last                         whether samples that do not fill a batch are left out
    batch                             samples that one worker takes in a step
    ahead                             steps that a worker may load in advance
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, Protocol, TypedDict

from torch import Tensor
from torch.utils.data import DataLoader

from manyhands._arguments import one_of, shown, whole
from manyhands._optimizers.state_parts import SavedEntries
from manyhands._ranks.agreement import agree, run_on_all
from manyhands._ranks.ranks import RankGroup
from manyhands.data._order import DataShards

FORMAT = 1
ADVICE = "Make the same Cursor on every rank, and load the same state on all of them."
OWN_OPTIONS = ("batch_sampler", "sampler")


class MapDataset(Protocol):
    """A dataset with a length, whose samples are found by index: torch calls it map-style."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...


class Arguments(TypedDict):
    """The arguments of a cursor that all ranks must have in common."""

    batch_size: int
    keep: str
    max_local_batch_size: int | None
    shuffle: bool
    seed: int
    drop_last: bool


class EpochOrder(TypedDict):
    """The rules that say which sample a position is."""

    samples: int
    shards: int | None  # a checksum; None if the samples are in no shards
    seed: int
    shuffle: bool


class Rules(EpochOrder):
    """All rules, in plain values."""

    drop_last: bool
    batch: int
    ahead: int


def agree_on_rules(
    dataset: MapDataset, arguments: Arguments, options: Mapping[str, Any], ranks: RankGroup
) -> Rules:
    """Return the rules, or raise on every rank if one made a mistake, or if ranks differ."""

    # `options` are those of the loader.
    def check() -> None:
        check_dataset("Cursor", dataset)
        if len(dataset) == 0:
            raise ValueError("Cursor needs a dataset with samples, and got one of length 0.")
        for name in OWN_OPTIONS:
            if options.get(name) is not None:
                raise ValueError(f"{name} must be left out: a Cursor orders the samples itself.")
        if options.get("in_order") is False:
            raise ValueError(
                "in_order=False gives batches in the order in which they are ready, and then a "
                "Cursor cannot know which were trained on. Leave it out."
            )
        check_arguments(arguments, options, ranks.size)

    run_on_all(ranks, check)
    order: EpochOrder = {
        "samples": len(dataset),
        "shards": dataset.checksum if isinstance(dataset, DataShards) else None,
        "seed": arguments["seed"],
        "shuffle": bool(arguments["shuffle"]),
    }
    facts = {name: str(value) for name, value in arguments.items()}
    agree(ranks, {"data": {**facts, **order}}, ADVICE)
    batch = arguments["batch_size"]
    if arguments["keep"] == "micro":
        batch = batch * ranks.size
    return {
        **order,
        "drop_last": bool(arguments["drop_last"]),
        "batch": batch,
        "ahead": options.get("num_workers", 0) * (options.get("prefetch_factor") or 2),
    }


def check_arguments(arguments: Arguments, options: Mapping[str, object], ranks: int) -> None:
    """Raise if a cursor's arguments are wrong on this rank."""
    one_of("keep", arguments["keep"], ["batch", "micro"])
    whole("batch_size", arguments["batch_size"], 1)
    whole("max_local_batch_size", arguments["max_local_batch_size"] or 1, 1)
    whole("seed", arguments["seed"])
    whole("num_workers", options.get("num_workers", 0))
    if arguments["keep"] == "batch" and arguments["batch_size"] < ranks:
        raise ValueError(
            f"batch_size={arguments['batch_size']} is less than a sample for each of {ranks} "
            'ranks. keep="micro" gives it for one rank.'
        )


def check_dataset(owner: str, dataset: object) -> None:
    """Raise a TypeError unless the dataset of a loader of ours has a length."""
    if isinstance(dataset, DataLoader):
        raise TypeError(
            f"{owner} makes the batches itself, and got a DataLoader. Give it the loader's dataset "
            f"and options: {owner}(loader.dataset, batch_size={dataset.batch_size or 32}, "
            f"num_workers={dataset.num_workers}, ...)."
        )
    if not isinstance(dataset, Sized):
        raise TypeError(f"dataset must be a dataset with a length, got {shown(dataset)}.")


def describe_order(rules: EpochOrder) -> dict[str, Any]:
    """Return what a saved position refers to."""
    order = {name: rules[name] for name in EpochOrder.__annotations__}  # type: ignore[literal-required]
    return {"version": FORMAT, **order}


def check_state(state: Mapping[str, object], rules: EpochOrder) -> None:
    """Raise if a saved position is not one in this order."""
    SavedEntries(state, "a position in the data")  # raises if it is not a dict
    for name, here in describe_order(rules).items():
        came = state.get(name)
        if isinstance(came, Tensor) or came != here:  # (a tensor compares element by element)
            raise ValueError(
                f"the saved position is one in an order with {name}={came!r}, and here it is "
                f"{here!r}. Make the Cursor as in that run, or leave it out of the load."
            )

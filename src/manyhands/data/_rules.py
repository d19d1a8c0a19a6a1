"""Agree on the rules of a cursor: the samples, their order, and the sizes of steps.

The samples of a position depend on the rules. So all ranks compare the rules when a cursor is
created, and workers of blocks compare rules in each sync round. A saved
position is rejected if the order differs.

    samples, shards, seed, shuffle    the order of the epochs
    drop_last                         whether to omit samples that do not fill a batch
    batch                             samples per step and worker
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
    """A dataset with a length and samples by index, which torch calls map-style."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...


class Arguments(TypedDict):
    """The arguments of a cursor that must be equal on all ranks."""

    batch_size: int
    keep: str
    max_local_batch_size: int | None
    shuffle: bool
    seed: int
    drop_last: bool


class EpochOrder(TypedDict):
    """The rules that map a position to a sample."""

    samples: int
    shards: int | None  # a checksum; None without shards
    seed: int
    shuffle: bool


class Rules(EpochOrder):
    """All rules as plain values."""

    drop_last: bool
    batch: int
    ahead: int


def agree_on_rules(
    dataset: MapDataset, arguments: Arguments, options: Mapping[str, Any], ranks: RankGroup
) -> Rules:
    """Return the rules. Raise on every rank if arguments are wrong on a rank or differ."""

    # `options` are passed to the loader.
    def check() -> None:
        check_dataset("Cursor", dataset)
        if len(dataset) == 0:
            raise ValueError("Cursor needs a dataset with samples, got a dataset of length 0.")
        for name in OWN_OPTIONS:
            if options.get(name) is not None:
                raise ValueError(f"omit {name}: a Cursor determines the order of the samples.")
        if options.get("in_order") is False:
            raise ValueError(
                "omit in_order=False: a Cursor needs the batches in order, to know which samples "
                "were trained."
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
            f"batch_size={arguments['batch_size']} must be at least the number of ranks, {ranks}. "
            'With keep="micro", batch_size counts the samples of each rank.'
        )


def check_dataset(owner: str, dataset: object) -> None:
    """Raise TypeError unless the dataset of a loader has a length."""
    if isinstance(dataset, DataLoader):
        raise TypeError(
            f"{owner} needs a dataset, got a DataLoader. Pass the loader's dataset and options: "
            f"{owner}(loader.dataset, batch_size={dataset.batch_size or 32}, "
            f"num_workers={dataset.num_workers}, ...)."
        )
    if not isinstance(dataset, Sized):
        raise TypeError(f"dataset must be a dataset with a length, got {shown(dataset)}.")


def describe_order(rules: EpochOrder) -> dict[str, Any]:
    """Return the order that a saved position refers to."""
    order = {name: rules[name] for name in EpochOrder.__annotations__}  # type: ignore[literal-required]
    return {"version": FORMAT, **order}


def check_state(state: Mapping[str, object], rules: EpochOrder) -> None:
    """Raise if a saved position does not belong to this order."""
    SavedEntries(state, "a position in the data")  # raises unless the state is a dict
    for name, here in describe_order(rules).items():
        came = state.get(name)
        if isinstance(came, Tensor) or came != here:  # tensors compare elementwise
            raise ValueError(
                f"the saved position has {name}={came!r}, but this Cursor has {name}={here!r}. "
                "Create the Cursor as in the saved run, or do not load it."
            )

"""Create a cursor for a dataset or a stream: `Cursor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from manyhands.data._cursor import MapCursor
from manyhands.data._rules import Arguments, MapDataset, check_dataset
from manyhands.data._stream import Stream, StreamCursor


def Cursor(
    dataset: MapDataset | Stream,
    batch_size: int | None = None,
    *,
    keep: Literal["batch", "micro"] = "batch",
    max_local_batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    optimizer: Optimizer | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    loader: Callable[..., Iterable[Any]] = DataLoader,
    **options: Any,
) -> MapCursor | StreamCursor:
    """Return a data loader that gives every sample once per epoch, for any number of workers.

    >>> import torch, manyhands as mh
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 4), torch.randn(100, 1))
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> cursor = mh.Cursor(data, batch_size=16, optimizer=optimizer)
    >>> while cursor.epoch < 2:
    ...     for inputs, targets in cursor:
    ...         optimizer.zero_grad()
    ...         losses = torch.nn.functional.mse_loss(model(inputs), targets, reduction="none")
    ...         cursor.mean(losses.sum()).backward()
    ...         optimizer.step()
    >>> cursor.epoch, cursor.position
    (2, 0)

    `Cursor` replaces a `DataLoader` with a `DistributedSampler`. Save it with the run, as in
    `mh.save(folder, model=model, optimizer=optimizer, cursor=cursor)`. After `mh.load`, on any
    number of ranks, or after an interrupted loop, iteration continues after the last trained
    sample.

    With `keep="batch"`, the sequence of batches does not depend on the number of ranks. If a batch
    does not divide evenly, the ranks' parts differ by one sample, and `mean` weights the parts
    correctly.

    Args:
        dataset: a dataset with a length and samples by index, or a stream (see
            `manyhands.data.StreamCursor`).
        batch_size: the number of samples per step; see `keep`.
        keep: "batch": `batch_size` counts the samples of all ranks together. "micro": `batch_size`
            counts the samples of each rank, so the batch grows with the number of ranks.
        max_local_batch_size: the maximum samples per pass and rank. Larger steps are divided into
            passes: see `passes`.
        shuffle: whether to shuffle each epoch. False uses the order of the dataset.
        seed: the seed of the shuffling.
        drop_last: whether to omit the last samples of an epoch if they do not fill a batch. By
            default the last batch is shorter.
        optimizer: the optimizer that trains on the data. A batch counts as trained after the
            optimizer's step, and in blocks after the next sync round. Without an optimizer, a batch
            counts when the loop receives it.
        process_group: the ranks that share a step, unless the optimizer defines them. Default: all
            ranks.
        loader: `DataLoader`, or a class with the same arguments.
        options: further arguments of the loader, such as `num_workers` and `collate_fn`.
    """
    if batch_size is None:
        check_dataset("Cursor", dataset)
        raise TypeError("Cursor needs batch_size: the number of samples per step, see `keep`.")
    arguments: Arguments = {
        "batch_size": batch_size,
        "keep": keep,
        "max_local_batch_size": max_local_batch_size,
        "shuffle": shuffle,
        "seed": seed,
        "drop_last": drop_last,
    }
    kind: Any = MapCursor
    is_stream = isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized)
    if is_stream and dataset is not None:
        kind = StreamCursor
    cursor: MapCursor | StreamCursor = kind(
        dataset, arguments, optimizer, process_group, loader, options
    )
    return cursor

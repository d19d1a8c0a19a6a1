"""Make a cursor for a dataset: `Cursor`, which chooses the class by the kind of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from manyhands._arguments import explained
from manyhands.data._cursor import MapCursor
from manyhands.data._rules import Arguments, MapDataset, check_dataset
from manyhands.data._stream import Stream, StreamCursor


@explained
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
    """Return a data loader that gives every sample once in an epoch, for any number of workers.

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

    It takes the place of a `DataLoader` and its `DistributedSampler`. Save it with the run, as in
    `mh.save(folder, model=model, optimizer=optimizer, cursor=cursor)`. A run that loads it, on any
    number of ranks, continues after the last sample that was trained on. So does a new loop after
    one that was left early.

    Each step's samples are known before they are divided among the ranks. So with `keep="batch"`
    the sequence of batches does not depend on the number of ranks. Where a batch does not divide
    evenly, the ranks' parts differ by one sample, and `mean` gives each its right weight.

    Args:
        dataset: a dataset with a length, whose samples are found by index; or a stream, for which
            `manyhands.data.StreamCursor` says what else there is.
        batch_size: the samples of a step, see `keep`.
        keep: "batch": `batch_size` is that of all ranks together, however many there are. "micro":
            `batch_size` is that of one rank, and the batch follows the ranks.
        max_local_batch_size: the most samples in one pass on one rank. If a rank has more of them
            in a step, they come as several passes: see `passes`.
        shuffle: whether each epoch has another order; otherwise the order is the dataset's.
        seed: the seed of these orders.
        drop_last: leave out the samples at the end of an epoch that do not fill a batch. By
            default the last batch is a short one.
        optimizer: the optimizer that trains on the data. A batch counts as trained on once the
            optimizer has stepped, and in blocks once the next sync round took place. Without an
            optimizer, a batch counts as soon as the loop has it.
        process_group: the ranks that share a step, if no optimizer of ours says so; all by default.
        loader: what loads the samples: `DataLoader`, or a class that takes the same arguments.
        options: further arguments of the loader, such as `num_workers` and `collate_fn`.
    """
    if batch_size is None:
        check_dataset("Cursor", dataset)
        raise TypeError("Cursor needs batch_size: the samples of a step, see `keep`.")
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

"""Find the largest micro-batch that fits into memory, by trial.

Sizes double until a trial fails, followed by bisection. All ranks try equal sizes, and agree after
each. The passes of the plain model have no collectives, so no rank waits for a rank that runs out
of memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from manyhands._arguments import explained, instance, parse_bytes, shown, whole
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.random_state import random_state, set_random_state
from manyhands._tensors.trees import tensors_in, tree_map_tensors

Batch = TypeVar("Batch")
PRECISION = 8  # the result is up to 1/8 below the largest size that fits


@explained
def largest_micro_batch(
    model: nn.Module,
    loss: Callable[[nn.Module, Batch], Tensor],
    batch: Batch,
    most: int,
    *,
    memory: float | str | None = None,
    reserve: float | str = 0,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> int:
    """Return the number of samples that fit into a pass on every rank, found by trial.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())
    >>> def loss(model, batch):
    ...     return model(batch).square().mean()
    >>> mh.largest_micro_batch(model, loss, torch.randn(8, 64), most=512, memory="128 KiB")
    96

    A pass is a forward and a backward. Pass the result to an `AdaptiveDataLoader` as
    `max_local_batch_size`. Call this on every rank, with the plain model on its device, before you
    wrap it. Gradients, buffers and random generators are unchanged afterwards.

    Args:
        model: the plain model.
        loss: `loss(model, batch)` returns the loss, on which `backward()` is called.
        batch: an example from the loader, of the size to try first. The first dimension of every
            tensor is the sample dimension, along which larger batches repeat the samples.
        most: the largest size to try.
        memory: the bytes that a pass may take, such as "6 GiB". The default is nine tenths of the
            free memory of the accelerator. Required on a CPU, where only memory between forward and
            backward counts.
        reserve: bytes of `memory` to leave free, such as 12 per parameter for gradients and Adam
            state that will be allocated later.
        process_group: the ranks; default: all.
    """
    ranks = RankGroup.of(process_group)
    instance("model", model, nn.Module, "a torch.nn.Module")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    tensors = tensors_in(batch)
    if not tensors:
        raise TypeError(f"batch must be a batch of the loader, with tensors, got {shown(batch)}.")
    least = len(tensors[0])
    if least == 0:
        raise ValueError("batch must have at least one sample, got 0. Pass a batch of the loader.")
    whole("most", most, least, "It must reach the example's number of samples.")
    if memory is None and device.type == "cpu":
        raise ValueError(
            'memory= is required on a CPU, such as memory="6 GiB": a trial beyond the available '
            "memory would kill the process."
        )
    if any(hasattr(module, "no_sync") for module in model.modules()):
        raise ValueError(
            "largest_micro_batch() needs the plain model: call it before you wrap it. Collectives "
            "would wait forever for a rank that has run out of memory."
        )
    if memory is None:  # not all free bytes, because allocators round up
        memory = int(0.9 * torch.accelerator.get_memory_info(device)[0])
    allowed = parse_bytes(memory) - (parse_bytes(reserve) if reserve else 0)

    def fits(samples: int) -> bool:
        here = _bytes_of_pass(model, loss, _resized_batch(batch, samples), device) <= allowed
        return all(fit == 1.0 for (fit,) in ranks.all_gather([float(here)], device))

    # A pass changes running statistics, and random generators through dropout.
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    random = random_state()
    try:
        return _largest_pass_that_fits(fits, least, most)
    finally:
        set_random_state(random)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _largest_pass_that_fits(fits: Callable[[int], bool], least: int, most: int) -> int:
    if not fits(least):
        raise ValueError(
            f"the example's {least} sample(s) do not fit into the allowed memory. Start with a "
            "smaller batch, shard the model (see mh.plan()), or allow more memory."
        )
    low = least  # fits
    high = most + 1  # does not fit
    while high - low > max(1, low // PRECISION):
        trial = low * 2
        if trial >= high:
            trial = (low + high) // 2
        if fits(trial):
            low = trial
        else:
            high = trial
    return low


def _bytes_of_pass(
    model: nn.Module, loss: Callable[[nn.Module, Batch], Tensor], batch: Batch, device: torch.device
) -> float:
    """Return the peak memory of a pass; infinity if memory runs out."""
    if device.type == "cpu":
        return _bytes_kept(model, loss, batch)
    accelerator = torch.accelerator
    accelerator.empty_cache()  # fragments of an earlier trial must not fail this trial
    before = accelerator.memory_allocated(device)
    accelerator.reset_peak_memory_stats(device)
    try:
        _run_pass(model, loss, batch)
        accelerator.synchronize(device)
        return float(accelerator.max_memory_allocated(device) - before)
    except torch.OutOfMemoryError:
        return float("inf")
    finally:
        gc.collect()  # after an error, its traceback still references tensors


def _bytes_kept(
    model: nn.Module, loss: Callable[[nn.Module, Batch], Tensor], batch: Batch
) -> float:
    """Return the bytes that autograd saves, without the model's tensors."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            _run_pass(model, loss, batch)
    except torch.OutOfMemoryError:
        return float("inf")
    return float(sum(kept.values()))


def _run_pass(model: nn.Module, loss: Callable[[nn.Module, Batch], Tensor], batch: Batch) -> None:
    with torch.enable_grad():
        # Not `backward()`, which would add to `.grad` and run the hooks of a rule.
        params = [param for param in model.parameters() if param.requires_grad]
        torch.autograd.grad(loss(model, batch), params, allow_unused=True)


def _resized_batch(batch: Batch, samples: int) -> Batch:
    """Cut or repeat the example batch to this number of samples."""

    def resize(tensor: Tensor) -> Tensor:  # (samples of the example, ...) -> (samples, ...)
        return tensor[torch.arange(samples, device=tensor.device) % len(tensor)]

    resized: Batch = tree_map_tensors(resize, batch)
    return resized

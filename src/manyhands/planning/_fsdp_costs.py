"""What FSDP costs a worker: the rows of each parameter, in wraps.

`in_flight` is every whole tensor, and every tensor on its way, while a wrap's gradients are
computed.

An optimizer that looks at whole tensors is a `WholeTensorOptimizer` with FSDP. Its state then
counts the copy of the P / N parameters that a rank owns, and it sends 2 G (N-1)/N² more: the shards
of a gradient go to one owner, and those of the result come back from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manyhands._core.codec import Codec
from manyhands.planning._sizes import (
    Cost,
    ModelSizes,
    ParamSize,
    SliceBytes,
    WrapParams,
    sent_per_worker,
    summed_in,
)
from manyhands.sharding.fsdp._owners import BUCKET, bucket_ranges
from manyhands.sharding.zero._layout import deal_out


@dataclass(frozen=True)
class _WrapBytes:
    """Bytes of one wrap, with padding wherever tensors travel."""

    gathered: int  # its whole parameters
    gradients: int  # its whole gradients, as autograd makes them
    reduced: int  # its gradients in the memory of the reduce-scatter
    received: int  # what arrives for this rank and is not summed in place; a codec's messages
    sent: int  # its gradients as they travel
    residual: int  # what a rank keeps of what the codec has left out


def fsdp_cost(sizes: ModelSizes, workers: int, gloo: bool, codec: Codec | None = None) -> Cost:
    state = sum(
        param.state_bytes(param.shard_elements(workers))
        for optimizer in sizes.optimizers
        if not optimizer.owned_whole
        for param in optimizer.trained
    )
    owned = [_owned_whole(one.params, workers) for one in sizes.optimizers if one.owned_whole]
    wraps = [_wrap_bytes(wrap, workers, gloo, codec) for wrap in sizes.wraps]
    gathered = sum(wrap.gathered for wrap in wraps)
    reduced = sum(wrap.reduced for wrap in wraps)
    sent = sum(wrap.sent for wrap in wraps)
    # The outermost wrap stays gathered from forward to backward; all others are gathered twice.
    stays = sum(
        b.gathered for b, wrap in zip(wraps, sizes.wraps, strict=True) if wrap.outer is None
    )
    all_gathers = sum(1 if wrap.outer is None else 2 for wrap in sizes.wraps if wrap.params)
    used_flags = sum(len(wrap.params) for wrap in sizes.wraps)  # one byte each
    most = _most_in_fsdp_backward(sizes.wraps, wraps, workers)
    return Cost(
        parameters=gathered // workers,
        gradients=reduced // workers,
        optimizer=state + sum(one.held for one in owned),
        in_flight=max(0, most - reduced // workers, *(one.in_flight for one in owned)),
        sent=sent_per_worker(2 * gathered - stays + sent + 2 * used_flags, workers)
        + sum(one.sent for one in owned),
        collectives=all_gathers * (workers if gloo else 1)  # on gloo N broadcasts
        + sum(wrap.reduced > 0 for wrap in wraps)
        + 1  # the flags
        + sum(one.messages for one in owned),
        residuals=sum(wrap.residual for wrap in wraps),
    )


@dataclass(frozen=True)
class _OwnedWhole:
    """What a rank has to do with the tensors that it owns whole for an optimizer."""

    held: int  # the tensors and their state
    in_flight: int  # whole gradients, and the others' shards of a bucket of them, in a step
    sent: int
    messages: int


def _owned_whole(params: Sequence[ParamSize], workers: int) -> _OwnedWhole:
    """Deal out the tensors as `WholeTensorOptimizer` does, and count for the rank with most."""
    owners = deal_out([(n, p.elements) for n, p in enumerate(params)], [0] * workers)
    held, gradients = [0] * workers, [0] * workers
    for number, param in enumerate(params):
        held[owners[number]] += param.bytes
        if param.trained and param.elements:
            held[owners[number]] += param.state_bytes(param.elements)
            gradients[owners[number]] += param.bytes
    trained = [param for param in params if param.trained]
    total = sum(param.bytes for param in trained)
    bucket = min(total, BUCKET * max((param.itemsize for param in trained), default=0))
    buckets = bucket_ranges([(param.kind, param.elements) for param in trained])
    # There and back; each message goes to one rank. And a byte of each says whether it has moved.
    flags = sent_per_worker(2 * len(params), workers)
    return _OwnedWhole(
        held=max(held),
        in_flight=max(gradients)
        + sent_per_worker(min(max(gradients), -(-bucket // workers)), workers),
        sent=2 * sent_per_worker(total, workers) // workers + flags,
        messages=2 * len(buckets) + 1,
    )


def _wrap_bytes(wrap: WrapParams, workers: int, gloo: bool, codec: Codec | None) -> _WrapBytes:
    trained = [param for param in wrap.params if param.trained]
    elements = sum(param.shard_elements(workers) for param in trained)
    itemsize = max((param.itemsize for param in trained), default=0)
    codec = codec if all(param.real for param in trained) else None
    shard = SliceBytes.of(elements, itemsize, codec)
    if codec is not None:  # messages that leave and arrive, their sum and the newest one's values
        wide = summed_in(itemsize).itemsize
        messages = 2 if gloo else 3  # what leaves is there twice, except on gloo
        received = messages * (workers - 1) * shard.message + 2 * wide * elements
    elif gloo:
        in_place = itemsize >= 4  # half precision is summed in float32
        received = (workers - 1 - in_place) * itemsize * elements
    else:
        received = 0
    return _WrapBytes(
        gathered=sum(workers * p.shard_elements(workers) * p.itemsize for p in wrap.params),
        gradients=sum(param.bytes for param in trained),
        reduced=workers * itemsize * elements,
        received=received,
        sent=workers * shard.message,
        residual=(workers - 1) * shard.residual,
    )


def _most_in_fsdp_backward(
    wraps: Sequence[WrapParams], sizes: Sequence[_WrapBytes], workers: int
) -> int:
    """Return the most bytes of gradients, their shards and whole parameters during backward.

    A wrap is whole while any wrap inside it computes. Its gradients are reduced once all wraps
    inside it are done. Meanwhile the parameters of the next wrap arrive, and the gradients of the
    last one are still being reduced, until the next ones are laid out.
    """
    most = owned = leaving = 0
    open_wraps: list[int] = []
    for number in reversed(range(len(wraps))):
        open_wraps.append(number)
        arriving = sizes[number - 1].gathered if number else 0  # prefetched
        present = sum(sizes[i].gathered + sizes[i].gradients for i in open_wraps)
        most = max(most, owned + leaving + arriving + present)
        next_outer = wraps[number - 1].outer if number else None
        # Close every wrap that does not contain the next one.
        while open_wraps and (not number or open_wraps[-1] != next_outer):
            done = sizes[open_wraps.pop()]
            present -= done.gathered
            owned += done.reduced // workers
            # Gradients and the reduce-scatter's copy of them are there together for a moment.
            most = max(most, owned + arriving + present + done.reduced)
            present -= done.gradients
            leaving = done.reduced + done.received if done.reduced else leaving
    return most

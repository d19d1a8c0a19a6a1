"""What each sharding costs a worker: sizes in, bytes and collectives out. Integers only.

With N workers, P bytes of parameters, G of gradients (of trained parameters) and S of optimizer
state:

                          parameters  gradients  state   sent in a step
    DDP                   P           G          S       2 G (N-1)/N            all-reduce
    OSS + DDP             P           G          S / N   (2 G + P) (N-1)/N      and new parameters
    ShardedDataParallel   P           G / N      S / N   (G + P) (N-1)/N        slices, parameters
    FSDP                  P / N       G / N      S / N   (2 P + G) (N-1)/N      gathered twice

These are the formulas. The numbers come from the layout that the library uses
(`sharding/zero/_layout.py`; for FSDP the rows of each parameter, in wraps), with its padding and
its uneven shards, for the worker that holds most. `sent` is the mean over the workers.

`in_flight` is the most that a worker holds on top of its gradients while they are made and sent.

With a codec, sharded gradients travel as messages of fewer bytes, and a worker keeps a residual of
(N-1)/N of them in float32.

Two things may come on top. `AdamScale` reads the second moments of all parameters: where they are
sharded, every worker holds a replica of them, in one tensor of the trained parameters' size (two
with RMSprop's `centered`), and gathers it after each step. In blocks (`blocks_cost`) nothing is
sharded: a worker holds P + G + S, an anchor of the trained parameters in float32, the outer step's
memories of the same size, and in a sync round a few chunks; it sends 2 P (N-1)/N in a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from manyhands._core.codec import Codec
from manyhands.blocks.averaging._chunks import SMALLEST
from manyhands.blocks.averaging._payload import LARGEST
from manyhands.blocks.averaging._round import IN_FLIGHT as CHUNKS_IN_FLIGHT
from manyhands.planning._bucket_costs import ddp_cost, lay_out, oss_cost, sharded_ddp_cost
from manyhands.planning._fsdp_costs import fsdp_cost
from manyhands.planning._sizes import Cost, ModelSizes, ParamSize, sent_per_worker
from manyhands.scaling._preconditioned import MESSAGE

CHUNKS_HELD = CHUNKS_IN_FLIGHT + 1  # of a sync round at once: those in flight, and the newest


def costs(
    sizes: ModelSizes,
    workers: int,
    bucket_size: int | None,
    gloo: bool,
    replicas: int = 0,
    codec: Codec | None = None,
) -> tuple[Cost, ...]:
    """Return the costs of the four ways, in the order of the table above.

    `replicas` is how many of the sharded state's entries every worker needs whole. `codec` encodes
    the gradients that are sharded.
    """
    if workers == 1:  # nothing is sharded or sent, and no bucket is made
        alone = Cost(sizes.parameter_bytes, sizes.gradient_bytes, sizes.state_bytes, 0, 0, 0)
        return alone, alone, alone, alone
    layout = lay_out(sizes, workers, bucket_size, gloo, codec)
    ddp = ddp_cost(sizes, workers)
    oss = oss_cost(ddp, layout, workers)
    sharded = sharded_ddp_cost(sizes, layout, workers)
    fsdp = fsdp_cost(sizes, workers, gloo, codec)
    if not replicas:
        return ddp, oss, sharded, fsdp
    # The counts of all parameters come by an all-reduce, the moments bucket by bucket.
    counts = 2 * 4 * len(sizes.trained)
    copy = layout.bucket_bytes
    sent = sent_per_worker(replicas * copy + counts, workers)
    messages = 1 + replicas * layout.parameter_messages
    padded = sum(
        workers * param.shard_elements(workers) * param.itemsize for param in sizes.trained
    )
    gathers = replicas * _messages(sizes.trained, workers) * (workers if gloo else 1)
    return (
        ddp,
        _with_replicas(oss, replicas * copy, sent, messages),
        _with_replicas(sharded, replicas * copy, sent, messages),
        _with_replicas(
            fsdp,
            replicas * sizes.gradient_bytes,
            sent_per_worker(replicas * padded, workers),
            gathers,
        ),
    )


def _with_replicas(cost: Cost, held: int, sent: int, messages: int) -> Cost:
    return replace(
        cost, replicas=held, sent=cost.sent + sent, collectives=cost.collectives + messages
    )


def _messages(params: Sequence[ParamSize], workers: int) -> int:
    """Return how many messages bring one entry of FSDP's state (`_split_into_messages`)."""
    messages, size = 1, 0
    for number, param in enumerate(params):
        size += param.shard_elements(workers)
        if number and size > MESSAGE:
            messages, size = messages + 1, param.shard_elements(workers)
    return messages


def blocks_cost(sizes: ModelSizes, workers: int, every: int, memories: int) -> Cost:
    """Return the costs of a worker in blocks of `every` steps, whose outer step has `memories`."""
    # 16-bit parameters have an anchor in float32
    anchor = sum(param.elements * max(4, param.itemsize) for param in sizes.trained)
    elements = sum(param.elements for param in sizes.trained)
    chunk = max(SMALLEST, min(LARGEST, elements // 16))
    chunks = -(-elements // chunk)
    alone = workers == 1
    return Cost(
        parameters=sizes.parameter_bytes,
        gradients=sizes.gradient_bytes,
        optimizer=sizes.state_bytes,
        in_flight=0 if alone else min(chunks, CHUNKS_HELD) * min(chunk, elements) * 4,
        sent=0 if alone else sent_per_worker(2 * anchor + sizes.buffers, workers) // every,
        collectives=0 if alone else -(-chunks // every),
        blocks=(1 + memories) * anchor,
    )

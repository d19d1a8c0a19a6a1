"""What a codec of blocks costs: CPU time, and bytes beside DDP's.

    python benchmarks/blocks_codecs.py              # prints a table
    python benchmarks/blocks_codecs.py --sockets    # what "ternary" really sends; a minute

10 M parameters are encoded and decoded in pieces as long as those of a sync round, in one process
with one thread. The codecs take turns in an order drawn anew in each round.

With --sockets 8 workers hold the sync rounds of a block, with two optimizers of one transformer, of
0.6 and of 9.6 M parameters. The bytes are those that TCP counts, with notes and gloo's own.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import peers

peers.this_checkout()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from blocks.learning import Transformer, divided, in_processes  # noqa: E402

import manyhands as mh  # noqa: E402
from manyhands._core.codec import CODECS, Codec  # noqa: E402
from sharding import traffic  # noqa: E402

ELEMENTS, PIECE = 10_000_000, 1 << 18
EVERY, WORKERS = 32, (2, 4, 8)
THREE_VALUES = {"every": 160, "fragments": 5, "codec": "ternary"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", choices=list(CODECS), action="append")
    parser.add_argument("--sockets", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.sockets:
        for width in (128, 512):
            show_bytes_in_sockets(width)
        return
    names = options.only or list(CODECS)
    values = 0.01 * torch.randn(ELEMENTS)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(options.rounds + 1):
        for name in random.sample(names, len(names)):
            seconds = timed(CODECS[name], values)
            if number:  # the first is not counted
                times[name].append(seconds)
    beside = " | ".join(f"{n} workers" for n in WORKERS)
    print(f"| codec | encode ms, median (least) | decode | both | bytes a parameter | {beside} |")
    print("|---|--:|--:|--:|--:|" + "--:|" * len(WORKERS))
    for name, found in times.items():
        encode, decode = zip(*found, strict=True)
        both = [a + b for a, b in found]
        size = bytes_of_a_value(CODECS[name])
        cells = [name, *map(shown, (encode, decode, both)), f"{size:.4f}"]
        cells += [f"{less_than_ddp(CODECS[name], n):,.0f}" for n in WORKERS]
        print("| " + " | ".join(cells) + " |")


def timed(codec: Codec, values: torch.Tensor) -> tuple[float, float]:
    """CPU seconds to encode all pieces, and to decode them."""
    encode = decode = 0.0
    for piece in values.split(PIECE):
        begin = time.process_time()
        data = codec.encode(piece)
        middle = time.process_time()
        codec.decode(data, len(piece), piece.dtype)
        encode, decode = encode + middle - begin, decode + time.process_time() - middle
    return encode, decode


def shown(seconds: tuple[float, ...] | list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ({1e3 * min(seconds):.1f})"


def bytes_of_a_value(codec: Codec) -> float:
    return codec.size(ELEMENTS, torch.float32) / ELEMENTS


def less_than_ddp(codec: Codec, workers: int, every: int = EVERY) -> float:
    """How many times fewer bytes a worker sends than DDP does in as many steps."""
    size = bytes_of_a_value(codec)
    twice = 2 * (workers - 1) / workers  # a sum, and its way back
    sent = (workers - 1) * size if codec.sparse else twice * size
    return twice * 4 * every / sent


def show_bytes_in_sockets(width: int) -> None:
    """Print what a worker of eight sends in a step, beside what an all_reduce of float32 takes."""
    workers, steps = 8, THREE_VALUES["every"]

    def block() -> dict[str, float]:
        torch.set_num_threads(1)
        torch.manual_seed(dist.get_rank())
        model = Transformer(65, 64, width=width)
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizers = [
            mh.DiLoCo(torch.optim.SGD(params, lr=1e-3), **THREE_VALUES) for params in divided(model)
        ]
        for step in range(2 * steps):
            if step == steps:  # the first block connects the workers
                dist.barrier()
                before = traffic.bytes_sent()
            for optimizer in optimizers:
                optimizer.step()
        dist.barrier()
        elements = sum(param.numel() for param in model.parameters())
        return {"sent": (traffic.bytes_sent() - before) / steps, "elements": elements}

    ranks = in_processes(workers, block, "ternary")
    sent, elements = max(rank["sent"] for rank in ranks), ranks[0]["elements"]
    ddp = 2 * (workers - 1) / workers * 4 * elements
    print(
        f"{elements:,.0f} parameters: {sent:,.0f} bytes a step, {ddp / sent:,.0f} times "
        "less than DDP"
    )


if __name__ == "__main__":
    main()

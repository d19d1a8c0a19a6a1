"""What each worker of `blocks_faults.py` runs: characters, an LSTM, AdamW inside DiLoCo, a crew.

    manyhands run --workers 8 -m faults.worker --log FILE --steps 3000 ...

One line of JSON is appended to the log, at once, for each of

    in     the worker has joined, or has received the common state after it was away
    round  a sync round was kept, with the steps of its own that the worker contributed
    left   the worker is done
    gone   the worker has left in mid-block, as --leave-after asks
    loss   of the final parameters on held-out text, by the first worker that is done

"state" is the SHA-1 of the anchor and the outer momentum, "final" that of the parameters.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from blocks.learning import lr_at
from quality.workloads import Text, loss_of, shakespeare
from torch import Tensor

import manyhands as mh
from faults.strangers import BAD

BEGAN = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of tinyshakespeare.txt.xz")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True, help="seconds that a step takes")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.0, help="of a block of own steps")
    parser.add_argument("--speeds", type=float, nargs="+", help="of the workers, by number")
    parser.add_argument("--bad", choices=BAD, help="differ from the other workers in this")
    parser.add_argument("--leave-after", type=int, help="steps of its own")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = shakespeare(args.data) if args.data else python_source()
    torch.manual_seed(args.seed)
    model = data.model()
    crew = mh.Crew()
    params = list(model.double().parameters() if args.bad == "float64" else model.parameters())
    if args.bad == "order":
        params.reverse()
    inner = torch.optim.AdamW(params, lr=args.lr, betas=(0.9, 0.95))
    optimizer = mh.DiLoCo(
        inner,
        every=mh.Seconds(args.seconds, first=args.every, own_steps=True)
        if args.seconds
        else args.every + (args.bad == "every"),
        overlap=int(args.bad == "overlap"),
        codec="bfloat16" if args.bad == "codec" else "int8",
        crew=crew,
    )
    diary = Diary(args.log, crew, optimizer)
    diary.note("in")
    seed = 1_000_000 * args.seed + 1_000 * optimizer.steps + crew.number
    batches = data.batches(seed, args.batch)
    own = 0
    speeds = args.speeds or [1.0]
    pace = args.pace / speeds[crew.number % len(speeds)]
    while optimizer.steps < args.steps and own != args.leave_after:
        own += 1
        begin = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = args.lr * lr_at(optimizer.steps, args.steps)
        optimizer.zero_grad()
        loss_of(model, *batches.take(1)).backward()
        if args.seconds:  # a round takes what it takes, besides
            time.sleep(max(0.0, begin + pace - time.monotonic()))
        optimizer.step()
        diary.after_step()
        if not args.seconds:
            time.sleep(max(0.0, begin + pace - time.monotonic()))
    optimizer.finish()
    if args.leave_after is not None:
        diary.note("gone")
        return
    diary.note("left", final=sha1(model.parameters()))
    if _is_first(args.log.with_suffix(".first")):
        diary.note("loss", loss=data.score(model) * math.log(2.0))


class Diary:
    """Logs what happens to this worker."""

    def __init__(self, path: Path, crew: mh.Crew, optimizer: mh.Blocks) -> None:
        self.crew, self.optimizer = crew, optimizer
        self._log = path.open("a", buffering=1)
        self._own = 0  # steps since the last anchor
        self._rounds = optimizer.rounds
        self._generation = crew.generation

    def after_step(self) -> None:
        crew = self.crew
        self._own += 1
        if self.optimizer.rounds != self._rounds or crew.generation != self._generation:
            joined = crew.generation != self._generation and crew.rank in crew.joiners
            kept = self.optimizer.rounds == self._rounds + 1
            self.note("in" if joined else "round" if kept else "regrouped")

    def note(self, event: str, **more: Any) -> None:
        seen = self.optimizer.snapshot()
        line = {
            "event": event,
            "time": time.monotonic(),
            "number": self.crew.number,
            "pid": os.getpid(),
            "began": BEGAN,
            "rounds": seen["rounds"],
            "steps": seen["step"],
            "own": self._own,
            "workers": seen["workers"],
            "undone": seen["undone"],
            "state": common_state(self.optimizer),
            **more,
        }
        self._log.write(json.dumps(line) + "\n")
        if event != "regrouped":
            self._own = 0
        self._rounds, self._generation = seen["rounds"], self.crew.generation


def common_state(optimizer: mh.Blocks) -> str:
    """Return the SHA-1 of the state that is equal on all workers."""
    state = optimizer.state_dict()["blocks"]
    return sha1([*state["anchor"], *(memory for row in state["memories"] for memory in row)])


def sha1(tensors: Iterable[Tensor]) -> str:
    total = hashlib.sha1()
    for tensor in tensors:
        total.update(tensor.detach().numpy().tobytes())
    return total.hexdigest()


def python_source() -> Text:
    """Return text that comes with Python, for the smoke test."""
    text = Path(argparse.__file__).read_text()
    number = {symbol: i for i, symbol in enumerate(sorted(set(text)))}
    codes = torch.tensor([number[symbol] for symbol in text])
    cut = len(codes) * 9 // 10
    return Text(codes[:cut], codes[cut:], len(number))


def _is_first(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    main()

"""What each worker of `blocks_faults.py` runs: characters, an LSTM, AdamW inside DiLoCo, a crew.

    manyhands run --workers 8 -m faults.worker --log FILE --plan JSON

One line of JSON is appended to the log, at once, for each of

    in     the worker has joined, or has received the common state after it was away
    round  a sync round was kept, with the steps of its own that the worker contributed
    left   the worker is done
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
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from blocks.learning import lr_at
from quality.workloads import loss_of, shakespeare
from torch import Tensor

import manyhands as mh
from faults.harm import Plan


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="folder of tinyshakespeare.txt.xz")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--plan", type=json.loads, required=True)
    args = parser.parse_args()
    plan = Plan(**args.plan)
    torch.set_num_threads(1)
    data = shakespeare(args.data)
    torch.manual_seed(plan.seed)
    model = data.model()
    crew = mh.Crew()
    inner = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.95))
    optimizer = mh.DiLoCo(inner, every=plan.every, codec="int8", crew=crew)
    diary = Diary(args.log, crew, optimizer)
    diary.note("in")
    seed = 1_000_000 * plan.seed + 1_000 * optimizer.steps + crew.number
    batches = data.batches(seed, plan.batch)
    while optimizer.steps < plan.steps:
        begin = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * lr_at(optimizer.steps, plan.steps)
        optimizer.zero_grad()
        loss_of(model, *batches.take(1)).backward()
        optimizer.step()
        diary.after_step()
        time.sleep(max(0.0, begin + plan.pace - time.monotonic()))
    optimizer.finish()
    diary.note("left", final=sha1(model.parameters()))
    with suppress(FileExistsError):  # only the first worker that is done makes this file
        args.log.with_suffix(".first").touch(exist_ok=False)
        diary.note("loss", loss=data.score(model) * math.log(2.0))


class Diary:
    def __init__(self, path: Path, crew: mh.Crew, optimizer: mh.Blocks) -> None:
        self.crew = crew
        self.optimizer = optimizer
        self._log = path.open("a", buffering=1)
        self._own = 0  # steps since the last anchor
        self._rounds = optimizer.rounds
        self._generation = crew.generation

    def after_step(self) -> None:
        crew = self.crew
        self._own += 1
        if self.optimizer.rounds != self._rounds or crew.generation != self._generation:
            if crew.generation != self._generation and crew.rank in crew.joiners:
                self.note("in")
            elif self.optimizer.rounds == self._rounds + 1:
                self.note("round")
            else:
                self.note("regrouped")

    def note(self, event: str, **more: Any) -> None:
        state = self.optimizer.state_dict()["blocks"]
        common = [*state["anchor"], *(memory for row in state["memories"] for memory in row)]
        line = {
            "event": event,
            "time": time.monotonic(),
            "number": self.crew.number,
            "pid": os.getpid(),
            "rounds": self.optimizer.rounds,
            "steps": self.optimizer.steps,
            "own": self._own,
            "state": sha1(common),
            **more,
        }
        self._log.write(json.dumps(line) + "\n")
        if event != "regrouped":
            self._own = 0
        self._rounds = self.optimizer.rounds
        self._generation = self.crew.generation


def sha1(tensors: Iterable[Tensor]) -> str:
    total = hashlib.sha1()
    for tensor in tensors:
        total.update(tensor.detach().numpy().tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    main()

"""A training script with `mh.start(survive=True)`, which logs each step and can fail anywhere.

    python surviving_script.py OPTIONS      OPTIONS is JSON: see `Options`

The functions that build the model, the data and the optimizer also serve the oracle in
`surviving.py`, which trains in a single process without this library.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

import manyhands as mh
from manyhands.engines.survive._group import GroupStore
from manyhands.engines.survive._state import RunState
from manyhands.engines.survive._steps import SurvivingRun
from manyhands.errors import CrewFinished

SAMPLES = 96
BATCH = 24
FEATURES = 4


@dataclass
class Fault:
    """A fault of one worker, at a place of the script, once."""

    worker: int
    place: str  # "batch", "backward", "step", "stepped", "save", "evaluation", "exchange", ...
    step: int = 0  # from the start of the run
    kind: str = "KILL"  # "KILL", "STOP" or "error"
    seconds: float = 0.0  # until a stopped worker continues
    life: int = 1  # 2: of the first replacement


@dataclass
class Options:
    epochs: int = 3  # 0: until the file `end` names the number
    pause: float = 0.0  # seconds per step
    most: int | None = None  # max_local_batch_size
    loaders: int = 0  # num_workers
    clip: float = 0.0
    scaler: bool = False
    infinite: list[int] = field(default_factory=list)  # samples with infinite loss in epoch 0
    norm: bool = False  # BatchNorm
    dropout: bool = False
    ema: bool = False
    rule: str = ""
    shard: bool = False  # mh.shard(level=0) instead of DistributedDataParallel
    save_every: int = 0  # steps; 0: never
    stops: bool = False  # on a stop notice
    evaluates: bool = False
    faults: list[Fault] = field(default_factory=list)

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Options:
        options = cls(**json.loads(text))
        options.faults = [Fault(**each) for each in options.faults]  # type: ignore[arg-type]
        return options


class Rows(Dataset):
    """Samples with their numbers."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, FEATURES, generator=draw, dtype=torch.float64)
        self.y = torch.randn(SAMPLES, 1, generator=draw, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        if torch.utils.data.get_worker_info() is not None:
            open(f"loader-{os.getpid()}", "w").close()
        return self.x[index], self.y[index], index


def make_model(options: Options) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)]
    if options.norm:
        layers.insert(1, nn.BatchNorm1d(8))
    if options.dropout:
        layers.insert(2, nn.Dropout(0.5))
    return nn.Sequential(*layers).double()


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)


def make_ema(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)


def infinite_samples(options: Options, epoch: int) -> set[int]:
    return set(options.infinite) if epoch == 0 else set()


def losses_of(
    model: Callable[[torch.Tensor], torch.Tensor],
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    infinite: set[int],
) -> torch.Tensor:
    x, y, numbers = batch
    losses = (model(x) - y).square().sum(1)
    factors = [float("inf") if number in infinite else 1.0 for number in numbers.tolist()]
    return losses * torch.tensor(factors, dtype=torch.float64)


def values_of(model: nn.Module) -> list[float]:
    return torch.cat([param.detach().flatten() for param in model.parameters()]).tolist()


class Log:
    """The events of a process, each written at once, so that a kill loses no event."""

    def __init__(self, worker: int) -> None:
        path = f"log-{worker}-{os.getpid()}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, "time": time.time(), **facts})
        os.write(self._file, line.encode() + b"\n")


class Faults:
    def __init__(self, options: Options, worker: int, log: Log) -> None:
        self._faults = [each for each in options.faults if each.worker == worker]
        self._log = log
        self._step = 0
        self._life = 1
        while True:
            try:
                os.close(os.open(f"life-{worker}-{self._life}", os.O_CREAT | os.O_EXCL))
                return
            except FileExistsError:
                self._life += 1

    def begin_step(self, step: int) -> None:
        self._step = step

    def reach(self, place: str) -> None:
        for fault in list(self._faults):
            here = fault.place == place and fault.life == self._life
            # Places within a meeting or a join have no exact step.
            if not here or self._step < fault.step:
                continue
            self._faults.remove(fault)
            self._log("fault", place=place, kind=fault.kind, step=self._step)
            if fault.kind == "error":
                raise RuntimeError("an error of the script")
            if fault.kind == "STOP":
                wake = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", wake], start_new_session=True)
            os.kill(os.getpid(), getattr(signal, f"SIG{fault.kind}"))

    def before(self, owner: type, name: str, place: str) -> None:
        """Reach a place before each call of a method."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.reach(place)
            return original(*args, **kwargs)

        setattr(owner, name, call)


class Probe:
    """An object with state, which reaches a place while it is saved."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def state_dict(self) -> dict[str, int]:
        self._faults.reach("save")
        return {"probe": 1}

    def load_state_dict(self, state: object) -> None:
        pass


class Training:
    """A training loop with all objects that the options name."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(1)
        self.job = mh.start(survive=True, checkpoints="checkpoints")
        worker = self.job.worker
        self.options = options
        self.log = Log(worker)
        self.faults = Faults(options, worker, self.log)
        self.log("start")
        self.model = make_model(options)
        torch.manual_seed(100 + worker)  # as in scripts with different dropout per rank
        self.inner = make_optimizer(self.model)
        self.optimizer: Any = self.inner
        if options.rule:
            self.optimizer = getattr(mh, options.rule)(self.inner)
        self.ddp: Any = None
        if options.shard:
            self.ddp, self.optimizer = mh.shard(self.model, self.inner, level=0)
        else:
            self.ddp = DistributedDataParallel(self.model)
        self.rows: Any = mh.Cursor(
            Rows(),
            batch_size=BATCH,
            optimizer=self.optimizer,
            max_local_batch_size=options.most,
            num_workers=options.loaders,
        )
        self.scheduler = make_schedule(self.optimizer)
        self.state: dict[str, Any] = {
            "model": self.ddp,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "cursor": self.rows,
        }
        if options.ema:
            self.state["ema"] = make_ema(self.model)
        if options.scaler:
            self.state["scaler"] = make_scaler()
        self.committed = False
        self._cause_faults()
        self._note_commits()

    def _cause_faults(self) -> None:
        self.faults.before(SurvivingRun, "_exchange", "exchange")
        self.faults.before(SurvivingRun, "_transfer", "transfer")
        self.faults.before(RunState, "pack", "pack")
        self.faults.before(RunState, "unpack", "unpack")
        original = GroupStore.wait

        def wait(store: GroupStore, keys: list[str], timeout: timedelta | None = None) -> None:
            if store.local is None:  # this rank has published its addresses
                self.faults.reach("connect")
            original(store, keys, timeout)

        GroupStore.wait = wait  # type: ignore[method-assign,assignment]
        next(self.model.parameters()).register_hook(lambda _: self.faults.reach("backward"))

    def _note_commits(self) -> None:
        # The position does not show a commit: a failed step may receive the state of another rank.
        original = SurvivingRun.commit

        def commit(run: SurvivingRun) -> bool:
            self.committed = original(run)
            return self.committed

        SurvivingRun.commit = commit  # type: ignore[method-assign,assignment]

    def run(self) -> None:
        try:
            self.job.load(**self.state)
        except CrewFinished:
            self.log("late")
            return
        self.log("joined", **self.place())
        while not self.is_last(self.rows.epoch):
            for batch in self.rows:
                step = (self.rows.epoch * SAMPLES + self.rows.position) // BATCH
                self.faults.begin_step(step)
                before = self.place()
                self.train(batch, before)
                if self.rows.last_pass:
                    self.step(before)
                    self.after_step(step, before)
            if self.options.evaluates:
                self.evaluate()
        self.log("done")

    def place(self) -> dict[str, Any]:
        assert self.job.crew is not None
        return {
            "generation": self.job.crew.generation,
            "rank": dist.get_rank(),
            "ranks": dist.get_world_size(),
            "at": [self.rows.epoch, self.rows.position],
        }

    def is_last(self, epoch: int) -> bool:
        end = self.options.epochs
        if not end and os.path.exists("end"):
            with open("end") as file:
                end = int(file.read())
        return bool(end) and epoch >= end

    def train(self, batch: Any, before: dict[str, Any]) -> None:
        rows = self.rows
        generator = hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()
        samples = batch[2].tolist()[: rows.samples]
        self.log("try", **before, passes=rows.passes, samples=samples, generator=generator)
        self.faults.reach("batch")
        infinite = infinite_samples(self.options, rows.epoch)
        with contextlib.nullcontext() if rows.last_pass else self.ddp.no_sync():
            loss = rows.mean(losses_of(self.ddp, batch, infinite).sum())
            if self.options.scaler:
                loss = self.state["scaler"].scale(loss)
            loss.backward()

    def step(self, before: dict[str, Any]) -> None:
        scaler = self.state.get("scaler")
        if scaler is not None:
            scaler.unscale_(self.inner)
        if self.options.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.faults.reach("step")
        rate = self.inner.param_groups[0]["lr"]
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self.faults.reach("stepped")
        self.scheduler.step()
        if self.options.ema:
            self.state["ema"].update_parameters(self.model)
        self.optimizer.zero_grad()
        if not self.committed:
            self.log("failed", **before)
        elif [self.rows.epoch, self.rows.position] == before["at"]:
            self.log("skipped", **before)  # by the gradient scaler
        else:
            self.log("commit", **before, params=values_of(self.model), rate=rate, **self.facts())

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.options.rule:
            found["gain"] = self.optimizer.gain()
            found["scale"] = self.optimizer.scale
            found["progress"] = self.optimizer.progress
        if self.options.ema:
            found["ema"] = values_of(self.state["ema"])
        if self.options.scaler:
            found["loss_scale"] = self.state["scaler"].get_scale()
        if self.options.norm:
            found["tracked"] = int(dict(self.model.named_buffers())["1.num_batches_tracked"])
        return found

    def after_step(self, step: int, before: dict[str, Any]) -> None:
        if self.options.save_every and (step + 1) % self.options.save_every == 0:
            self.job.save(**self.state, probe=Probe(self.faults))
        if self.options.stops and mh.stopping(self.optimizer):
            self.log("leaves", **before)
            self.job.save(**self.state)
            self.job.leave()
        time.sleep(self.options.pause)

    def evaluate(self) -> None:
        with torch.no_grad():
            copy.deepcopy(self.model).eval()(Rows().x)
        self.faults.reach("evaluation")


if __name__ == "__main__":
    Training(Options.of(sys.argv[1])).run()

"""Count the samples that a resumed run repeats or never uses, for several data loaders.

    make test-integrations ARGS=--collect-only     once: installs the other libraries
    .venv-integrations/bin/python benchmarks/resume.py

Every method trains the same model for two epochs of 64 shuffled samples, with 2 samples per rank
and step. A job saves a checkpoint after some steps, stops, and starts again, often on a different
number of ranks. The benchmark counts how often the optimizer steps have used each sample.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pages
import peers

peers.this_checkout()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from team import Team, Work, tell_ranks  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, Dataset, DistributedSampler  # noqa: E402

import manyhands as mh  # noqa: E402

SAMPLES = 64
BATCH = 2
EPOCHS = 2


@dataclass(frozen=True)
class Case:
    """The starts of a job: how many ranks each start has, and after how many steps it stops."""

    name: str
    starts: tuple[tuple[int, int | None], ...]


# All stops are in the second epoch, of 16 steps on two ranks and 8 on four, or at an epoch's end.
CASES = (
    Case("2 to 2 ranks", ((2, 21), (2, None))),
    Case("2 to 4", ((2, 21), (4, None))),
    Case("4 to 2", ((4, 13), (2, None))),
    Case("end of an epoch", ((2, 16), (2, None))),
    Case("2, 4, 2, 4", ((2, 19), (4, 2), (2, 3), (4, None))),
)
WHOLE = Case("not stopped", ((2, None),))


@dataclass(frozen=True)
class Start:
    """One start of a job."""

    folder: Path
    resume: bool
    steps: int | None  # after so many steps of this start, save and stop
    workers: int  # of the DataLoader


class Samples(Dataset[dict[str, Tensor]]):
    """Samples that know their index."""

    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs = self.inputs[index]
        return {
            "inputs": inputs,
            "target": inputs.sum(0, keepdim=True),
            "index": torch.tensor(index),
        }


class Model(nn.Module):
    """A small network with dropout, which returns its loss as the Trainer requires."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)]
        self.layers = nn.Sequential(*layers)
        self.indices: list[int] = []  # of the last batch

    def forward(self, inputs: Tensor, target: Tensor, index: Tensor) -> dict[str, Tensor]:
        self.indices = index.tolist()
        return {"loss": nn.functional.mse_loss(self.layers(inputs), target)}


class Record:
    """The samples that this rank's optimizer steps have used since the start."""

    def __init__(self, start: Start) -> None:
        self.used: list[int] = []
        self._steps_left = start.steps

    def step(self, model: Model) -> bool:
        """Record a step, and return whether the run has to save and stop now."""
        self.used += model.indices
        if self._steps_left is None:
            return False
        self._steps_left -= 1
        return self._steps_left == 0


def make_model() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train_batch(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    model(**batch)["loss"].backward()
    optimizer.step()


def save_training(start: Start, net: Model, optimizer: torch.optim.Optimizer, **more: int) -> None:
    """Save on rank 0. The next start of the job waits until all ranks have ended."""
    if dist.get_rank() == 0:
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), **more}
        torch.save(state, start.folder / "checkpoint.pt")


def load_training(start: Start, net: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    saved = torch.load(start.folder / "checkpoint.pt", weights_only=True)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved


# -- methods ---------------------------------------------------------------------------------------
# Each method follows the documentation of its library, records every step, and returns the model.


def skip_batches(start: Start, record: Record) -> Model:
    """Skip the batches of the unfinished epoch, by the number of samples used."""
    net, optimizer = make_model()
    model = DistributedDataParallel(net)
    ranks = dist.get_world_size()
    sampler: DistributedSampler[Any] = DistributedSampler(Samples(), shuffle=True, seed=0)
    loader = DataLoader(Samples(), BATCH, sampler=sampler, num_workers=start.workers)
    first_epoch = 0
    skipped = 0
    if start.resume:
        saved = load_training(start, net, optimizer)
        first_epoch = saved["epoch"]
        skipped = saved["samples"] // (BATCH * ranks)
    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if epoch == first_epoch and number < skipped:
                continue
            train_batch(model, optimizer, batch)
            if record.step(net):
                samples = (number + 1) * BATCH * ranks
                save_training(start, net, optimizer, epoch=epoch, samples=samples)
                return net
    return net


def stateful_loader(start: Start, record: Record) -> Model:
    """Save the state of every rank's StatefulDataLoader (torchdata)."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    net, optimizer = make_model()
    model = DistributedDataParallel(net)
    rank = dist.get_rank()
    sampler: DistributedSampler[Any] = DistributedSampler(Samples(), shuffle=True, seed=0)
    loader = StatefulDataLoader(Samples(), BATCH, sampler=sampler, num_workers=start.workers)
    first_epoch = 0
    if start.resume:
        saved = load_training(start, net, optimizer)
        first_epoch = saved["epoch"]
        sampler.set_epoch(first_epoch)
        state = torch.load(start.folder / f"loader-{rank % saved['ranks']}.pt", weights_only=True)
        loader.load_state_dict(state)
    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            train_batch(model, optimizer, batch)
            if record.step(net):
                save_training(start, net, optimizer, epoch=epoch, ranks=dist.get_world_size())
                torch.save(loader.state_dict(), start.folder / f"loader-{rank}.pt")
                return net
    return net


def accelerate_loop(start: Start, record: Record, **options: bool) -> Model:
    """Use the loop of Accelerate's guide to checkpoints."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    net, optimizer = make_model()
    loader = DataLoader(Samples(), BATCH, shuffle=True, num_workers=start.workers)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    folder = start.folder / "saved"
    steps = 0
    first_epoch = 0
    skipped = 0
    if start.resume:
        accelerator.load_state(folder)
        steps = int((start.folder / "steps").read_text())
        first_epoch, skipped = divmod(steps, len(loader))
    for epoch in range(first_epoch, EPOCHS):
        loader.set_epoch(epoch)
        batches = loader
        if epoch == first_epoch and skipped and not loader.use_stateful_dataloader:
            batches = accelerator.skip_first_batches(loader, skipped)
        for batch in batches:
            optimizer.zero_grad()
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            steps += 1
            if record.step(net):
                accelerator.save_state(folder)
                (start.folder / "steps").write_text(str(steps))
                return net
    return net


def accelerate_cursor(start: Start, record: Record) -> Model:
    """Use Accelerate with the recipe of docs/integrations/accelerate.md."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net, optimizer = make_model()
    model, optimizer = accelerator.prepare(net, optimizer)
    cursor = mh.Cursor(Samples(), BATCH, keep="micro", num_workers=start.workers)
    accelerator.register_for_checkpointing(cursor)
    if start.resume:
        accelerator.load_state(start.folder / "saved")
    while cursor.epoch < EPOCHS:
        for batch in cursor:
            optimizer.zero_grad()
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            if record.step(net):
                accelerator.save_state(start.folder / "saved")
                return net
    return net


def trainer(start: Start, record: Record, with_cursor: bool = False) -> Model:
    """Use the Trainer of transformers and its checkpoints."""
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from manyhands.integrations.transformers import use_cursor

    net, _ = make_model()

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if record.step(net):
                control.should_save = True
                control.should_training_stop = True

    args = TrainingArguments(
        output_dir=str(start.folder),
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        save_strategy="no",
        dataloader_num_workers=start.workers,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    made = Trainer(net, args, train_dataset=Samples(), callbacks=[Stop()])
    if with_cursor:
        use_cursor(made, mh.Cursor(Samples(), 2 * BATCH, num_workers=start.workers))
    checkpoint = get_last_checkpoint(str(start.folder)) if start.resume else None
    made.train(resume_from_checkpoint=checkpoint)
    return net


def cursor_loop(start: Start, record: Record) -> Model:
    """Use `mh.Cursor`, `mh.save` and `mh.load`."""
    net, optimizer = make_model()
    model = DistributedDataParallel(net)
    workers = start.workers
    cursor = mh.Cursor(Samples(), BATCH, keep="micro", optimizer=optimizer, num_workers=workers)
    folder = start.folder / "saved"
    if start.resume:
        mh.load(folder, model=model, optimizer=optimizer, cursor=cursor)
    while cursor.epoch < EPOCHS:
        for batch in cursor:
            train_batch(model, optimizer, batch)
            if record.step(net):
                mh.save(folder, model=model, optimizer=optimizer, cursor=cursor)
                return net
    return net


METHODS: dict[str, Callable[[Start, Record], Model]] = {
    "`DataLoader`, batches skipped": skip_batches,
    "`StatefulDataLoader`": stateful_loader,
    "Accelerate, `skip_first_batches`": accelerate_loop,
    "Accelerate, `use_seedable_sampler`": partial(accelerate_loop, use_seedable_sampler=True),
    "Accelerate, `use_stateful_dataloader`": partial(accelerate_loop, use_stateful_dataloader=True),
    "Accelerate, `mh.Cursor`": accelerate_cursor,
    "Trainer": trainer,
    "Trainer, `mh.Cursor`": partial(trainer, with_cursor=True),
    "`mh.Cursor`": cursor_loop,
}


# -- measuring -------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The uses of all samples in a job, and the weights at its end."""

    uses: Counter[int]
    weights: list[float]

    @property
    def counts(self) -> list[int]:
        """The missing and the surplus uses, where each sample should be used once per epoch."""
        missing = sum(max(0, EPOCHS - self.uses[index]) for index in range(SAMPLES))
        surplus = sum(max(0, self.uses[index] - EPOCHS) for index in range(SAMPLES))
        return [missing, surplus]


def run(method: Callable[[Start, Record], Model], case: Case, workers: int) -> Outcome:
    """Run all starts of a job."""
    uses: Counter[int] = Counter()
    weights: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (ranks, steps) in enumerate(case.starts):
            start = Start(Path(folder), number > 0, steps, workers)
            with Team(ranks, work(method, start), daemon=False) as team:
                for found in team.ask({}):
                    uses.update(found["used"])
                    weights = found["weights"]
    return Outcome(uses, weights)


def work(method: Callable[[Start, Record], Model], start: Start) -> Work:
    def begin(rank: int) -> Callable[[dict[str, Any]], Any]:
        tell_ranks()

        def answer(_: dict[str, Any]) -> dict[str, Any]:
            record = Record(start)
            model = method(start, record)
            weights = nn.utils.parameters_to_vector(model.parameters()).tolist()
            return {"used": record.used, "weights": weights}

        return answer

    return begin


def measure(workers: int) -> list[dict[str, Any]]:
    rows = []
    for name, method in METHODS.items():
        row: dict[str, Any] = {"name": name, "workers": workers}
        for case in CASES:
            outcome = run(method, case, workers)
            row[case.name] = outcome.counts
            if case is CASES[0]:
                row["equal"] = outcome.weights == run(method, WHOLE, workers).weights
        print(row, flush=True)
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        line = [row["name"]]
        for case in CASES:
            missing, surplus = row[case.name]
            line.append(f"{missing} / {surplus}")
        line.append("equal" if row["equal"] else "differ")
        cells.append(line)
    names = " | ".join(case.name for case in CASES)
    return pages.table(f"method | {names} | weights, 2 to 2", cells)


def main() -> None:
    args = pages.parser(__doc__).parse_args()
    if not args.draw:
        libraries = ("accelerate", "transformers", "torchdata")
        versions = ", ".join(f"{name} {version(name)}" for name in libraries)
        result = {**pages.conditions(), "libraries": versions, "rows": []}
        for workers in (0,) if args.quick else (0, 2):
            result["rows"] += measure(workers)
        if args.quick:
            print(table(result["rows"]))
            return
        pages.store("resume", result)
    result = pages.read("resume")
    shown = table([row for row in result["rows"] if row["workers"] == 0])
    print(table([row for row in result["rows"] if row["workers"] != 0]))
    pages.fill("resume", result, libraries=result["libraries"], table=shown)


if __name__ == "__main__":
    main()

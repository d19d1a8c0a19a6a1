"""Train on hosts that join and leave, with each sample once per epoch, under any launcher.

    python elastic.py                                                a single rank
    torchrun --nnodes 1:4 --nproc-per-node 1 ... elastic.py          see docs/engines/elastic.md

With `--keep batch`, a step has 32 samples, on 1, 2 or 4 ranks. With `--keep micro`, each rank has 8
samples per step, and the batch follows the number of ranks. In both cases `mh.Cursor` gives each
sample once per epoch, and the schedule follows progress.
"""

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

import manyhands as mh

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--keep", choices=["batch", "micro"], default="batch")
parser.add_argument("--checkpoints", default="run", help="folder of the checkpoints")
parser.add_argument("--steps-log", type=Path, help="file for a log of this rank's steps")
parser.add_argument("--pause", type=float, default=0.0, help="additional seconds per step")
args = parser.parse_args()

job = mh.start(checkpoints=args.checkpoints)
torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(480, 16)
targets = torch.tanh(inputs @ torch.randn(16, 1)) + 0.1 * torch.randn(480, 1)
data = TensorDataset(torch.arange(480), inputs, targets)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
ddp = DistributedDataParallel(model)

passes = 4 // job.world_size if args.keep == "batch" else 1
sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = mh.AdaScale(sgd, num_gradients_to_accumulate=passes)
end = args.epochs * 480 // 8  # in small batches, the unit of progress
scheduler = mh.ProgressScheduler(CosineAnnealingLR(optimizer, T_max=end), optimizer, end=end)
size, most = (32, 8) if args.keep == "batch" else (8, None)
cursor = mh.Cursor(data, size, keep=args.keep, max_local_batch_size=most, optimizer=optimizer)

loaded = job.load(model=model, optimizer=optimizer, scheduler=scheduler, cursor=cursor)
step = loaded.get("step", 0)
print(
    f"rank {job.rank} of {job.world_size} begins with step {step}, sample {cursor.position} of "
    f"epoch {cursor.epoch}",
    flush=True,
)

while cursor.epoch < args.epochs:
    samples = []
    for numbers, x, y in cursor:
        with nullcontext() if cursor.last_pass else ddp.no_sync():
            losses = mse_loss(ddp(x), y, reduction="none")
            cursor.mean(losses.sum()).backward()
        samples += numbers[: cursor.samples].tolist()
        if not cursor.last_pass:
            continue
        rate = sgd.param_groups[0]["lr"]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
        if args.steps_log is not None:
            line = {
                "step": step,
                "ranks": job.world_size,
                "samples": samples,
                "scale": optimizer.scale,
                "gain": optimizer.gain(),
                "rate": rate,
                "progress": optimizer.progress,
                "at": [cursor.epoch, cursor.position],
                "weight": model[0].weight[0, :4].tolist(),
            }
            with args.steps_log.with_suffix(f".{job.rank}").open("a") as file:
                file.write(json.dumps(line) + "\n")
        samples = []
        time.sleep(args.pause)
        if mh.stopping(optimizer):
            job.save(
                model=model, optimizer=optimizer, scheduler=scheduler, cursor=cursor, step=step
            )
            print(f"rank {job.rank} was asked to stop, and has saved step {step}", flush=True)
            job.leave()

job.save(model=model, optimizer=optimizer, scheduler=scheduler, cursor=cursor, step=step)
if job.rank == 0:
    print(f"loss {mse_loss(model(inputs), targets).item():.4f} after {step} steps", flush=True)

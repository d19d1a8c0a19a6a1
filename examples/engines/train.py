"""Train under any launcher. The script contains no launcher-specific code.

    python train.py                                        a single rank
    torchrun --standalone --nproc-per-node 4 train.py      four ranks
    manyhands run --workers 1 --processes 4 train.py       four ranks
    manyhands run --workers 4 train.py --blocks            a crew
    srun --ntasks 4 python train.py                        tasks of a Slurm job

The other files of this folder start the script on Slurm, Kubernetes, Kubeflow, SkyPilot and
systemd.

After a stop notice (SIGTERM, a file, a launcher's message), the script finishes the step, saves and
exits. A restart on any number of ranks resumes with the same samples in each step.
"""

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=60, help="steps to train for")
parser.add_argument(
    "--micro-batches", type=int, default=4, help="micro-batches per step, on all ranks"
)
parser.add_argument("--blocks", action="store_true", help="synchronize every 10 steps")
parser.add_argument("--checkpoints", default="run", help="folder of the checkpoints")
parser.add_argument("--losses", type=Path, help="file for the losses of this worker")
parser.add_argument("--pause", type=float, default=0.0, help="additional seconds per step")
args = parser.parse_args()

job = mh.start(checkpoints=args.checkpoints)
torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(4096, 16)
targets = torch.tanh(inputs @ torch.randn(16, 1)) + 0.1 * torch.randn(4096, 1)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

if args.blocks:
    passes, workers, worker, module = 1, job.workers, job.worker, model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = mh.DiLoCo(optimizer, every=10, crew=job.crew)
else:
    workers, worker = job.world_size, job.rank
    passes = args.micro_batches // workers
    module = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = mh.AdaScale(optimizer, num_gradients_to_accumulate=passes)

step = job.load(model=model, optimizer=optimizer).get("step", 0)
if args.blocks:
    step = optimizer.steps  # a late joiner continues at the crew's step
print(f"rank {job.rank} of {job.world_size} ({job.engine}) begins with step {step}", flush=True)

while step < args.steps:
    optimizer.zero_grad()
    total = 0.0
    for number in range(passes):
        first = 16 * ((step * workers + worker) * passes + number)
        rows = torch.arange(first, first + 16) % len(inputs)
        last = args.blocks or number == passes - 1
        with nullcontext() if last else module.no_sync():
            loss = mse_loss(module(inputs[rows]), targets[rows])
            (loss / passes).backward()
        total += loss.item() / passes
    optimizer.step()
    step += 1
    if args.losses is not None:
        with args.losses.with_suffix(f".{worker}").open("a") as file:
            file.write(json.dumps([step, total.hex()]) + "\n")
    if args.pause:
        time.sleep(args.pause)
    if mh.stopping(optimizer):
        job.save(model=model, optimizer=optimizer, step=step)
        print(f"rank {job.rank} was asked to stop, and has saved step {step}", flush=True)
        job.leave()

if args.blocks:
    optimizer.finish()  # a last sync round, after which all workers have equal parameters
job.save(model=model, optimizer=optimizer, step=step)
if worker == 0:
    print(f"loss {mse_loss(model(inputs), targets).item():.4f} after {step} steps", flush=True)

"""Train on scikit-learn's digits with workers that synchronize every 50 steps and may be killed.

    manyhands run --workers 4 examples/blocks.py
    python examples/blocks.py                       # a single worker

Each worker prints a process id. Kill a worker during training: the remaining workers continue
without losing steps. `manyhands run` restarts the worker, which joins at the next sync round.
Pause a worker with `kill -STOP`: after --stall seconds (5), the remaining workers continue.

Each worker steps independently. In a sync round, workers send the difference from the anchor in
8 bits and take DiLoCo's outer step. After 4000 steps, about 97 % of the test images are right.

Requires scikit-learn.
"""

import argparse
import os
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy

import manyhands as mh

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=4000, help="steps of each worker")
parser.add_argument("--every", type=int, default=50, help="steps between two sync rounds")
parser.add_argument("--batch-size", type=int, default=8, help="images in a worker's batch")
parser.add_argument("--lr", type=float, default=1e-3, help="the inner learning rate")
parser.add_argument(
    "--pause",
    type=float,
    default=0.01,
    help="seconds to wait in each step, to simulate a large model",
)
args = parser.parse_args()

# -- data: workers have the same split, and draw separate batches --------------------------------

torch.set_num_threads(1)
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images / 16, dtype=torch.float32)
labels = torch.tensor(labels)
train, test = train_test_split(range(len(labels)), test_size=0.3, stratify=labels, random_state=0)

# -- model and optimizer -------------------------------------------------------------------------

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
crew = mh.Crew()  # the workers of `manyhands run`, or only this worker
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
optimizer = mh.DiLoCo(optimizer, every=args.every, codec="int8", crew=crew)
print(f"worker {crew.number} of {crew.size}: process {os.getpid()}, from step {optimizer.steps}")

# -- training: a joiner continues at the crew's step ----------------------------------------------

generator = torch.Generator().manual_seed(1000 * optimizer.steps + crew.number)
last_shown = optimizer.rounds
while optimizer.steps < args.steps:
    batch = torch.tensor(train)[torch.randint(len(train), (args.batch_size,), generator=generator)]
    optimizer.zero_grad()
    loss = cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()
    time.sleep(args.pause)
    if optimizer.rounds >= last_shown + 10 and crew.rank == 0:
        last_shown = optimizer.rounds
        values = optimizer.snapshot()
        print(
            f"step {values['step']}: {values['workers']} workers, loss {loss.item():.3f}, "
            f"cosine {values['cosine']:.2f}, rounds undone {values['undone']}"
        )
is_first = crew.rank == 0  # before finish(), which leaves the crew
optimizer.finish()  # a last sync round

if is_first:
    with torch.no_grad():
        right = (model(images[test]).argmax(dim=1) == labels[test]).double().mean().item()
    print(f"{100 * right:.1f} % of the test images are right after {optimizer.steps} steps")

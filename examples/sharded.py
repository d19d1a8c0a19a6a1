"""Train on scikit-learn's digits with sharded optimizer state and gradients.

    torchrun --nproc-per-node 4 examples/sharded.py --steps 400     # stops at 400, and saves
    torchrun --nproc-per-node 2 examples/sharded.py --steps 1200    # resumes
    python examples/sharded.py --steps 1200 --checkpoint alone.pt   # a single worker

Each of N workers stores 1/N of gradients and optimizer state. AdaScale adapts the learning
rate to the N-fold batch: --steps counts steps of a single worker's batch, for any N. The
checkpoint has the plain optimizer's format, so any number of workers can resume. At 1200 steps,
about 97 % of the test images are right, after 1200 steps on a single worker or 440 on four.

Requires scikit-learn. Runs on CPUs. On GPUs, move model and data to the device.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy

import manyhands as mh

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=1200, help="end, in steps of one small batch")
parser.add_argument("--accumulate", type=int, default=1, help="batches per worker and step")
parser.add_argument("--batch-size", type=int, default=8, help="images in a batch")
parser.add_argument("--lr", type=float, default=0.03, help="learning rate for that batch")
parser.add_argument("--hidden", type=int, default=256, help="width of the network")
parser.add_argument("--max-norm", type=float, default=10.0, help="limit of the gradient norm")
parser.add_argument(
    "--checkpoint", default="runs/sharded.pt", help="file to resume from and to save"
)
args = parser.parse_args()

# -- workers -------------------------------------------------------------------------------------

torch.set_num_threads(1)  # threads do not help with such small matrices
rank = mh.start().rank

# -- data: workers have the same split, and separate batches -------------------------------------

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images / 16, dtype=torch.float32)
labels = torch.tensor(labels)
train, test = train_test_split(range(len(labels)), test_size=0.3, stratify=labels, random_state=0)
train_images, train_labels = images[train], labels[train]
test_images, test_labels = images[test], labels[test]

# -- model and optimizer, instead of SGD(...) and DistributedDataParallel(...) -------------------

torch.manual_seed(0)
network = nn.Sequential(
    *(nn.Linear(64, args.hidden), nn.ReLU()),
    *(nn.Linear(args.hidden, args.hidden), nn.ReLU()),
    nn.Linear(args.hidden, 10),
)
optimizer = mh.OSS(network.parameters(), optim=torch.optim.SGD, lr=args.lr, momentum=0.9)
optimizer = mh.AdaScale(optimizer, num_gradients_to_accumulate=args.accumulate)
model = mh.ShardedDataParallel(network, optimizer)

if os.path.exists(args.checkpoint):
    saved = torch.load(args.checkpoint, weights_only=True)
    network.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if rank == 0:
        print(f"{args.checkpoint}: going on at step {optimizer.progress:.0f}")

# -- training ------------------------------------------------------------------------------------

while optimizer.progress < args.steps:
    draw = torch.Generator().manual_seed(1000 * optimizer.snapshot()["step"] + rank)
    optimizer.zero_grad()
    for _ in range(args.accumulate):  # no no_sync(), so gradients stay sharded
        chosen = torch.randint(len(train), (args.batch_size,), generator=draw)
        loss = cross_entropy(model(train_images[chosen]), train_labels[chosen])
        (loss / args.accumulate).backward()
    optimizer.clip_grad_norm(args.max_norm)  # torch's would see only this rank's shards
    optimizer.step()

    shown = optimizer.snapshot()
    if rank == 0 and shown["step"] % 50 == 0:
        print(f"step {shown['progress']:5.0f}   gain {shown['gain']:.2f}   loss {loss.item():.3f}")

# -- saving: all ranks gather the state, rank 0 writes ----------------------------------------

optimizer.consolidate_state_dict()
if rank == 0:
    os.makedirs(os.path.dirname(args.checkpoint) or ".", exist_ok=True)
    state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, args.checkpoint + ".new")
    os.replace(args.checkpoint + ".new", args.checkpoint)  # atomic

    with torch.no_grad():
        right = (network(test_images).argmax(1) == test_labels).float().mean()
    held = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t is not None)
    total = sum(p.nbytes for p in network.parameters())
    print(
        f"{right:.1%} right after {optimizer.snapshot()['step']} steps of {optimizer.scale:g} x "
        f"{args.batch_size} images; of {total:,} bytes of momentum this worker holds {held:,}"
    )

dist.destroy_process_group()

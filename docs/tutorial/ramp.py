import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh

rank = mh.start().rank
torch.manual_seed(0)
hidden = torch.randn(4, 1)


def draw(samples, generator):
    x = torch.randn(samples, 4, generator=generator)
    noise = torch.randn(samples, 1, generator=generator)
    return x, torch.sin(x @ hidden / 2) + noise / 2


def test_loss():
    x, y = draw(10_000, torch.Generator().manual_seed(0))
    with torch.no_grad():
        return mse_loss(model(x), y).item()


model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.8)
model = DistributedDataParallel(model)
optimizer = mh.AdaScale(optimizer)
ramp = mh.Ramp(optimizer, max_scale=16, goal="samples", efficiency=0.5, model=model)

generator = torch.Generator().manual_seed(1 + rank)  # different samples on each rank

def batches():
    while True:
        yield draw(16, generator)


steps = samples = 0
for micro_batches in ramp.over(batches()):
    optimizer.zero_grad()
    for x, y in micro_batches:
        (mse_loss(model(x), y) / len(micro_batches)).backward()
    optimizer.step()
    steps += 1
    samples += 2 * 16 * len(micro_batches)
    if optimizer.progress >= 240:
        break

loss = test_loss()
if rank == 0:
    print(f"{steps} steps, {samples} samples: loss {loss:.3f}")

import torch
from torch import nn
from torch.nn.functional import mse_loss

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
model, shards = mh.shard(model, optimizer, level=2)
optimizer = mh.AdaScale(shards)

generator = torch.Generator().manual_seed(1 + rank)  # different samples on each rank
steps = 0
while optimizer.progress < 240:
    x, y = draw(16, generator)
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()
    steps += 1

loss = test_loss()
if rank == 0:
    print(f"{steps} steps of 32 samples: gain {optimizer.progress / steps:.2f}, loss {loss:.3f}")
    held = sum(state["momentum_buffer"].numel() for state in shards.optim.state.values())
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters, {held} momentum values on this rank")

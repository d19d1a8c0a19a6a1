import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import manyhands as mh

dist.init_process_group("gloo")  # with GPUs: docs/gpus.md
rank = dist.get_rank()
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
model = mh.FSDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.8)
optimizer = mh.AdaScale(optimizer)

generator = torch.Generator().manual_seed(1 + rank)  # each rank draws other samples
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
    held = sum(p.to_local().numel() for p in model.parameters())
    print(f"{held} parameters on this rank")
dist.destroy_process_group()

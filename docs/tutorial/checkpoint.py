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
optimizer = mh.DiLoCo(optimizer, every=20, momentum=0.7)
try:
    mh.load("run", model=model, optimizer=optimizer)
    if rank == 0:
        print(f"continue after {optimizer.steps} steps: loss {test_loss():.3f}")
except FileNotFoundError:
    pass  # the first run
steps = optimizer.steps  # loaded, or 0
end = steps + 120

generator = torch.Generator().manual_seed(1 + rank + steps)  # new samples
while steps < end:
    x, y = draw(16, generator)
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()
    steps += 1

optimizer.synchronize()
mh.save("run", model=model, optimizer=optimizer, step=steps)
loss = test_loss()
if rank == 0:
    print(f"{steps} steps, {optimizer.rounds} sync rounds: loss {loss:.3f}")

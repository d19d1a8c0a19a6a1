import torch
from torch import nn
from torch.nn.functional import mse_loss

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

generator = torch.Generator().manual_seed(1)
for step in range(240):
    x, y = draw(16, generator)
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()

loss = test_loss()
print(f"240 steps of 16 samples: loss {loss:.3f}")

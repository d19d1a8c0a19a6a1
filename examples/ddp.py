"""Train with DistributedDataParallel: torchrun --nproc-per-node 4 examples/ddp.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")  # "nccl" on GPUs: docs/gpus.md
rank, workers = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x, weights = torch.randn(2000, 16), torch.randn(16, 1)
data = TensorDataset(x, x.abs() @ weights + torch.randn(2000, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
network = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.016)
end = 5 * len(loader)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=end)

epoch = steps = 0
while epoch < 5:
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()
        steps += 1
    epoch += 1

with torch.no_grad():
    x = torch.randn(100_000, 16)
    y = x.abs() @ weights + torch.randn(100_000, 1)
    loss = nn.functional.mse_loss(network(x), y).item()
if rank == 0:
    print(f"workers {workers}: {epoch} epochs, {steps} steps, test loss {loss:.3f}")
dist.destroy_process_group()

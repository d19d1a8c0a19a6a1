"""PEFT's adapters are saved from a model whose parameters are sharded."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import manyhands as mh
from helpers.ranks import run_ranks

peft = pytest.importorskip("peft", reason="peft is not installed: make test-integrations")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.a(x).relu())


def adapter(level, folder):
    """Train an adapter for three steps, and return what `save_pretrained` has written."""
    from safetensors.torch import load_file

    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["a", "b"], modules_to_save=["2"])
    model = peft.get_peft_model(nn.Sequential(Block(), Block(), nn.Linear(8, 4)), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    wraps = {"auto_wrap_policy": {Block}} if level == 3 else {}
    model, optimizer = mh.shard(model, optimizer, level=level, **wraps)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
    folder = folder / f"{level} {dist.get_rank()}"
    (model if level == 3 else model.module).save_pretrained(folder)
    return load_file(folder / "adapter_model.safetensors")


def test_an_adapter_saved_at_any_level_is_that_of_level_2(tmp_path):
    first, second = run_ranks(2, lambda: [adapter(level, tmp_path) for level in (2, 0, 1, 3)])
    assert len(first[0]) == 10
    assert "base_model.model.0.a.lora_A.weight" in first[0]
    for level_2, *others in (first, second):
        for other in others:
            torch.testing.assert_close(other, level_2)

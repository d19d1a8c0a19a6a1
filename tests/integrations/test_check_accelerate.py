"""`manyhands check` of scripts with Accelerate."""

import pytest

from manyhands.tools.check import check_script

SCRIPT = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
loader = DataLoader(data, 4, shuffle=True)
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
length = len(loader)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, length)
schedule = accelerator.prepare(schedule)
for epoch in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "old, new, causes",
    [
        ("", "", []),
        ("backward(loss)", "backward(loss / accelerator.num_processes)", ["constant factor"]),
        (
            "model, optimizer, loader = accelerator.prepare(model, ",
            "optimizer, loader = accelerator.prepare(",
            ["not averaged"],
        ),
        (
            "schedule = accelerator.prepare(schedule)",
            "step = schedule.step\n"
            "schedule.step = lambda: [step() for _ in range(accelerator.num_processes)]",
            ["schedule"],
        ),
    ],
    ids=["right", "divided twice", "model not prepared", "schedule stepped by every rank"],
)
def test_accelerate(old, new, causes, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.replace(old, new))
    verdict = check_script(str(tmp_path / "train.py"))
    found = [one.cause for one in verdict.findings]
    assert found == causes, verdict.as_text()
    assert verdict.code == (1 if causes else 3)
    assert causes or list(verdict.exceptions) == ["schedule"]

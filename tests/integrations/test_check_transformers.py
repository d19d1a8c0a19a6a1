"""`manyhands check` of scripts with the Hugging Face Trainer."""

import re

import pytest

from helpers.pages import ROOT
from manyhands.tools.check import check_script

SCRIPT = """
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

torch.manual_seed(0)
rows = torch.randn(64, 8)
data = [{"x": x, "labels": int(x.sum() > 0)} for x in rows]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
    def forward(self, x, labels=None):
        out = self.layer(x)
        return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}

class Own(Trainer):
    def training_step(self, *args, **named):
        return super().training_step(*args, **named)
    def compute_loss(self, model, inputs, *args, **named):
        loss = model(**inputs)["loss"]
        return loss

arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, max_steps=8, report_to=[], save_strategy="no",
    learning_rate=0.01, lr_scheduler_type="linear", use_cpu=True, disable_tqdm=True,
)
Own(model=Net(), args=arguments, train_dataset=data).train()
"""


@pytest.mark.parametrize(
    "new, causes",
    [("return loss", []), ("return loss / self.args.world_size", ["constant factor"])],
    ids=["right", "divided twice"],
)
def test_transformers(new, causes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT.replace("return loss", new))
    verdict = check_script("train.py")
    assert [one.cause for one in verdict.findings] == causes, verdict.as_text()
    assert verdict.code == (1 if causes else 0), verdict.as_text()


PAGE = (ROOT / "docs" / "check.md").read_text()


def test_the_page_shows_the_trainers_bug_and_the_remedy(tmp_path, monkeypatch):
    """transformers 5.23. If this fails with a newer version, the page must say that it is fixed."""
    script = re.search(r'```python title="bert.py"\n(.*?)```', PAGE, re.DOTALL).group(1)
    shown = re.search(r"```console\n\$ manyhands check bert.py\n(.*?)```", PAGE, re.DOTALL).group(1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bert.py").write_text(script)
    assert check_script("bert.py").as_text() + "\n" == shown
    remedy = "report_to=[], average_tokens_across_devices=False"
    (tmp_path / "bert.py").write_text(script.replace("report_to=[]", remedy))
    assert check_script("bert.py").code == 0

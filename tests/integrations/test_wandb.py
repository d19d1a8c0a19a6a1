"""`Record` hands its values on to Weights & Biases, offline."""

import pytest
import torch

import manyhands as mh

wandb = pytest.importorskip("wandb", reason="wandb is missing: make test-integrations has it")


def test_an_offline_run_keeps_what_it_got(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="manyhands", mode="offline", dir=tmp_path)
    model = torch.nn.Linear(2, 1)
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    with mh.Record(tmp_path / "a.jsonl", optimizer, writer=run) as record:
        for loss in (0.5, 0.25):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            record.step(loss=loss)
    # wandb counts a step when the next one begins, and the last one when the run ends
    summary = {key: run.summary[key] for key in ("manyhands/loss", "manyhands/lr/0")}
    run.finish()
    assert summary == {"manyhands/loss": 0.5, "manyhands/lr/0": 0.1}
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))

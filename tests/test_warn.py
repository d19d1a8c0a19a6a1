"""Where warnings point: at the user's line."""

import warnings

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands._warn import warn

pytestmark = pytest.mark.quick


def test_a_warning_names_the_innermost_line_that_is_not_ours_or_torchs():
    scope = {"__name__": "manyhands.made_up", "warn": warn}
    exec("def deep():\n    warn('here', RuntimeWarning)\n\ndef deeper():\n    deep()", scope)
    with pytest.warns(RuntimeWarning, match="here") as seen:
        scope["deeper"]()
    assert seen[0].filename == __file__


def test_an_environment_of_several_processes_is_said_at_the_users_line(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("manyhands._ranks.ranks._settled", False)
    with pytest.warns(UserWarning, match="WORLD_SIZE=2") as seen:
        mh.AdaScale(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    assert seen[0].filename == __file__


def test_a_record_that_is_stepped_before_the_optimizer_says_so_once(tmp_path):
    model = nn.Linear(2, 2)
    rule = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)

    def train(record, record_first):
        for _ in range(2):
            rule.zero_grad()
            for _ in range(2):
                model(torch.ones(3, 2)).sum().backward()
            for step in (record.step, rule.step) if record_first else (rule.step, record.step):
                step()

    with (
        pytest.warns(UserWarning, match=r"after optimizer\.step\(\), or lines") as seen,
        mh.Record(tmp_path / "a.jsonl", rule) as record,
    ):
        train(record, True)
    assert len(seen) == 1
    with warnings.catch_warnings(), mh.Record(tmp_path / "b.jsonl", rule) as record:
        warnings.simplefilter("error")
        train(record, False)

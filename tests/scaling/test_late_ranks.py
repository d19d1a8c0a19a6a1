"""A rank that does not join DDP's all-reduce raises, instead of waiting for the others."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.ranks import RanksFailed, run_ranks


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, both=True):
        return self.second(self.first(x)) if both else self.first(x)


def train(mistake, **ddp):
    """Three steps; rank 1 makes a mistake in the second."""
    torch.manual_seed(0)
    model = TwoLayers()
    wrapped = DistributedDataParallel(model, **ddp)
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(1 + dist.get_rank())
    for step in range(3):
        odd = dist.get_rank() == 1 and step == 1
        optimizer.zero_grad()
        if odd and mistake == "a freeze":
            model.second.weight.requires_grad_(False)
        alone = odd and mistake == "no_sync"
        with wrapped.no_sync() if alone else contextlib.nullcontext():
            loss = wrapped(torch.randn(2, 4), not (odd and mistake == "a subset")).square().sum()
            if not (odd and mistake == "no backward"):
                loss.backward()
        optimizer.step()
    return optimizer.progress


WORDS = {
    "a subset": r"which is this rank. Here 2 of 4 parameters had no gradient .*first is number 2\)",
    "a freeze": r"Here 1 of 4 parameters had no gradient in the step's last .*first is number 2\)",
    "no backward": r"rank 1, which is this rank. Here step\(\) was called without a backward\(\)",
    "no_sync": r"computed by this rank alone. Run the last pass outside no_sync\(\)",
}


@pytest.mark.sample("a subset", "no_sync")
@pytest.mark.parametrize("mistake", WORDS)
def test_a_rank_that_left_out_ddps_average_raises_within_seconds(mistake):
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match=f"rank 1 raised(?s:.*){WORDS[mistake]}"):
        run_ranks(2, train, mistake)
    assert time.monotonic() - begin < 20  # ranks give up after 130


def test_ddp_that_finds_unused_parameters_expects_them():
    first, second = run_ranks(2, train, "a subset", find_unused_parameters=True)
    assert first == second > 0


def late(seconds):
    """Every rank has gradients of its own that nobody was to average: there is no DDP to ask."""
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(4, 1)
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    model.bias.requires_grad_(False)
    model(torch.ones(2, 4)).sum().backward()  # the same gradient everywhere, whatever the weights
    if dist.get_rank() == 0:
        time.sleep(seconds)
    optimizer.step()
    return optimizer.gain()


def test_a_rank_with_an_anomaly_waits_for_the_others_if_there_is_no_ddp():
    first, second = run_ranks(2, late, 2.5)
    assert first == second

"""BMUF on real workers: fairseq's table, and the anchor after resumes."""

import copy

import torch
from torch.optim import SGD

import manyhands as mh
from helpers.blocks_oracle import assert_fairseqs_values
from helpers.ranks import run_ranks
from manyhands.fairseq import FairseqBMUF


def test_fairseqs_values():
    assert_fairseqs_values(mh.BMUF)


def look_at_anchor(change):
    """After steps of 1 and 2 on two workers, `change(optimizer, made)`, and some more."""
    param = torch.nn.Parameter(torch.zeros(1))

    def made():
        return mh.BMUF(SGD([param], lr=1.0), global_sync_iter=4, warmup_iterations=2)

    optimizer = change(made)
    for _ in range(3):
        param.grad = torch.full((1,), 1.0 + torch.distributed.get_rank())
        optimizer.step()
    with optimizer.at_anchor():
        return param.item()


def test_the_anchor_is_there_after_a_resume_at_the_end_of_the_warm_up():
    def resumed(made):
        optimizer = made()
        for _ in range(2):
            optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        optimizer = made()
        optimizer.load_state_dict(state)
        return optimizer

    first, second = run_ranks(2, look_at_anchor, resumed)
    assert first == second == -1.5 * 2


def test_the_anchor_is_there_after_the_count_was_set_past_the_warm_up():
    def counted(made):
        optimizer = made()
        FairseqBMUF.set_num_updates(optimizer, 9)
        return optimizer

    first, second = run_ranks(2, look_at_anchor, counted)
    assert first == second == -1.5 * 3

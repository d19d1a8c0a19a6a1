"""BMUF on real workers: fairseq's table, and the same loop written out in one process."""

import copy

import pytest
import torch
from torch.optim import SGD

import manyhands as mh
from blocks_oracle import INNER, REFERENCE, loss_of, problem, reference
from ranks import run_ranks


def train(init, kind, data, options, wrap=mh.BMUF):
    """This rank's parameters after every step."""
    rank = torch.distributed.get_rank()
    params = [p.clone().requires_grad_() for p in init[rank]]
    optimizer = wrap(INNER[kind](params), **options)
    seen = []
    for xs, ys in data:
        optimizer.zero_grad()
        loss_of(params, xs[rank], ys[rank]).backward()
        optimizer.step()
        seen.append(torch.cat([p.detach().flatten() for p in params]))
    return torch.stack(seen)


@pytest.mark.skipif(not REFERENCE.exists(), reason="shared/reference is missing: fairseq's values")
def test_fairseqs_values():
    table = reference()
    init, data = problem(table)

    def all_cases():
        results = []
        for case in table["cases"]:
            options = dict(case["cfg"])
            kind = options.pop("optimizer")
            options.pop("world_size")
            results.append(train(init, kind, data, options))
        return results

    for rank, results in enumerate(run_ranks(2, all_cases)):
        for case, ours in zip(table["cases"], results, strict=True):
            theirs = torch.tensor(case["ranks"][rank]["traj"], dtype=torch.float64)
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=str(case["cfg"]))


def look_at_the_common_point(change):
    """After steps of 1 and 2 on two workers, `change(optimizer, made)`, and some more."""
    param = torch.nn.Parameter(torch.zeros(1))

    def made():
        return mh.BMUF(SGD([param], lr=1.0), global_sync_iter=4, warmup_iterations=2)

    optimizer = change(made)
    for _ in range(3):
        param.grad = torch.full((1,), 1.0 + torch.distributed.get_rank())
        optimizer.step()
    with optimizer.at_the_common_point():
        return param.item()


def test_the_common_point_is_there_after_a_resume_at_the_end_of_the_warm_up():
    def resumed(made):
        optimizer = made()
        for _ in range(2):
            optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        optimizer = made()
        optimizer.load_state_dict(state)
        return optimizer

    first, second = run_ranks(2, look_at_the_common_point, resumed)
    assert first == second == -1.5 * 2


def test_the_common_point_is_there_after_the_count_was_set_past_the_warm_up():
    def counted(made):
        optimizer = made()
        optimizer.set_num_updates(9)
        return optimizer

    first, second = run_ranks(2, look_at_the_common_point, counted)
    assert first == second == -1.5 * 3

"""BMUF on real workers: fairseq's table, and the same loop written out in one process."""

import pytest
import torch

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

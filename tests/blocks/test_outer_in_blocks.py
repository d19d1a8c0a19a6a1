"""What every outer step must do inside of blocks, whatever it remembers: the plain loop is right.

The steps are those of `OUTERS` in test_outer.py.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import manyhands as mh
from helpers.blocks_plain import gradient, train
from helpers.ranks import on_ranks, run_ranks

from test_outer import OUTERS  # isort: skip

LR, STEPS = 0.1, 17
CASES = [  # every, overlap, fragments
    (4, 0, 1),
    (5, 2, 1),
    (6, 1, 3),
]

contract = pytest.mark.parametrize("name", OUTERS)


def start():
    return torch.linspace(-1, 1, 60, dtype=torch.float64)


class Run:
    def __init__(self, outer, every, overlap=0, fragments=1, seed=0):
        values = start() if seed == 0 else torch.full((60,), float(seed), dtype=torch.float64)
        parts = values[:35].view(7, 5), values[35:36], values[36:]
        self.model = nn.ParameterList([nn.Parameter(part.clone()) for part in parts])
        self.optimizer = mh.Blocks(
            SGD(self.model.parameters(), lr=LR),
            outer,
            every=every,
            overlap=overlap,
            fragments=fragments,
        )

    def values(self):
        return torch.cat([param.detach().flatten() for param in self.model])

    def train(self, steps, begin=0):
        """Return the parameters after each of the steps."""
        seen = []
        for step in range(begin + 1, begin + steps + 1):
            grads = gradient(self.values(), dist.get_rank(), step).split([35, 1, 24])
            for param, grad in zip(self.model, grads, strict=True):
                param.grad = grad.view(param.shape).clone()
            self.optimizer.step()
            seen.append(self.values())
        return torch.stack(seen)

    def outer_state(self):
        """The anchor and every memory, as flat tensors."""
        state = self.optimizer._sync.anchor.outer_parts()
        return [
            torch.cat([each.flatten() for each in tensors])
            for tensors in zip(*(e.entries.values() for e in state), strict=True)
        ]


@pytest.mark.sample("Average", "BlockMomentum, nesterov", "of one's own, with two memories")
@contract
def test_blocks_equal_the_plain_loop(name):
    def all_cases():
        return [Run(OUTERS[name], *case).train(STEPS) for case in CASES]

    results = run_ranks(2, all_cases)
    for i, (every, overlap, fragments) in enumerate(CASES):
        more = {"every": every, "overlap": overlap, "fragments": fragments}
        plain = train(start(), gradient, 2, STEPS, LR, OUTERS[name], {}, **more)
        for rank in range(2):
            torch.testing.assert_close(
                results[rank][i], plain[:, rank], rtol=1e-11, atol=1e-11, msg=str(CASES[i])
            )


@pytest.mark.sample("Average", "BlockMomentum, nesterov", "of one's own, with two memories")
@contract
@on_ranks(2)
def test_a_state_dict_continues_bitwise_in_mid_block(name):
    for case in CASES:
        whole = Run(OUTERS[name], *case)
        whole.train(13)  # no round is in flight
        again = Run(OUTERS[name], *case, seed=3)
        again.model.load_state_dict(whole.model.state_dict())
        again.optimizer.load_state_dict(whole.optimizer.state_dict())
        assert torch.equal(again.train(6, 13), whole.train(6, 13)), case


@pytest.mark.sample("Average", "BlockMomentum, nesterov", "of one's own, with two memories")
@contract
def test_a_checkpoint_continues_on_more_workers_with_the_same_anchor_and_memories(name, tmp_path):
    def first():
        run = Run(OUTERS[name], 4)
        run.train(8)
        mh.save(tmp_path, model=run.model, optimizer=run.optimizer)
        return run.outer_state()

    def second():
        run = Run(OUTERS[name], 4, seed=3)
        mh.load(tmp_path, model=run.model, optimizer=run.optimizer)
        return run.outer_state()

    expected = run_ranks(2, first)[0]
    assert len(expected) == 1 + OUTERS[name].memories and all(t.any() for t in expected)
    for found in run_ranks(3, second):
        assert all(map(torch.equal, found, expected))


@contract
@on_ranks(2)
def test_a_joiner_of_a_crew_receives_the_anchor_and_memories(name):
    run, joiner = Run(OUTERS[name], 4), Run(OUTERS[name], 4, seed=3)
    run.train(8)
    common = run.optimizer._sync.common.pack(run.optimizer._sync.state)
    sync = joiner.optimizer._sync
    sync.state = sync.common.take_over(common, sync.state)
    assert all(map(torch.equal, joiner.outer_state(), run.outer_state()))
    assert torch.equal(joiner.values(), run.values())

"""The outer steps: fairseq's table, formulas written out, and what equals what."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.blocks_oracle import problem, train
from helpers.recorded import recorded_values
from manyhands.blocks._anchor import Average, BlockMomentum, Outer, SlowMomentum

pytestmark = pytest.mark.quick


class TwoBlocks(Outer):
    """Along the mean of a block's gradient and those of the two blocks before it."""

    memories = 2

    def step(self, anchor, gradient, memories):
        last, before = memories
        anchor.sub_(before.add_(last).add_(gradient), alpha=1 / 3)
        before.copy_(last)
        last.copy_(gradient)
        gradient.zero_()  # which it may: `overwrites`


#: A new outer step joins the contracts, below and in test_outer_in_blocks.py, by a line here.
OUTERS = {
    "Average": Average(),
    "BlockMomentum": BlockMomentum(0.5, 0.9),
    "BlockMomentum, nesterov": BlockMomentum(0.5, 0.9, nesterov=True),
    "BlockMomentum, use_nbm": BlockMomentum(0.5, 0.9, use_nbm=True),
    "SlowMomentum": SlowMomentum(0.1, 1.0, 0.7),
    "of one's own, with two memories": TwoBlocks(),
}


def stepping(outer):
    """An outer step as the oracle calls it, with the memories of each rank kept between blocks."""
    kept = {}

    def step(rank, anchor, mean):
        memories = kept.setdefault(
            rank, [[torch.zeros_like(a) for _ in range(outer.memories)] for a in anchor]
        )
        moved = [a.clone() for a in anchor]
        for a, m, memory in zip(moved, mean, memories, strict=True):
            outer.step(a, a - m, memory)
        return moved

    return step


def documented(cfg):
    """fairseq's: with a block momentum of 0 it averages, and looks at nothing else."""
    if cfg["block_momentum"] == 0:
        return Average()
    return BlockMomentum(cfg["block_lr"], cfg["block_momentum"], use_nbm=cfg["use_nbm"])


def test_fairseqs_values():
    table = recorded_values("bmuf_fairseq_world2")
    init, data = problem(table)
    for case in table["cases"]:
        cfg = case["cfg"]
        seen = train(
            init,
            cfg["optimizer"],
            data,
            stepping(documented(cfg)),
            every=cfg["global_sync_iter"],
            warmup=cfg["warmup_iterations"],
            average_sync=cfg["average_sync"],
        )
        for rank, steps in enumerate(seen):
            ours = torch.stack([torch.cat([p.flatten() for p in params]) for params in steps])
            recorded = torch.tensor(case["ranks"][rank]["traj"], dtype=torch.float64)
            torch.testing.assert_close(ours, recorded, rtol=1e-9, atol=1e-9, msg=str(cfg))


numbers = st.floats(-10, 10, allow_subnormal=False)
blocks = st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=12)


def walk(outer, means):
    """Return the anchor after each block, from the means' distances to the anchor before."""
    anchor = torch.zeros(3, dtype=torch.float64)
    memories = [torch.zeros_like(anchor) for _ in range(outer.memories)]
    points = []
    for difference in means:
        outer.step(anchor, torch.tensor(difference, dtype=torch.float64), memories)
        points.append(anchor.clone())
    return torch.stack(points)


@pytest.mark.sample("Average", "BlockMomentum, nesterov", "of one's own, with two memories")
@pytest.mark.parametrize("name", OUTERS)
@given(blocks)
def test_an_outer_step_treats_each_element_by_itself(name, differences):
    """Anchors are cut into buckets and, under shards, into slices: where must not matter."""
    whole = walk(OUTERS[name], differences)
    for element in range(3):
        alone = [[block[element]] * 3 for block in differences]
        expected = whole[:, element : element + 1].expand(-1, 3)
        torch.testing.assert_close(walk(OUTERS[name], alone), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OUTERS)
def test_an_outer_step_stays_at_the_anchor_that_all_workers_stayed_at(name):
    assert not walk(OUTERS[name], [[0.0, 0.0, 0.0]] * 3).any()


@pytest.mark.parametrize("name", OUTERS)
def test_an_outer_step_changes_the_difference_only_where_it_says_so(name):
    outer, difference = OUTERS[name], torch.tensor([1.0, -2.0, 0.0])
    memories = [torch.zeros(3) for _ in range(outer.memories)]
    outer.step(torch.zeros(3), difference, memories)
    assert outer.overwrites or difference.tolist() == [1.0, -2.0, 0.0]


def test_the_text_of_an_outer_step_tells_its_settings_apart():
    """Workers, and a resumed run, are compared by it."""
    assert len({repr(outer) for outer in OUTERS.values()}) == len(OUTERS)


@given(blocks, st.floats(0.1, 2), st.floats(0, 0.99))
def test_nesterovs_block_momentum_is_torchs_sgd_on_the_differences(differences, lr, momentum):
    """Which is how DiLoCo is defined."""
    point = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([point], lr=lr, momentum=momentum, nesterov=momentum > 0)
    points = []
    for difference in differences:
        point.grad = torch.tensor(difference, dtype=torch.float64)
        sgd.step()
        points.append(point.detach().clone())
    ours = walk(BlockMomentum(lr, momentum, nesterov=True), differences)
    torch.testing.assert_close(ours, torch.stack(points), rtol=1e-12, atol=1e-12)


@given(blocks, st.floats(0.1, 2), st.floats(0, 0.99))
def test_chen_and_huos_look_ahead_is_the_same(differences, lr, momentum):
    """Their formula: the model is broadcast one momentum ahead of the one that is kept."""
    model, s = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    points = []
    for difference in differences:
        # the workers began at model - momentum * s, and the difference is from there
        s = momentum * s + lr * torch.tensor(difference, dtype=torch.float64)
        model = model - s
        points.append(model - momentum * s)
    ours = walk(BlockMomentum(lr, momentum, nesterov=True), differences)
    torch.testing.assert_close(ours, torch.stack(points), rtol=1e-9, atol=1e-9)


@given(blocks, st.floats(0.1, 2), st.floats(0, 0.99))
def test_what_fairseq_calls_nesterov_is_a_longer_step_of_plain_momentum(differences, lr, momentum):
    torch.testing.assert_close(
        walk(BlockMomentum(lr, momentum, use_nbm=True), differences),
        walk(BlockMomentum(lr * (1 + momentum), momentum), differences),
        rtol=1e-9,
        atol=1e-9,
    )


@given(blocks, st.floats(0.01, 2))
def test_block_momentum_of_zero_and_slow_momentum_of_zero_average(differences, inner_lr):
    expected = walk(Average(), differences)
    for outer in (BlockMomentum(1.0, 0.0), SlowMomentum(inner_lr, momentum=0.0)):
        torch.testing.assert_close(walk(outer, differences), expected, rtol=1e-9, atol=1e-9)


@given(blocks, st.floats(0.01, 2), st.floats(0.1, 2), st.floats(0, 0.99))
def test_slowmo_at_a_constant_rate_is_block_momentum(differences, inner_lr, slow_lr, momentum):
    torch.testing.assert_close(
        walk(SlowMomentum(inner_lr, slow_lr, momentum), differences),
        walk(BlockMomentum(slow_lr, momentum), differences),
        rtol=1e-9,
        atol=1e-8,
    )


def test_two_forms_of_one_look_ahead_exclude_each_other():
    with pytest.raises(ValueError, match="exclude each other"):
        BlockMomentum(nesterov=True, use_nbm=True)


def test_a_step_of_ones_own_is_a_subclass():
    class Sign(Outer):
        def step(self, anchor, gradient, memories):
            anchor.sub_(gradient.sign())

    assert walk(Sign(), [[3.0, -2.0, 0.0]]).tolist() == [[-1.0, 1.0, 0.0]]

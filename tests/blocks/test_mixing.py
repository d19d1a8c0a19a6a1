"""Overlap with a mixing: a worker's own parameters and the new anchor, weighted, at each merge."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import manyhands as mh
from helpers.blocks_plain import train
from helpers.ranks import raises_on_ranks, run_ranks
from test_blocks import LR, OUTER, gradient, run, start, step_along, wrapped

CASES = [(4, 2, 1, 0.5), (5, 1, 3, 0.25), (6, 5, 2, 0.75), (4, 3, 1, 0.0)]


def plain(name, workers, steps, every, overlap, fragments, mixing):
    options = {"every": every, "overlap": overlap, "fragments": fragments, "mixing": mixing}
    return train(start(), gradient, workers, steps, LR, name, OUTER[name], **options)


@pytest.mark.parametrize("name", OUTER)
def test_mixing_equals_the_plain_loop(name):
    def all_cases():
        return [
            run(name, OUTER[name], every, 17, overlap=overlap, fragments=fragments, mixing=mixing)
            for every, overlap, fragments, mixing in CASES
        ]

    for rank, found in enumerate(run_ranks(3, all_cases)):
        for case, seen in zip(CASES, found, strict=True):
            expected = plain(name, 3, 17, *case)[:, rank]
            torch.testing.assert_close(seen, expected, rtol=1e-11, atol=1e-11, msg=str(case))


def two_workers(param, steps, **options):
    """Train a number with slopes of 1 and 3; return it after each step."""
    optimizer = mh.LocalSGD(SGD([param], lr=1.0), every=2, overlap=1, **options)
    seen = []
    for _ in range(steps):
        param.grad = torch.full_like(param, -1.0 - 2.0 * dist.get_rank())
        optimizer.step()
        seen.append(param.item())
    optimizer.synchronize()
    return [*seen, param.item()]


def test_mixing_by_hand():
    """Sent: 2 and 6. A step later: 3 and 9, and the anchor is 4."""

    def blocks():
        return two_workers(nn.Parameter(torch.zeros(1)), 5, mixing=0.25)

    one, other = run_ranks(2, blocks)
    assert one == [1.0, 2.0, 0.25 * 3 + 0.75 * 4, 4.75, 0.25 * 5.75 + 0.75 * 6.5, 7.0]
    assert other == [3.0, 6.0, 0.25 * 9 + 0.75 * 4, 8.25, 0.25 * 11.25 + 0.75 * 6.5, 7.0]


@pytest.mark.parametrize("mixing", [None, 0.0, 0.25, 0.5])
@pytest.mark.filterwarnings("ignore:in the first block all")  # on a slope all go one way
def test_mixing_brakes_an_outer_momentum(mixing):
    """An outer momentum of μ alone goes m = 1 / (1 - μ) times as fast as the workers.

    It carries the anchor ahead of them, and their own share α pulls back. In a block of H steps
    with an overlap of k they move by d = H - (1 - α) k - α (m - 1) d, and the anchor by m d.
    """

    def blocks():
        param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        options = {"every": 8, "overlap": 2, "lr": 1.0, "momentum": 0.8, "mixing": mixing}
        optimizer = mh.DiLoCo(SGD([param], lr=1.0), **options)
        seen = []
        for _ in range(800):
            param.grad = -torch.ones_like(param)
            optimizer.step()
            seen.append(param.item())
        return (seen[-1] - seen[-401]) / 400

    share = 0.0 if mixing is None else mixing
    kept = 8 if mixing is None else 8 - (1 - share) * 2
    expected = 5 * kept / (1 + share * (5 - 1)) / 8
    assert run_ranks(2, blocks) == [pytest.approx(expected, rel=1e-4)] * 2


def test_without_any_share_16_bit_parameters_are_the_rounded_anchor():
    def blocks():
        param = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        optimizer = mh.LocalSGD(SGD([param], lr=2.0**-8), every=2, overlap=1, mixing=0.0)
        seen = []
        for step in range(9):
            param.grad = torch.full_like(param, -2.0 - 4.0 * dist.get_rank())
            optimizer.step()
            if step % 2 == 0 and step > 1:
                (bucket,) = optimizer._sync.anchor.buckets
                assert bucket.anchor.dtype == torch.float32
                assert torch.equal(param.detach(), bucket.anchor.bfloat16())
                seen.append(bucket.anchor.item())
        return seen

    one, other = run_ranks(2, blocks)
    assert one == other == sorted(set(one))


def test_a_worker_that_was_left_out_takes_the_anchor_and_all_its_own_steps_are_lost():
    def blocks():
        param = nn.Parameter(torch.zeros(2))
        optimizer = mh.LocalSGD(SGD([param], lr=1.0), every=2, overlap=1, mixing=0.5)
        for step in range(3):
            param.grad = torch.full_like(param, -1.0)
            if step == 1 and dist.get_rank() == 1:
                param.grad[0] = torch.nan
            optimizer.step()
        return param.tolist(), optimizer.left_out

    assert run_ranks(2, blocks) == [([2.5, 2.5], [1]), ([2.0, 2.0], [1])]


@pytest.mark.parametrize("frozen_at", [4, 5])
def test_a_parameter_that_is_frozen_is_averaged_once_more_and_rests(frozen_at):
    """Also if a mean was in flight: a mixing would leave it in another place on each worker."""

    def blocks():
        fixed, moving = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        inner = SGD([moving, fixed], lr=1.0)
        optimizer = mh.DiLoCo(inner, every=2, lr=1.0, momentum=0.5, overlap=1, mixing=0.5)
        seen = []
        for step in range(12):
            if step == frozen_at:
                fixed.requires_grad_(False)
            for param in (fixed, moving):
                one = torch.full_like(param, 1.0 + dist.get_rank())
                param.grad = one if param.requires_grad else None
            optimizer.step()
            seen.append(fixed.detach().clone())
        return torch.stack(seen), moving.detach()

    (first, moved), (second, other) = run_ranks(2, blocks)
    assert torch.equal(first[6:], second[6:])
    assert (first[6:] == first[6]).all()
    assert not torch.equal(moved, other)


def test_each_rank_of_an_inner_group_mixes_its_slice():
    def blocks():
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        rank = dist.get_rank()
        params = [nn.Parameter(start()[:41].clone()), nn.Parameter(start()[41:].clone())]
        groups = {"inner_group": groups[rank // 2], "process_group": across[rank % 2]}
        optimizer = wrapped("DiLoCo", params, OUTER["DiLoCo"], 4, overlap=2, mixing=0.5, **groups)
        seen = []
        for step in range(1, 14):
            step_along(optimizer, params, rank // 2, step)
            seen.append(torch.cat([p.detach() for p in params]))
        return torch.stack(seen)

    expected = plain("DiLoCo", 2, 13, 4, 2, 1, 0.5)
    for rank, seen in enumerate(run_ranks(4, blocks)):
        torch.testing.assert_close(seen, expected[:, rank // 2], rtol=1e-11, atol=1e-11)


def test_a_mixing_is_a_share_below_one_and_needs_an_overlap():
    def optimizer(**options):
        return mh.DiLoCo(SGD([nn.Parameter(torch.ones(1))], lr=0.1), **options)

    for mixing in (1, 1.0, 1.5):
        with pytest.raises(ValueError, match=r"mixing must be .* never take anything from the oth"):
            optimizer(overlap=1, mixing=mixing)
    for mixing in (0, 0.0, 0.5):
        assert f"mixing={float(mixing)}," in repr(optimizer(overlap=1, mixing=mixing))
        with pytest.raises(ValueError, match=r"needs an overlap of at least 1, got overlap=0: it"):
            optimizer(mixing=mixing)


def test_a_codec_that_delays_most_of_a_movement_takes_no_mixing():
    for mixing, codec in ((0.5, "topk"), (0, "topk"), (0.5, "patch"), (0.5, "fp4")):
        options = {"every": 8, "overlap": 2, "mixing": mixing, "codec": codec}
        if mixing and codec == "topk":
            with pytest.raises(ValueError, match=r"codec='topk' keeps all of it .* counted twice"):
                mh.DiLoCo(SGD([nn.Parameter(torch.ones(1))], lr=0.1), **options)
        else:
            mh.DiLoCo(SGD([nn.Parameter(torch.ones(1))], lr=0.1), **options)


def test_another_mixing_on_one_worker_is_an_error_on_all():
    def blocks():
        two_workers(nn.Parameter(torch.zeros(1)), 1, mixing=0.25 * dist.get_rank())

    raises_on_ranks(2, ValueError, blocks, match=r"mixing: rank 0: 0\.0; rank 1: 0\.25")


def test_a_run_goes_on_with_another_mixing_if_that_is_meant():
    def optimizer(mixing):
        return mh.DiLoCo(SGD([nn.Parameter(torch.ones(1))], lr=0.1), overlap=1, mixing=mixing)

    saved = optimizer(None).state_dict()
    changed = optimizer(0.5)
    with pytest.raises(ValueError, match=r"mixing: saved None, now 0\.5") as error:
        changed.load_state_dict(saved)
    assert "optimizer_overrides={'mixing': 0.5}" in str(error.value)
    changed.load_state_dict(saved, optimizer_overrides={"mixing": 0.5})
    with pytest.raises(ValueError, match=r"mixing=0\.5, and .* made with None"):
        optimizer(None).load_state_dict(saved, optimizer_overrides={"mixing": 0.5})
    del saved["blocks"]["options"]["mixing"]  # of a version that had no mixing
    optimizer(None).load_state_dict(saved)

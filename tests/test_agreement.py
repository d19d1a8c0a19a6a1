"""Tensors that differ between ranks are an error on all of them, before anything is sent."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import manyhands as mh
from helpers.ranks import on_ranks, raises_on_ranks
from manyhands._ranks.agreement import agree, describe_tensors, names_in
from manyhands._ranks.ranks import RankGroup


class Two(nn.Module):
    """Two layers of one shape, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(2))


def same(model):
    return model, list(model.parameters())


def doubled(model):
    model.second.double()
    return model, list(model.parameters())


def halved(model):
    """float16 on one rank, and bfloat16 on the other: as many bytes."""
    model.to(torch.bfloat16 if dist.get_rank() else torch.float16)
    return model, list(model.parameters())


def transposed(model):
    with torch.no_grad():
        model.first.weight.set_(model.first.weight.t().contiguous().t())
    return model, list(model.parameters())


def reshaped(model):
    model.first = nn.Linear(1, 9, bias=False)
    return model, list(model.parameters())


def reordered(model):
    one, two = model.first.weight, model.second.weight
    return model, [two, model.first.bias, one, model.second.bias]


def frozen(model):
    model.second.bias.requires_grad_(False)
    return model, list(model.parameters())


def other_buffer(model):
    model.count = model.count.double()
    return model, list(model.parameters())


MISTAKES = {
    doubled: r"parameter 2 \(second.weight\): rank 0: \(3, 3\) float32 on cpu; rank 1: \(3, 3\) f",
    halved: r"parameter 0 \(first.weight\): rank 0: \(3, 3\) float16 on cpu; rank 1: .* bfloat16",
    transposed: r"parameter 0 \(first.weight\): rank 0: .* on cpu; rank 1: .* strides \(1, 3\)",
    reshaped: r"parameter 0 \(first.weight\): rank 0: \(3, 3\) .*; rank 1: \(9, 1\)",
    reordered: r"another order. .* parameter 0: rank 0: first.weight; rank 1: second.weight",
    frozen: r"parameter 3 \(second.bias\): rank 0: .* on cpu; rank 1: .* on cpu frozen",
    other_buffer: r"buffers. .* buffer 0 \(count\): rank 0: .* float32 on cpu; rank 1: .* float64",
}


def made(mistake):
    torch.manual_seed(dist.get_rank())
    model = Two()
    return mistake(model) if dist.get_rank() or mistake is halved else same(model)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_blocks_refuse_what_differs_and_have_changed_nothing(mistake):
    wraps = [
        lambda o: mh.BMUF(o, shared_memory=False),
        lambda o: mh.DiLoCo(o, codec="int8", overlap=2),
    ]

    def wrap(make):
        model, params = made(mistake)
        before = [p.detach().clone() for p in params]
        try:
            make(SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1))
        finally:
            assert all(map(torch.equal, before, params))
            del model

    for make in wraps:
        raises_on_ranks(2, ValueError, wrap, make, match=MISTAKES[mistake])


@pytest.mark.parametrize("mistake", [doubled, halved, reshaped])
@pytest.mark.parametrize("make", [mh.LinearScale, mh.AdaScale, mh.NoiseScale])
def test_rules_and_the_noise_scale_refuse_it_as_well(make, mistake):
    def wrap():
        _, params = made(mistake)
        make(SGD(params, lr=0.1))

    where = MISTAKES[mistake].partition(r" \(")[0]
    raises_on_ranks(2, ValueError, wrap, match=rf"first that differs is {where}: rank|number of")


@on_ranks(2)
def test_what_differs_and_does_no_harm_is_no_error():
    """Strides of a dimension of one element, and names of which those of the other know nothing."""
    rank = dist.get_rank()
    odd = torch.ones(4, 1, 3).as_strided((4, 1, 3), (3, 7 if rank else 3, 1))
    assert odd.is_contiguous()
    one = torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last)
    two = one.as_strided(one.shape, (5 if rank else 48, *one.stride()[1:]))
    workers = RankGroup.of()
    facts = {"parameters": describe_tensors([odd, two])}
    agree(workers, facts, "", names={"parameters": ["a", "b"] if rank else []})
    other = {"parameters": ["a", "b"] if rank else ["module.a", "module.b"]}
    agree(workers, facts, "", names=other)


def test_the_device_counts_by_its_type_and_by_who_shares_it():
    here, nowhere = torch.ones(2), torch.ones(2, device="meta")
    assert describe_tensors([here, nowhere]) == ["(2,) float32 on cpu", "(2,) float32 on meta"]
    sparse = torch.eye(2).to_sparse()
    assert describe_tensors([sparse]) == ["(2, 2) float32 on cpu as sparse_coo"]


@on_ranks(3, raises=ValueError, match="different numbers of buffers: rank 0: 1; ranks 1, 2: 2")
def test_numbers_of_tensors_that_differ():
    tensors = [torch.ones(2)] * (1 + (dist.get_rank() > 0))
    agree(RankGroup.of(), {"buffers": describe_tensors(tensors)}, "")


def test_names_are_those_of_the_model_that_was_wrapped():
    model = Two()
    params = list(model.parameters())
    assert names_in([torch.compile(model, backend="eager")], params) == names_in([model], params)
    assert names_in([model.first, model.second], params)[2:] == ["1.weight", "1.bias"]
    assert names_in([model.first], params) == []

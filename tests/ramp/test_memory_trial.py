"""How large a micro-batch may be is found by trying, and the trial leaves no trace."""

import copy

import pytest
import torch
from torch import nn

import manyhands as mh
from helpers.ranks import raises_on_ranks, run_ranks


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))


def loss(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


class Memory:
    """A loss that needs one byte for each sample, of which there are only so many."""

    def __init__(self, most):
        self.most, self.tried = most, []

    def __call__(self, model, batch):
        self.tried.append(len(batch[0]))
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("no more memory")
        return loss(model, batch)


EXAMPLE = (torch.ones(2, 8), torch.ones(2, 1))


@pytest.mark.quick
@pytest.mark.parametrize("room", [2, 3, 7, 8, 9, 100, 127, 128, 1000])
def test_the_largest_size_that_fits_is_found_to_an_eighth(room):
    memory = Memory(room)
    found = mh.largest_micro_batch(make_model(), memory, EXAMPLE, most=256, memory="1 GiB")
    least = min(room, 256) * 8 / 9
    assert least - 1 < found <= min(room, 256)
    assert len(memory.tried) <= 14


@pytest.mark.quick
def test_what_a_pass_keeps_is_counted_on_a_cpu():
    """Inputs and outputs of the layers: 4 bytes each; the parameters are not the batch's."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Sigmoid(), nn.Linear(64, 1, bias=False))

    def summed(model, batch):
        return model(batch).sum()

    example = torch.randn(2, 16)
    bytes_of_a_sample = 4 * (16 + 64)
    found = mh.largest_micro_batch(model, summed, example, 4096, memory=100 * bytes_of_a_sample)
    assert 88 < found <= 100
    found = mh.largest_micro_batch(
        model, summed, example, 4096, memory="32 KB", reserve=32_000 - 10 * bytes_of_a_sample
    )
    assert found in (9, 10)


@pytest.mark.quick
def test_a_trial_leaves_no_trace():
    model = make_model()
    loss(model, EXAMPLE).backward()
    gradients = [param.grad.clone() for param in model.parameters()]
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()

    def dropped(model, batch):
        return nn.functional.dropout(model(batch[0])).sum()

    mh.largest_micro_batch(model, dropped, EXAMPLE, most=16, memory="1 GiB")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_the_rank_with_the_least_memory_decides():
    def work():
        memory = Memory(40 if torch.distributed.get_rank() else 1000)
        found = mh.largest_micro_batch(make_model(), memory, EXAMPLE, most=256, memory="1 GiB")
        return found, memory.tried

    (first, tried), (second, also_tried) = run_ranks(2, work)
    assert first == second and 35 <= first <= 40
    assert tried == also_tried


@pytest.mark.quick
def test_mistakes_are_errors_that_say_what_to_do():
    model = make_model()
    with pytest.raises(ValueError, match=r'required on a CPU, such as memory="6 GiB"'):
        mh.largest_micro_batch(model, loss, EXAMPLE, most=16)
    with pytest.raises(ValueError, match=r"the example's 2 sample.s. do not fit.*mh.plan"):
        mh.largest_micro_batch(model, Memory(0), EXAMPLE, most=16, memory="1 GiB")
    with pytest.raises(ValueError, match="at least one sample, got 0"):
        mh.largest_micro_batch(model, loss, (torch.ones(0, 8),), most=16, memory="1 GiB")
    with pytest.raises(ValueError, match="at least 2, got 0"):
        mh.largest_micro_batch(model, loss, EXAMPLE, most=0, memory="1 GiB")


def test_a_wrapped_model_is_refused():
    def work():
        wrapped = nn.parallel.DistributedDataParallel(make_model())
        mh.largest_micro_batch(wrapped, loss, EXAMPLE, most=16, memory="1 GiB")

    texts = raises_on_ranks(2, ValueError, work)
    assert all("needs the plain model" in text for text in texts)

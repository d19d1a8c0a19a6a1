"""BMUF's methods, those that fairseq documents and what is behind its options."""

import argparse
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR

import manyhands as mh
from helpers.bmuf import fairseq_bmuf
from helpers.ranks import on_ranks, run_ranks
from manyhands.fairseq import FairseqBMUF, FairseqBMUFConfig

NOW = {"warmup_iterations": 0}


def parameters():
    values = torch.linspace(-1, 1, 20, dtype=torch.float64)
    return [nn.Parameter(part.clone()) for part in (values[:15].view(3, 5), values[15:])]


def flat(params):
    return torch.cat([param.detach().flatten() for param in params])


def put_gradients(params, step=1):
    """Of a bowl whose middle each worker sees elsewhere, and elsewhere at each step."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for param in params:
        at = torch.arange(param.numel(), dtype=param.dtype).view(param.shape)
        param.grad = 0.3 * param.detach() - torch.sin(at * (rank + 1) + step)


def train(steps, options, inner=SGD, wrap=fairseq_bmuf, lr=0.1, **more):
    """The parameters after every step."""
    params = parameters()
    optimizer = wrap(inner(params, lr=lr, **more), **options)
    seen = []
    for step in range(1, steps + 1):
        put_gradients(params, step)
        optimizer.step()
        seen.append(flat(params))
    return torch.stack(seen)


# -- the optimizer inside ------------------------------------------------------------------------


def test_the_optimizer_inside_and_its_options():
    inner = AdamW(parameters(), lr=0.1, betas=(0.8, 0.9))
    optimizer = fairseq_bmuf(inner)
    assert optimizer.optimizer is inner
    config = optimizer.optimizer_config
    assert "params" not in config
    assert (config["lr"], config["betas"], config["weight_decay"]) == (0.1, (0.8, 0.9), 0.01)
    optimizer.set_lr(0.2)
    assert optimizer.optimizer_config["lr"] == 0.2


def test_the_rate_is_that_of_all_groups():
    first, second = parameters()
    optimizer = fairseq_bmuf(SGD([{"params": [first]}, {"params": [second], "lr": 0.3}], lr=0.1))
    assert optimizer.get_lr() == 0.1
    optimizer.set_lr(0.05)
    assert optimizer.get_lr() == 0.05
    assert [group["lr"] for group in optimizer.optimizer.param_groups] == [0.05, 0.05]


def test_a_rate_that_is_a_tensor_stays_one():
    rate = torch.tensor(0.1)
    optimizer = fairseq_bmuf(Adam(parameters(), lr=rate))
    found = optimizer.get_lr()
    assert type(found) is float and found == pytest.approx(0.1)
    inside = optimizer.optimizer.param_groups[0]["lr"]
    optimizer.set_lr(0.05)
    assert optimizer.param_groups[0]["lr"] is inside and inside.item() == pytest.approx(0.05)


def test_a_closure_is_called_once_on_each_worker_and_its_loss_is_returned():
    def blocks():
        params, calls = parameters(), []
        optimizer = fairseq_bmuf(SGD(params, lr=0.1), global_sync_iter=2, **NOW)

        def closure():
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = sum((p * (1 + dist.get_rank())).sum() for p in params)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(2)]
        return losses, calls, flat(params)

    (own, calls, first), (other, _, second) = run_ranks(2, blocks)
    assert calls == [True, True] and torch.equal(first, second)
    assert own == pytest.approx([0.0, -0.1 * 20], abs=1e-12)
    assert other == pytest.approx([0.0, -0.2 * 2 * 20], abs=1e-12)


# -- gradients -----------------------------------------------------------------------------------


def test_gradients_are_multiplied_where_there_are_any():
    first, second = parameters()
    optimizer = fairseq_bmuf(SGD([first, second], lr=0.1))
    first.grad = torch.full_like(first, 3.0)
    optimizer.multiply_grads(0.5)
    assert torch.equal(first.grad, torch.full_like(first, 1.5)) and second.grad is None
    optimizer.zero_grad()
    optimizer.multiply_grads(2.0)  # there are none


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_is_torchs(max_norm):
    params, plain = parameters(), parameters()
    optimizer = fairseq_bmuf(SGD(params, lr=0.1))
    put_gradients(params)
    put_gradients(plain)
    norm = optimizer.clip_grad_norm(max_norm)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(plain, max_norm))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(params, plain, strict=True))


def test_a_norm_of_zero_only_measures():
    params = parameters()
    optimizer = fairseq_bmuf(SGD(params, lr=0.1))
    put_gradients(params)
    before = [param.grad.clone() for param in params]
    norm = optimizer.clip_grad_norm(0)
    assert norm.item() == pytest.approx(torch.cat([g.flatten() for g in before]).norm().item())
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))


def test_clipping_without_gradients_and_with_some():
    first, second = parameters()
    optimizer = fairseq_bmuf(SGD([first, second], lr=0.1))
    assert optimizer.clip_grad_norm(1.0) == 0
    first.grad = torch.full_like(first, 2.0)
    assert optimizer.clip_grad_norm(1.0).item() == pytest.approx(2 * 15**0.5)
    assert first.grad.norm().item() == pytest.approx(1.0, abs=1e-5)


def test_the_norm_of_a_model_in_parts():
    """A model half of which is on each of two workers, clipped as a whole."""

    def clip():
        part = parameters()[0]
        optimizer = fairseq_bmuf(SGD([part], lr=0.1), process_group=alone())
        part.grad = torch.full_like(part, 3.0 + dist.get_rank())

        def whole(norm):
            total = norm**2
            dist.all_reduce(total)
            return total.sqrt()

        return optimizer.clip_grad_norm(1.0, aggregate_norm_fn=whole).item(), part.grad[0, 0].item()

    norm = (15 * (3.0**2 + 4.0**2)) ** 0.5
    for rank, (found, gradient) in enumerate(run_ranks(2, clip)):
        assert found == pytest.approx(norm)
        assert gradient == pytest.approx((3.0 + rank) / norm, rel=1e-5)


def alone():
    """A group in which this worker is by itself."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


# -- counting ------------------------------------------------------------------------------------


def sync_steps(every, begin_at=0, warmup=0, steps=12):
    """The numbers of the steps after which workers agree."""
    params = parameters()
    optimizer = fairseq_bmuf(
        SGD(params, lr=0.1), global_sync_iter=every, warmup_iterations=warmup, block_momentum=0.5
    )
    optimizer.set_num_updates(begin_at)
    synced, before = [], 0
    for _ in range(steps):
        put_gradients(params, optimizer.get_num_updates())
        optimizer.step()
        if optimizer.rounds > before:
            synced.append(optimizer.get_num_updates())
        before = optimizer.rounds
    return synced, optimizer.get_num_updates(), flat(params)


@pytest.mark.parametrize(
    ("every", "begin_at", "warmup", "expected"),
    [
        (4, 0, 0, [4, 8, 12]),
        (4, 6, 0, [8, 12, 16]),
        (4, 8, 0, [12, 16, 20]),
        (5, 103, 0, [105, 110, 115]),
        (4, 0, 5, [8, 12]),
        (4, 2, 8, [12]),
        (4, 9, 5, [12, 16, 20]),
    ],
)
def test_sync_rounds_are_at_multiples_wherever_the_count_begins(every, begin_at, warmup, expected):
    results = run_ranks(2, sync_steps, every, begin_at, warmup)
    for synced, count, _ in results:
        assert synced == expected and count == begin_at + 12
    assert torch.equal(results[0][2], results[1][2]) is (count == expected[-1])


def test_the_count_of_steps():
    params = parameters()
    optimizer = fairseq_bmuf(SGD(params, lr=0.1))
    for _ in range(3):
        put_gradients(params)
        optimizer.step()
    assert optimizer.get_num_updates() == 3
    optimizer.set_num_updates(100)
    assert optimizer.get_num_updates() == 100
    optimizer.step()
    assert optimizer.get_num_updates() == 101


@on_ranks(2, raises=RuntimeError, match="inside a block each worker has its own")
def test_a_count_set_back_into_a_shared_warm_up_leaves_workers_apart(tmp_path):
    """A checkpoint for all of them would hold the parameters of one."""
    params = parameters()
    optimizer = fairseq_bmuf(SGD(params, lr=0.1), warmup_iterations=4, local_warmup=False)
    for step in range(1, 6):
        put_gradients(params, step)
        optimizer.step()
    optimizer.set_num_updates(0)
    put_gradients(params)
    optimizer.step()
    mh.save(tmp_path, model=nn.ParameterList(params), optimizer=optimizer)


GROWING = {"global_sync_iter": 4, "warmup_iterations": 6, "block_momentum": 0.5}


def counted(workers, steps, saved=None):
    """Some steps after what was saved: parameters and state, numbers of steps, and sync rounds."""

    def train():
        params = parameters()
        optimizer = fairseq_bmuf(SGD(params, lr=0.1), **GROWING)
        if saved is not None:
            nn.utils.vector_to_parameters(saved["params"], params)
            optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        begin, synced, before = optimizer.get_num_updates(), [], optimizer.rounds
        for step in range(begin + 1, begin + 1 + steps):
            put_gradients(params, step)
            optimizer.step()
            if optimizer.rounds > before:
                synced.append(step)
            before = optimizer.rounds
        return {
            "params": flat(params),
            "optimizer": optimizer.state_dict(),
            "counts": [begin, optimizer.get_num_updates()],
            "synced": synced,
        }

    return [train()] if workers is None else run_ranks(workers, train)


@pytest.mark.sample("3-None-None", "3-1-2", "3-3-None", "10-None-2", "10-2-None", "10-3-2")
@pytest.mark.parametrize("first", [None, 1, 2])
@pytest.mark.parametrize("then", [None, 1, 2, 3])
@pytest.mark.parametrize("steps", [3, 10])
def test_a_run_that_grows_or_shrinks_keeps_its_count(first, then, steps):
    """Before the end of the warm-up, and after it. (None: without a process group.)"""
    saved = counted(first, steps)[0]
    alone = then in (None, 1)
    for found in counted(then, 12 - steps, saved):
        assert found["counts"] == [steps, 12]
        last = [12] if steps == 10 else [8, 12]
        assert found["synced"] == ([] if alone else last)
    again = counted(None, 1, saved=counted(then, 0, saved)[0])[0]
    assert again["counts"] == [steps, steps + 1]


# -- averaging and warming up --------------------------------------------------------------------


def test_average_params_averages_adams_moments_and_leaves_the_parameters():
    def average():
        params = parameters()
        optimizer = fairseq_bmuf(Adam(params, lr=0.1))
        put_gradients(params)
        optimizer.step()
        own, before = optimizer.state[params[0]]["exp_avg"].clone(), flat(params)
        optimizer.average_params()
        return own, optimizer.state[params[0]]["exp_avg"], before, flat(params)

    (own, mean, before, after), (others, same, *_) = run_ranks(2, average)
    torch.testing.assert_close(mean, (own + others) / 2)
    assert torch.equal(mean, same) and torch.equal(before, after)


def test_fairseqs_methods_are_not_bmufs():
    assert not hasattr(mh.BMUF(SGD(parameters(), lr=0.1)), "average_params")


class OfFairseq:
    """An optimizer of fairseq's: torch's is inside."""

    def __init__(self, optimizer, **attributes):
        self.optimizer = optimizer
        vars(self).update(attributes)


def test_an_optimizer_of_fairseqs_and_the_namespace_of_an_argument_parser():
    parser = argparse.ArgumentParser()
    for name, default in vars(FairseqBMUFConfig(block_momentum=0.5)).items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=default)
    inner = SGD(parameters(), lr=0.1)
    optimizer = FairseqBMUF(parser.parse_args([]), OfFairseq(inner))
    assert optimizer.optimizer is inner and "block_momentum=0.5" in repr(optimizer)
    assert [param.shape for param in optimizer.params] == [(3, 5), (5,)]


@pytest.mark.parametrize("attribute", ["fp16_params", "scaler"])
def test_an_optimizer_of_fairseqs_that_trains_copies_is_refused(attribute):
    inner = OfFairseq(SGD(parameters(), lr=0.1), **{attribute: None})
    with pytest.raises(TypeError, match="trains copies in float32"):
        FairseqBMUF(FairseqBMUFConfig(), inner)


@pytest.mark.parametrize("average_sync", [False, True])
def test_the_end_of_the_warm_up(average_sync):
    """The first worker's parameters are everyone's; the rate is as the scheduler has set it."""

    def steps(wrap):
        params = parameters()
        optimizer = wrap(Adam(params, lr=0.1))
        scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
        for step in range(1, 4):
            put_gradients(params, step)
            optimizer.step()
            if step < 3:
                scheduler.step()
        moments = [optimizer.state[p]["exp_avg"] for p in params if p in optimizer.state]
        return {
            "params": flat(params),
            "moments": flat(moments) if moments else None,
            "lr": optimizer.param_groups[0]["lr"],
        }

    def blocks(optimizer):
        return fairseq_bmuf(optimizer, warmup_iterations=3, average_sync=average_sync)

    alone = run_ranks(2, steps, lambda optimizer: optimizer)
    together = run_ranks(2, steps, blocks)
    mean = (alone[0]["moments"] + alone[1]["moments"]) / 2
    assert not torch.equal(alone[0]["params"], alone[1]["params"])
    for found in together:
        assert torch.equal(found["params"], alone[0]["params"])
        assert found["lr"] == 0.1 * 0.5**2
        if average_sync:
            torch.testing.assert_close(found["moments"], mean, rtol=1e-12, atol=1e-12)
        else:
            assert found["moments"] is None


# -- loading -------------------------------------------------------------------------------------

LOADED = {"global_sync_iter": 4, "warmup_iterations": 2, "block_momentum": 0.5}


@on_ranks(2)
def test_overrides_are_options_of_the_parameter_groups():
    params = parameters()
    optimizer = fairseq_bmuf(SGD(params, lr=0.1, momentum=0.9), **LOADED)
    for step in range(1, 7):
        put_gradients(params, step)
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    changed = fairseq_bmuf(SGD(params, lr=1.0), **LOADED)
    changed.load_state_dict(state, optimizer_overrides={"lr": 0.05})
    same = fairseq_bmuf(SGD(params, lr=1.0), **LOADED)
    same.load_state_dict(state)
    assert [
        (made.get_lr(), made.param_groups[0]["momentum"], made.get_num_updates())
        for made in (changed, same)
    ] == [(0.05, 0.9, 6), (0.1, 0.9, 6)]


def test_the_options_of_now_override_those_that_were_saved():
    """fairseq's way of going on with another rate than that of the checkpoint."""
    state = copy.deepcopy(fairseq_bmuf(AdamW(parameters(), lr=0.1)).state_dict())
    optimizer = fairseq_bmuf(AdamW(parameters(), lr=0.3, weight_decay=0.5))
    now = optimizer.optimizer_config
    optimizer.load_state_dict(state, optimizer_overrides=now)
    assert optimizer.optimizer_config == now and optimizer.get_lr() == 0.3


# -- its options ---------------------------------------------------------------------------------


def test_without_block_momentum_the_rate_of_blocks_is_ignored():
    base = {"global_sync_iter": 3, "block_momentum": 0.0, **NOW}

    def all_of_them():
        return [
            train(9, {**base, **more})
            for more in ({}, {"block_lr": 0.3}, {"block_lr": 0.3, "use_nbm": True})
        ] + [train(9, {"every": 3}, wrap=mh.LocalSGD)]

    for one, *others in run_ranks(2, all_of_them):
        assert all(torch.equal(one, other) for other in others)

"""Gradients of which each worker holds a part: their norm, clipping, and what else acts on them."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks
from helpers.sharding_oracle import (
    AROUND_OSS,
    Lamb,
    assert_same,
    copied,
    everyone,
    loss_of,
    make_batches,
    make_model,
    oss,
    wrap,
)
from manyhands._ranks.presence import RollCall


def after_backward(way=AROUND_OSS[1], kind=AdamW, *, model=make_model, passes=1, **options):
    """A model with gradients, as one of the workers (or, `way` None, alone)."""
    rank, workers = everyone()
    module = model()
    if way is None:
        optimizer = wrapped = None
        workers, used = 3, module
    else:
        optimizer = oss(module.parameters(), kind, lr=0.02, **options)
        used = wrapped = wrap(way, module, [optimizer])
    x, y = make_batches(1, passes, workers, dtype=next(module.parameters()).dtype)
    for a in range(passes):
        mine = (x[0, a].flatten(0, 1), y[0, a].flatten(0, 1)) if way is None else None
        loss_of(used, *(mine or (x[0, a, rank], y[0, a, rank]))).backward()
    return module, optimizer, wrapped


def full_gradients(module):
    """Sharded gradients, put together from all workers' pieces."""
    result = []
    for p in module.parameters():
        if type(p.grad) is torch.Tensor:
            result.append(p.grad.clone())
            continue
        flat = torch.zeros(p.numel(), dtype=p.dtype)
        for piece, start in zip(p.grad.slices, p.grad.starts, strict=True):
            flat[start : start + piece.numel()] += piece
        dist.all_reduce(flat)
        result.append(flat.view(p.shape))
    return result


def matrices(params):
    return [p for p in params if p.dim() == 2]


@pytest.mark.parametrize("kind", [AdamW, Lamb])
def test_the_pieces_of_all_workers_are_the_mean_gradient(kind):
    def run():
        module, _, _ = after_backward(AROUND_OSS[1], kind, passes=2)
        assert [p.grad.shape for p in module.parameters()] == [p.shape for p in module.parameters()]
        return full_gradients(module)

    module, _, _ = after_backward(None, passes=2)
    assert_same(run_ranks(3, run), [p.grad for p in module.parameters()])


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.long)])
def test_clip_grad_norm_is_torchs_on_the_whole_gradient(workers):
    limits = [(0.05, 2), (0.05, 1), (0.01, float("inf")), (0.05, 3.0), (100.0, 2), (0.05, "2")]

    def run():
        result = []
        for way in AROUND_OSS:
            for kind in (AdamW, Lamb):
                for limit, norm_type in limits:
                    for chosen in (None, matrices):
                        module, optimizer, _ = after_backward(way, kind)
                        args = [limit, norm_type] if norm_type != "2" else [limit]
                        options = {"filter_params_fn": chosen} if chosen else {}
                        norm = optimizer.clip_grad_norm(*args, **options)
                        optimizer.step()
                        grads = full_gradients(module)
                        result.append([norm, *grads, *copied(module.parameters())])
        return result

    ranks = run_ranks(workers, run)
    expected = []
    for kind in (AdamW, Lamb) * 2:
        for limit, norm_type in limits:
            for chosen in (None, matrices):
                module = make_model()
                x, y = (t[0, 0].flatten(0, 1) for t in make_batches(1, 1, workers))
                loss_of(module, x, y).backward()
                params = list(module.parameters())
                norm = nn.utils.clip_grad_norm_(
                    chosen(params) if chosen else params, limit, float(norm_type)
                )
                optimizer = kind(params, lr=0.02)
                optimizer.step()
                expected.append([norm, *(p.grad for p in params), *copied(params)])
    for i, one in enumerate(expected):
        assert_same([r[i] for r in ranks], one, f"case {i}")


@on_ranks(2)
def test_clipping_nothing_and_what_has_no_gradient():
    for way in AROUND_OSS:
        module, optimizer, wrapped = after_backward(way)
        before = full_gradients(module)
        norm = optimizer.clip_grad_norm(1e-3, filter_params_fn=lambda params: [])
        assert norm == 0.0
        for p, q in zip(full_gradients(module), before, strict=True):
            assert torch.equal(p, q)
        optimizer.zero_grad()
        if way == AROUND_OSS[0]:  # a sharded module would take part with zeros
            assert optimizer.clip_grad_norm(1.0) == 0.0
        assert wrapped is not None


def test_a_norm_of_bfloat16_gradients_is_taken_in_float32():
    def model():
        return make_model(torch.bfloat16)

    def run():
        module, optimizer, _ = after_backward(model=model)
        grads = [g.float() for g in full_gradients(module)]
        return optimizer.clip_grad_norm(0.1), nn.utils.get_total_norm(grads)

    for norm, expected in run_ranks(2, run):
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm, expected)


@on_ranks(2)
def test_a_gradient_that_is_not_a_number_shows_in_every_workers_norm():
    result = []
    for way in AROUND_OSS:
        for norm_type in (2.0, float("inf")):
            module, optimizer, _ = after_backward(way)
            if way == AROUND_OSS[1]:
                if dist.get_rank() == 1:
                    module[2].weight.grad.slices[0][3] = torch.nan
            else:
                module[2].weight.grad[0, 0] = torch.nan
            result.append(bool(torch.isnan(optimizer.clip_grad_norm(1.0, norm_type))))
    assert result == [True] * 4


def test_torchs_clipping_of_values_works():
    def run():
        module, optimizer, _ = after_backward()
        nn.utils.clip_grad_value_(module.parameters(), 0.01)
        optimizer.step()
        return full_gradients(module) + copied(module.parameters())

    module, _, _ = after_backward(None)
    nn.utils.clip_grad_value_(module.parameters(), 0.01)
    AdamW(module.parameters(), lr=0.02).step()
    grads = [p.grad for p in module.parameters()]
    assert_same(run_ranks(3, run), grads + copied(module.parameters()))


@pytest.mark.sample("1-None", "1-False", "2-False")
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("workers", [1, 2])
def test_torchs_clipping_of_the_norm_works(foreach, workers):
    def run(way=AROUND_OSS[1]):
        results = []
        for limit, norm_type in [(0.05, 2.0), (0.05, 1), (0.01, float("inf")), (100.0, 2.0)]:
            module, optimizer, _ = after_backward(way)
            if way is None:
                x, y = (t[0, 0].flatten(0, 1) for t in make_batches(1, 1, workers))
                module.zero_grad()
                loss_of(module, x, y).backward()
                optimizer = AdamW(module.parameters(), lr=0.02)
            params = module.parameters()
            norm = nn.utils.clip_grad_norm_(params, limit, norm_type, foreach=foreach)
            assert type(norm) is torch.Tensor
            optimizer.step()
            results += [norm, *full_gradients(module), *copied(module.parameters())]
        return results

    assert_same(run_ranks(workers, run), run(None))


@on_ranks(2)
def test_torchs_norm_of_a_part_of_the_parameters_takes_one_collective():
    module, _, _ = after_backward(model=lambda: make_model(torch.bfloat16))
    whole = [g.float() for g in full_gradients(module)][:3]
    calls, real = [], dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *a, **k: (calls.append(1), real(*a, **k))[1])
        norm = nn.utils.get_total_norm([p.grad for p in module.parameters()][:3])
    expected = nn.utils.get_total_norm(whole)
    collectives = len(calls)
    torch.testing.assert_close(norm, expected)
    assert collectives == 1


@on_ranks(2, raises=RuntimeError, match=r"last backward of the step outside no_sync")
def test_torchs_clipping_of_gradients_that_are_not_averaged_is_an_error():
    module, _, wrapped = after_backward()
    x, y = make_batches(1, 1, 2)
    with wrapped.no_sync():
        loss_of(wrapped, x[0, 0, 0], y[0, 0, 0]).backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)


LOCAL = {  # what would silently be about this worker's part
    "norm of rows": lambda g: g.norm(dim=1),
    "sum": lambda g: g.sum(),
    "item": lambda g: g[0, 0].item(),
    "add": lambda g: g + 1,
    "times a tensor": lambda g: g.mul_(torch.ones_like(g.to("meta"), device="cpu")),
    "copy": lambda g: g.copy_(torch.zeros(13, 5)),
    "numpy": lambda g: g.numpy(),
    "print": lambda g: g.tolist(),
    "vector": lambda g: nn.utils.parameters_to_vector([g]),
}


@on_ranks(2)
def test_what_needs_the_whole_gradient_is_an_error():
    module, _, _ = after_backward()
    before = full_gradients(module)
    wrong = []
    for name, act in LOCAL.items():
        try:
            act(module[0].weight.grad)
            wrong.append(name)
        except (RuntimeError, TypeError, NotImplementedError):
            pass
    for p, q in zip(full_gradients(module), before, strict=True):
        assert torch.equal(p, q)
    assert wrong == []


def test_what_acts_on_each_element_acts_on_the_pieces():
    def run():
        module, optimizer, _ = after_backward()
        for p in module.parameters():
            p.grad.mul_(3.0)
            p.grad /= 2
            p.grad.mul_(torch.tensor(0.5))
        torch._foreach_mul_([p.grad for p in module.parameters()], 2.0)
        twin = copy.deepcopy(module[0].weight.grad)
        clone = module[0].weight.grad.clone()
        module[0].weight.grad.zero_()
        assert all((piece == 0).all() for piece in module[0].weight.grad.slices)
        assert any((piece != 0).any() for piece in twin.slices) or not twin.slices
        module[0].weight.grad = clone
        assert "elements here" in repr(clone)
        optimizer.step()
        return full_gradients(module) + copied(module.parameters())

    module, _, _ = after_backward(None)
    for p in module.parameters():
        p.grad.mul_(1.5)
    AdamW(module.parameters(), lr=0.02).step()
    grads = [p.grad for p in module.parameters()]
    assert_same(run_ranks(3, run), grads + copied(module.parameters()))


def test_clipping_between_the_passes_of_a_step_is_the_plain_runs():
    """Accumulation without no_sync, clipped in between, and clipped at the end."""

    def run(make, way):
        rank, _ = everyone()
        module = make_model()
        optimizer = make(module.parameters(), AdamW, lr=0.02)
        used = wrap(way, module, [optimizer]) if way else module
        x, y = make_batches(3, 2, 3)
        for step in range(3):
            optimizer.zero_grad()
            for a in range(2):
                mine = (x[step, a].flatten(0, 1), y[step, a].flatten(0, 1))
                loss_of(used, *((x[step, a, rank], y[step, a, rank]) if way else mine)).backward()
                if way:
                    optimizer.clip_grad_norm(0.1 * (a + 1))
                else:
                    nn.utils.clip_grad_norm_(module.parameters(), 0.1 * (a + 1))
            optimizer.step()
        return copied(module.parameters())

    ranks = run_ranks(3, lambda: run(oss, AROUND_OSS[1]))
    assert_same(ranks, run(lambda p, kind, **o: kind(p, **o), None))


def test_gradients_in_a_hook_of_the_parameter_are_changed_before_they_are_averaged():
    def run():
        rank, _ = everyone()
        module = make_model()
        module[0].weight.register_hook(lambda g: g * 2)
        optimizer = oss(module.parameters(), AdamW, lr=0.02)
        wrapped = mh.ShardedDataParallel(module, optimizer)
        x, y = make_batches(1, 1, 3)
        loss_of(wrapped, x[0, 0, rank], y[0, 0, rank]).backward()
        return full_gradients(module)

    module = make_model()
    module[0].weight.register_hook(lambda g: g * 2)
    loss_of(module, *(t[0, 0].flatten(0, 1) for t in make_batches(1, 1, 3))).backward()
    assert_same(run_ranks(3, run), [p.grad for p in module.parameters()])


CHECKS = {
    "isfinite all": lambda grad: torch.isfinite(grad).all(),
    "isnan any": lambda grad: grad.isnan().any(),
    "isinf any": lambda grad: torch.any(torch.isinf(grad)),
    "no isnan": lambda grad: (~grad.isnan()).all(),
    "neither": lambda grad: not (torch.isnan(grad) | torch.isinf(grad)).any(),
    "large any": lambda grad: (grad.abs() > 1e6).any(),
}


@pytest.mark.parametrize("kind", [AdamW, Lamb])
def test_whether_all_elements_are_finite_is_known_on_every_rank(kind):
    """`value` is the last element of the last gradient, which one rank has."""
    last_values = [1.0, float("nan"), float("inf")]

    def run(value):
        module, _, _ = after_backward(AROUND_OSS[1], kind)
        found = []
        for i, param in enumerate(module.parameters()):
            grad = param.grad
            last = i == 3 and [
                s
                for s, a in zip(grad.slices, grad.starts, strict=True)
                if s.numel() and a + s.numel() == grad.numel()
            ]
            for piece in last or []:
                piece.view(-1)[-1] = value
            found.append([bool(check(grad)) for check in CHECKS.values()])
        return found

    module, _, _ = after_backward(None)
    params = list(module.parameters())
    ranks = run_ranks(3, lambda: [run(value) for value in last_values])
    for value, *found in zip(last_values, *ranks, strict=True):
        params[3].grad.view(-1)[-1] = value
        expected = [[bool(check(param.grad)) for check in CHECKS.values()] for param in params]
        assert found == [expected] * 3, value


@on_ranks(2)
def test_a_check_of_a_gradient_on_one_rank_alone_is_an_error(monkeypatch):
    monkeypatch.setattr(RollCall, "give_up_after", 0.3)
    module, _optimizer, _wrapped = after_backward()
    params = list(module.parameters())
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"\[1\] have not called all\(\) of a "):
            torch.isfinite(params[0].grad).all()
    dist.barrier()
    assert bool(torch.isfinite(params[0].grad).all())

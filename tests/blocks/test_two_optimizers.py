"""Several optimizers of one model, such as Muon for the matrices and AdamW for the rest.

They go into one list, or each into blocks of its own.
"""

import math
import time
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR

import manyhands as mh
from helpers.blocks_plain import gradient, outer_step, train
from helpers.crew_workers import Workers, limit
from helpers.ranks import on_ranks, run_ranks
from manyhands.errors import RanksDisagree

LR, STEPS = 0.1, 17
OUTER = {"lr": 0.7, "momentum": 0.9}
SIZES = (23, 40)  # of the parameters that each optimizer has


def start(size):
    return torch.linspace(-1, 1, size, dtype=torch.float64)


def in_one_list(optimizers, **options):
    return [mh.DiLoCo(optimizers, **options)]


def each_by_itself(optimizers, **options):
    return [mh.DiLoCo(each, **options) for each in optimizers]


def step_both(wrap, **options):
    params = [nn.Parameter(start(size)) for size in SIZES]
    optimizers = wrap([SGD([param], lr=LR) for param in params], **OUTER, **options)
    seen = []
    for step in range(1, STEPS + 1):
        for param in params:
            param.grad = gradient(param.detach(), dist.get_rank(), step)
        for optimizer in optimizers:
            optimizer.step()
        seen.append(torch.cat([param.detach() for param in params]))
    return torch.stack(seen)


@pytest.mark.sample(
    "4-0-1-True-in_one_list",
    "4-2-1-True-in_one_list",
    "4-2-1-False-each_by_itself",
    "6-1-3-False-each_by_itself",
)
@pytest.mark.parametrize("wrap", [in_one_list, each_by_itself])
@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize(("every", "overlap", "fragments"), [(4, 0, 1), (4, 2, 1), (6, 1, 3)])
def test_overlap_and_fragments_equal_the_plain_loop(every, overlap, fragments, shared_memory, wrap):
    lengths = {"every": every, "overlap": overlap, "fragments": fragments}
    results = run_ranks(3, step_both, wrap, **lengths, shared_memory=shared_memory)
    plain = [
        train(start(size), gradient, 3, STEPS, LR, "DiLoCo", OUTER, **lengths) for size in SIZES
    ]
    for rank, ours in enumerate(results):
        expected = torch.cat([each[:, rank] for each in plain], dim=1)
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.symbol, self.hidden = nn.Embedding(11, 8), nn.Linear(8, 16)
        self.out = nn.Linear(16, 11)

    def forward(self, x):
        return self.out(self.hidden(self.symbol(x)).tanh())


def matrices(model):
    return [model.hidden.weight, model.out.weight]


def rest(model):
    return [model.symbol.weight, model.hidden.bias, model.out.bias]


def inner_optimizers(model):
    return [Muon(matrices(model), lr=0.02), AdamW(rest(model), lr=0.02)]


def backward(model, rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    x, y = torch.randint(11, (2, 6), generator=generator)
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


def step_alone(model, optimizers, rank, step):
    backward(model, rank, step)
    for optimizer in optimizers:
        optimizer.step()


def flatten(params):
    return torch.cat([param.detach().flatten() for param in params])


def flat_of(model):
    return flatten(model.parameters())


def learn(steps, wrap, **options):
    model = Model()
    optimizers = wrap(inner_optimizers(model), **OUTER, **options)
    seen = []
    for step in range(1, steps + 1):
        step_alone(model, optimizers, dist.get_rank(), step)
        seen.append(flat_of(model))
    return torch.stack(seen)


def learn_plainly(workers, steps, every):
    """Return each worker's parameters after every step; all in one process."""
    models = [Model() for _ in range(workers)]
    optimizers = [inner_optimizers(model) for model in models]
    anchor, memory = flat_of(models[0]), torch.zeros(len(flat_of(models[0])))
    seen = []
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            step_alone(model, optimizers[rank], rank, step)
        if step % every == 0:
            mean = torch.stack([anchor - flat_of(model) for model in models]).mean(dim=0)
            anchor, memory = outer_step("DiLoCo", OUTER, anchor, mean, memory)
            for model in models:
                nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
        seen.append(torch.stack([flat_of(model) for model in models]))
    return torch.stack(seen)


@pytest.mark.parametrize("wrap", [in_one_list, each_by_itself])
def test_muon_and_adamw_in_blocks_equal_the_plain_loop(wrap):
    results, plain = run_ranks(2, learn, 9, wrap, every=3), learn_plainly(2, 9, 3)
    for rank, ours in enumerate(results):
        torch.testing.assert_close(ours, plain[:, rank], rtol=1e-5, atol=1e-5)


# -- one list: what a step and a sync round are ----------------------------------------------------


def test_alone_a_list_is_bitwise_its_optimizers():
    ours, plain = Model(), Model()
    optimizer, both = mh.DiLoCo(inner_optimizers(ours)), inner_optimizers(plain)
    for step in range(5):
        step_alone(ours, [optimizer], 0, step)
        step_alone(plain, both, 0, step)
    assert torch.equal(flat_of(ours), flat_of(plain))
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.02]
    assert "Muon" in repr(optimizer) and "AdamW" in repr(optimizer)
    assert set(optimizer.state) == set(ours.parameters())


def drift_of(seen):
    return [seen[field] for field in ("distance", "spread", "cosine")]


@pytest.mark.parametrize("state", ["average", "reset"])
def test_the_state_of_all_of_them_is_averaged_or_reset(state):
    """Adagrad has some before its first step, to which it goes back."""

    def states():
        model = Model()
        both = [Muon(matrices(model)), Adagrad(rest(model), initial_accumulator_value=0.5)]
        optimizer = mh.LocalSGD(both, every=3, state=state)
        for step in range(1, 3):
            step_alone(model, [optimizer], dist.get_rank(), step)
        before = [dict(optimizer.state[param]) for param in matrices(model)]
        before = [entries["momentum_buffer"].clone() for entries in before]
        step_alone(model, [optimizer], dist.get_rank(), 3)
        after = [optimizer.state.get(p, {}).get("momentum_buffer") for p in matrices(model)]
        return before, after, [optimizer.state[param]["sum"] for param in rest(model)]

    (first, *ends), (second, *same) = run_ranks(2, states)
    assert not torch.equal(first[0], second[0])
    if state == "reset":
        assert ends[0] == [None, None]
        assert all(bool((each == 0.5).all()) for each in ends[1])
    for ours, theirs in zip([*ends[0], *ends[1]], [*same[0], *same[1]], strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


def test_a_closure_is_evaluated_once_in_the_first_ones_step():
    ours, plain = Model(), Model()
    optimizer, (muon, adamw) = mh.DiLoCo(inner_optimizers(ours)), inner_optimizers(plain)
    calls = []

    def closure():
        calls.append(1)
        return backward(ours, 0, len(calls))

    for step in range(1, 4):
        loss = optimizer.step(closure)
        assert torch.equal(loss, muon.step(lambda step=step: backward(plain, 0, step)))
        adamw.step()
    assert len(calls) == 3
    assert torch.equal(flat_of(ours), flat_of(plain))


def test_a_warmup_with_a_closure_averages_all_gradients():
    def warm():
        model = Model()
        optimizer = mh.LocalSGD(inner_optimizers(model), every=4, warmup=8)
        for step in range(1, 5):
            optimizer.step(lambda step=step: backward(model, dist.get_rank(), step))
        return flat_of(model)

    first, second = run_ranks(2, warm)
    assert torch.equal(first, second)


def of_each(optimizer):
    return [LambdaLR(each, lambda n: 1 / (1 + n)) for each in optimizer.optimizer.optimizers]


def of_all(optimizer):
    return [LambdaLR(optimizer, lambda n: 1 / (1 + n))]


@pytest.mark.parametrize("make_schedulers", [of_each, of_all])
def test_schedulers_scalers_and_hooks_are_as_with_one_optimizer(make_schedulers):
    ours, plain = Model(), Model()
    optimizer, alike = mh.DiLoCo(inner_optimizers(ours)), inner_optimizers(plain)
    schedulers = make_schedulers(optimizer)
    schedulers += [LambdaLR(each, lambda n: 1 / (1 + n)) for each in alike]
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(1, 4):
        backward(ours, 0, step)
        for param in ours.parameters():
            scaler.scale(param.grad)  # what it returns for a loss
            param.grad *= 1024.0
        if step == 2:  # it overflows, so the step is left out
            ours.out.bias.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update(1024.0)
        step_alone(plain, alike if step != 2 else [], 0, step)
        for scheduler in schedulers:
            scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.02 / 4] * 2
    torch.testing.assert_close(flat_of(ours), flat_of(plain))
    assert calls == ["before", "after"] * 2


def test_a_list_has_what_trainers_set_and_hook():
    model = Model()
    inner = inner_optimizers(model)
    optimizer = mh.DiLoCo(inner)
    weight = next(p for p in inner[0].param_groups[0]["params"])
    assert weight not in optimizer.state and optimizer.state[weight] == {}  # as a plain optimizer's
    backward(model, 0, 1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert float(weight.grad.abs().max()) == 0.0
    kept = dict(optimizer.state)
    optimizer.state = defaultdict(dict)
    assert not inner[0].state and not inner[1].state
    optimizer.state = kept
    assert inner[0].state[weight] is kept[weight]
    assert [len(each.state) for each in inner] == [2, len(kept) - 2]
    optimizer.param_groups = [{**group, "lr": 0.5} for group in optimizer.param_groups]
    assert [each.param_groups[0]["lr"] for each in inner] == [0.5, 0.5]
    with pytest.raises(ValueError, match=r"expected 2 parameter groups, in the order of .*, got 1"):
        optimizer.param_groups = optimizer.param_groups[:1]


# -- one list: saved, and continued ----------------------------------------------------------------


def test_a_checkpoint_is_continued_bitwise_and_knows_the_drift(tmp_path):
    def learn_on(begin, end):
        model = Model()
        optimizer = mh.DiLoCo(inner_optimizers(model), every=3, **OUTER)
        if begin:
            mh.load(tmp_path / str(begin), model=model, optimizer=optimizer)
        drift = drift_of(optimizer.snapshot())
        for step in range(begin + 1, end + 1):
            step_alone(model, [optimizer], dist.get_rank(), step)
            if step == 6:
                mh.save(tmp_path / "6", model=model, optimizer=optimizer)
                drift = drift_of(optimizer.snapshot())
        return flat_of(model), drift

    whole = run_ranks(2, learn_on, 0, 11)
    for (ours, drift), (again, same) in zip(whole, run_ranks(2, learn_on, 6, 11), strict=True):
        assert torch.equal(ours, again)
        assert drift == same
    with pytest.raises(ValueError, match=r"has the state of Muon and AdamW, but the .* is AdamW"):
        mh.load(
            tmp_path / "6", model=(model := Model()), optimizer=mh.DiLoCo(AdamW(model.parameters()))
        )


def test_a_state_of_other_optimizers_is_refused_and_changes_nothing():
    model = Model()
    one = mh.DiLoCo(AdamW(model.parameters()))
    both, turned = mh.DiLoCo(inner_optimizers(model)), mh.DiLoCo(inner_optimizers(model)[::-1])
    step_alone(model, [both], 0, 1)
    before = {param: dict(entries) for param, entries in both.state.items()}
    for optimizer, state, message in (
        (both, one.state_dict(), "is from one optimizer, but the optimizer here is"),
        (both, AdamW(model.parameters()).state_dict(), "from one optimizer"),
        (one, both.state_dict(), r"from Muon \(.*: \[2\]\) and AdamW \(parameters: \[3\]\)"),
        (both, turned.state_dict(), "from AdamW .* and Muon .*, but the optimizer here is Muon"),
        (both, {**both.state_dict(), "several": 3}, "entry 'several' is invalid"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
    assert {param: dict(entries) for param, entries in both.state.items()} == before


def test_a_list_of_one_is_that_optimizer():
    model = Model()
    adamw = AdamW(model.parameters())
    optimizer = mh.DiLoCo([adamw])
    assert optimizer.optimizer is adamw
    mh.DiLoCo(AdamW(model.parameters())).load_state_dict(optimizer.state_dict())


# -- one list: in a crew ---------------------------------------------------------------------------


class Learners(Workers):
    """Workers of a crew with Muon and AdamW: `train` of this file instead of the module's."""

    def work(self, make_crew, log, steps=None, turned=False, **options):
        learn_in_crew(make_crew(), log, limit(self.folder, steps), turned=turned, **options)


def learn_in_crew(crew, log, steps, turned, **options):
    model = Model()
    optimizers = inner_optimizers(model)
    optimizer = mh.DiLoCo(
        optimizers[::-1] if turned else optimizers, crew=crew, model=model, **OUTER, **options
    )
    log("in", steps=optimizer.steps)
    while optimizer.steps < steps():
        step_alone(model, [optimizer], crew.number, optimizer.steps + 1)
        if crew.size == 1:  # slow: until others come
            time.sleep(0.02)
        log("step", steps=optimizer.steps, size=crew.size)
    optimizer.finish()
    seen = optimizer.snapshot()
    log("done", values=flat_of(model).tolist(), drift=drift_of(seen), dropped=seen["dropped"])


def test_in_a_crew_muon_and_adamw_equal_the_plain_loop(store, tmp_path):
    with Learners(store, tmp_path, expected=2, stall=5.0) as workers:
        workers.start([0, 1], steps=9, every=3)
        workers.finish(60.0)
        done = [workers.events(number, "done")[-1] for number in range(2)]
    plain = learn_plainly(2, 9, 3)[-1, 0]
    for event in done:
        ours = torch.tensor(event["values"])
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
        assert event["drift"] == done[0]["drift"]


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_joiner_has_what_the_others_have_of_all_optimizers(overlap, store, tmp_path):
    with Learners(store, tmp_path, expected=2, stall=5.0) as workers:
        workers.start([0, 1], every=3, overlap=overlap)
        workers.until(lambda: (workers.last(0, "step", "steps") or 0) > 20)
        workers.kill(1, report=True)
        workers.until(lambda: workers.last(0, "step", "size") == 1)
        workers.start([1, 2], every=3, overlap=overlap)
        workers.until(lambda: workers.last(0, "step", "size") == 3)
        workers.finish_together(10, 60.0)
        assert workers.events(2, "in")[-1]["steps"] > 20
        done = [workers.events(number, "done")[-1] for number in range(3)]
    for event in done:
        assert event["values"] == done[0]["values"]
        assert event["drift"] == done[0]["drift"]
        assert event["drift"][0] != event["drift"][1]


def test_a_worker_with_the_optimizers_in_another_order_is_not_let_in(store, tmp_path):
    with Learners(store, tmp_path, expected=2, stall=5.0) as workers:
        workers.start([0], every=3)
        workers.until(lambda: workers.shared.refresh().waiting != ())
        workers.start([1], every=3, turned=True)
        workers.until(lambda: workers.ended() == {1: 1})
        assert "optimizers: AdamW (parameters: [3]) and Muon" in workers.errors(1)


def test_a_second_optimizer_is_refused_by_a_crew_with_the_way_out():
    crew = mh.Crew()
    muon, adamw = inner_optimizers(Model())
    first = mh.DiLoCo(muon, every=4, crew=crew)
    with pytest.raises(RuntimeError, match=r"single list: mh.DiLoCo\(\[muon, adamw\], crew=crew"):
        mh.DiLoCo(adamw, every=4, crew=crew)
    first.finish()


# -- one list: what is refused ---------------------------------------------------------------------


def test_what_cannot_be_in_a_list_is_refused():
    model = Model()
    muon, adamw = inner_optimizers(model)
    for given, kind, message in (
        ([], ValueError, "DiLoCo got an empty list"),
        ([muon, "adamw"], TypeError, "wraps an optimizer, or a list of them, got str"),
        ([muon, mh.DiLoCo(adamw)], TypeError, "in blocks already"),
        ([muon, mh.AdaScale(adamw, world_size=1)], TypeError, "plain .* got AdaScale in the list"),
        ([muon, mh.OSS(rest(model), optim=SGD, lr=0.1)], TypeError, "plain .* got OSS in the list"),
        ([muon, LBFGS(rest(model))], TypeError, "LBFGS needs several evaluations"),
        ([muon, AdamW(model.parameters())], ValueError, "is in optimizers 0 and 1 of"),
    ):
        with pytest.raises(kind, match=message):
            mh.DiLoCo(given)
    with pytest.raises(RuntimeError, match=r"any of the optimizers \(Muon, AdamW\)"):
        mh.DiLoCo([muon, adamw]).add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@on_ranks(2)
def test_ranks_with_other_lists_are_refused_on_all_of_them():
    model = Model()
    both = inner_optimizers(model)
    with pytest.raises(RanksDisagree, match="optimizers"):
        mh.DiLoCo(both if dist.get_rank() else both[::-1])


def test_a_plan_knows_the_optimizers_of_a_list():
    model = Model()
    plain = mh.plan(model, inner_optimizers(model), workers=4, backend="gloo")
    blocks = mh.plan(model, mh.DiLoCo(inner_optimizers(model)), workers=4, backend="gloo")
    assert blocks.optimizer == plain.optimizer == "Muon and AdamW"

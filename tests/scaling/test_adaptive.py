"""adaptdl's usage: a rule made first, the data-parallel module counts the passes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import manyhands as mh
from helpers import scaling_oracle
from helpers.ranks import on_ranks, run_ranks
from helpers.scaling_oracle import (
    OPTIMIZERS,
    PlainRun,
    loss_of,
    make_batches,
    make_model,
    two_groups,
)
from manyhands import adaptdl


def train(kind, inner, passes, call, scale=None):
    """Losses are not divided; `passes[step]` of them may differ from step to step."""
    ranked = dist.is_initialized()
    rank = dist.get_rank() if ranked else 0
    model = make_model(torch.float64)
    optimizer = OPTIMIZERS[inner](two_groups(model))
    rule = getattr(mh, kind)(**({"smoothing": 0.9}))
    adp = adaptdl.AdaptiveDataParallel(model, optimizer, scaling_rule=rule, scale=scale)
    schedule = ExponentialLR(optimizer, 1.0)
    workers = dist.get_world_size() if ranked else 1
    x, y = make_batches(len(passes), workers * max(passes), dtype=torch.float64)
    gains, factors, scales = [], [], []
    for step, count in enumerate(passes):
        (optimizer if call == "optimizer" else rule).zero_grad()
        for a in range(count):
            i = rank * count + a
            with adp.no_sync() if a < count - 1 else torch.enable_grad():
                loss_of(adp, x[step, i], y[step, i]).backward()
        gains.append(adp.gain)
        scales.append(rule.scale)
        (optimizer if call == "optimizer" else rule).step()
        factors.append(list(rule.factors))
        schedule.step()
    params = [p.detach() for p in model.parameters()]
    return {"params": params, "gains": gains, "scales": scales, "progress": rule.progress}


@pytest.mark.sample(
    "AdaScale-SGD momentum-adascale-1-rule",
    "AdaScale-SGD momentum-adascale-2-rule",
    "AdamScale-AdamW-adamscale-1-rule",
    "AdamScale-AdamW-adamscale-2-optimizer",
    "LinearScale-SGD-linear-1-optimizer",
    "LinearScale-SGD-linear-2-optimizer",
)
@pytest.mark.parametrize("call", ["rule", "optimizer"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("kind", "inner", "factor"),
    [
        ("AdaScale", "SGD momentum", scaling_oracle.adascale),
        ("AdamScale", "AdamW", scaling_oracle.adamscale),
        ("LinearScale", "SGD", scaling_oracle.linear),
    ],
)
def test_training_is_the_plain_run_with_passes_counted(kind, inner, factor, workers, call):
    passes = [2, 3, 1 if workers > 1 else 2, 4, 2, 2, 3]
    arguments = (kind, inner, passes, call)
    ours = run_ranks(workers, train, *arguments) if workers > 1 else [train(*arguments)]
    model = make_model(torch.float64)
    oracle = PlainRun(
        model,
        OPTIMIZERS[inner](two_groups(model)),
        factor,
        preconditioned=kind == "AdamScale",
        mix_norm_kinds=True,
        smoothing=0.9,
    )
    x, y = make_batches(len(passes), workers * max(passes), dtype=torch.float64)
    for step, count in enumerate(passes):
        oracle.step(x[step, : workers * count], y[step, : workers * count])
    near = 2e-5 if kind == "AdamScale" else 1e-9
    for mine in ours:
        assert mine["scales"] == [workers * count for count in passes]
        assert mine["gains"] == pytest.approx(oracle.gains, rel=near)
        assert mine["progress"] == pytest.approx(oracle.progress, rel=near)
        for p, q in zip(mine["params"], model.parameters(), strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=near, atol=near)


def test_several_synchronised_passes_accumulate_as_well():
    """Without no_sync nobody knows which pass is the last: the mean is kept after each."""
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = mh.AdaScale()
    adp = adaptdl.AdaptiveDataParallel(model, optimizer, scaling_rule=rule)
    x, y = make_batches(1, 3, dtype=torch.float64)
    for a in range(3):
        loss_of(adp, x[0, a], y[0, a]).backward()
    loss = sum(loss_of(model, x[0, a], y[0, a]) for a in range(3)) / 3
    mean = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close([p.grad for p in model.parameters()], list(mean))
    assert rule.scale == 3.0
    rule.step()
    assert rule.progress == pytest.approx(rule.gain())


@pytest.mark.parametrize(
    ("inner", "kind"),
    [("SGD", mh.AdaScale), ("AdamW", mh.AdamScale), ("RMSprop", mh.AdamScale)],
)
def test_the_default_rule_goes_by_the_optimizer(inner, kind):
    model = make_model()
    optimizer = getattr(torch.optim, inner)(model.parameters(), lr=0.1)
    assert type(adaptdl.AdaptiveDataParallel(model, optimizer).scaling_rule) is kind


def test_names_buffers_and_attributes_are_data_parallels():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    adp = adaptdl.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert set(adp.state_dict()) == {f"module.{name}" for name in model.state_dict()}
    assert adp.module is model
    assert not adp.eval().module.training


def test_the_statistics_have_adaptdls_names():
    model, rule = make_model(), mh.AdaScale()
    sgd = torch.optim.SGD(two_groups(model), lr=0.1)
    adp = adaptdl.AdaptiveDataParallel(model, sgd, scaling_rule=rule)
    adp.gns.set_accum_scale(2.0)
    passes_of(adp, 2)
    assert (adp.gns.accum_scale, adp.gns.accum_count, rule.scale) == (2.0, 2, 4.0)
    assert adp.gns.gain(4.0) == adp.gain == rule.gain()
    assert len(adp.gns.raw_sqr_avg) == len(adp.gns.raw_var_avg) == 2
    rule.step()
    assert adp.gns.get_progress() == rule.progress
    adp.gns.set_progress(7.0)
    assert rule.progress == 7.0
    written = []

    class Writer:
        def add_scalar(self, tag, value, step):
            written.append((tag, step))

    adp.to_tensorboard(Writer(), 3, tag_prefix="noise")
    assert ("noise/Gain", 3) in written
    assert len(written) == 4


@on_ranks(2)
def test_a_rule_may_be_bound_to_torchs_own_data_parallel():
    model = make_model()
    ddp = nn.parallel.DistributedDataParallel(model)
    rule = mh.AdaScale()
    rule.initialize(ddp, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = make_batches(1, 4)
    rank = dist.get_rank()
    with ddp.no_sync():
        loss_of(ddp, x[0, 2 * rank], y[0, 2 * rank]).backward()
    loss_of(ddp, x[0, 2 * rank + 1], y[0, 2 * rank + 1]).backward()
    rule.step()
    assert rule.scale == 4.0


def test_zero_grad_and_unhook():
    rule = mh.AdaScale()
    adp = adaptive(rule)
    optimizer, step = rule.optimizer, torch.optim.SGD.step
    passes_of(adp, 1)
    adp.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in adp.parameters())
    adp.zero_grad()
    assert all(p.grad is None for p in adp.parameters())
    with pytest.raises(RuntimeError, match="without a backward"):
        rule.step()
    assert "step" in vars(optimizer)
    rule.unhook()
    assert "step" not in vars(optimizer) and type(optimizer).step is step
    passes_of(adp, 1)
    optimizer.step()  # the bare optimizer's again


def adaptive(rule=None, inner=None, **options):
    model = make_model()
    optimizer = inner or torch.optim.SGD(model.parameters(), lr=0.1)
    return adaptdl.AdaptiveDataParallel(model, optimizer, scaling_rule=rule, **options)


def passes_of(adp, number):
    x, y = make_batches(1, number)
    for a in range(number):
        with adp.no_sync() if a < number - 1 else torch.enable_grad():
            loss_of(adp, x[0, a], y[0, a]).backward()


def test_a_pass_may_be_less_than_a_small_batch_where_the_whole_batch_is_one():
    adp = adaptive(mh.AdaScale())
    adp.gns.set_accum_scale(0.5)
    passes_of(adp, 4)
    assert adp.gain >= 1.0
    adp.scaling_rule.step()
    assert (adp.scaling_rule.scale, adp.gns.accum_scale) == (2.0, 0.5)
    adp.zero_grad()
    weights = [p.detach().clone() for p in adp.parameters()]
    passes_of(adp, 1)
    with pytest.raises(ValueError, match=r"scale must be a finite number at least 1, got 0\.5"):
        adp.scaling_rule.step()
    assert all(torch.equal(p, q) for p, q in zip(adp.parameters(), weights, strict=True))
    adp.zero_grad()
    passes_of(adp, 2)  # it goes on
    adp.scaling_rule.step()
    with pytest.raises(ValueError, match="above 0"):
        adp.gns.set_accum_scale(0.0)
    declared = mh.AdaScale(
        torch.optim.SGD(make_model().parameters(), lr=0.1), num_gradients_to_accumulate=2
    )
    declared.set_scale_per_pass(0.5)
    assert declared.scale == 1.0
    with pytest.raises(ValueError, match=r"got 0\.5"):
        declared.set_scale_per_pass(0.25)
    with pytest.raises(ValueError, match=r"got 0\.5"):
        declared.set_num_gradients_to_accumulate(1)
    assert declared.scale == 1.0


@on_ranks(2, raises=ValueError, match=r"number at least 1, got 0\.5")
def test_a_step_below_the_smallest_scale_is_an_error_on_every_rank():
    adp = adaptive(mh.AdaScale())
    adp.gns.set_accum_scale(0.5)
    passes_of(adp, 1)
    adp.scaling_rule.step()


@pytest.mark.parametrize("ranks", [0, 1])
def test_a_misspelled_keyword_is_an_error_that_names_it(ranks):
    def run():
        with pytest.raises(TypeError, match="unexpected keyword argument 'scaling_rul'"):
            adaptive(scaling_rul=mh.AdaScale())
        with pytest.raises(TypeError, match=r"'gradients_as_view'"):
            adaptive(gradients_as_view=True)
        with pytest.raises(TypeError, match=r"'module'"):
            adaptive(module=make_model())
        adaptive(find_unused_parameters=True, bucket_cap_mb=1)

    run_ranks(ranks, run) if ranks else run()


def test_arguments_are_in_adaptdls_order():
    """(model, optimizer, lr_scheduler, mp_scaler, scaling_rule, name), as in 0.2.11."""
    scaler, rule = torch.amp.GradScaler("cpu"), mh.LinearScale()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = ExponentialLR(optimizer, 0.9)
    adp = adaptdl.AdaptiveDataParallel(model, optimizer, schedule, scaler, rule, "mine")
    assert (adp.lr_scheduler, adp.scaling_rule, adp.name) == (schedule, rule, "mine")
    assert rule._core.loss_scale.scaler is scaler
    with pytest.raises(TypeError, match="scaling_rule must be a scaling rule"):
        adaptdl.AdaptiveDataParallel(model, optimizer, scaling_rule="AdaScale")


def adaptive_run(steps, load=None, save_at=None):
    """adaptdl's way: the optimizer is what is stepped, saved and loaded."""
    model = make_model(torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    adp = adaptdl.AdaptiveDataParallel(model, optimizer)
    start = 0
    if load is not None:
        model.load_state_dict(load["model"])
        optimizer.load_state_dict(load["optimizer"])
        start = load["step"]
    x, y = make_batches(steps, 2, dtype=torch.float64)
    for step in range(start, steps):
        if step == save_at:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            return {**state, "step": step}
        optimizer.zero_grad()
        for a in range(2):
            with adp.no_sync() if a == 0 else torch.enable_grad():
                loss_of(adp, x[step, a], y[step, a]).backward()
        optimizer.step()
    return adp


def test_the_patched_optimizers_state_dict_has_statistics_and_progress(tmp_path):
    whole = adaptive_run(12)
    torch.save(adaptive_run(12, save_at=7), tmp_path / "state")
    again = adaptive_run(12, load=torch.load(tmp_path / "state", weights_only=True))
    assert again.scaling_rule.progress == whole.scaling_rule.progress > 12.0
    assert again.scaling_rule.noise == whole.scaling_rule.noise
    for p, q in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_bare_state_dict_leaves_the_patched_optimizers_statistics_alone():
    adp = adaptive_run(7)
    optimizer, progress = adp.scaling_rule.optimizer, adp.scaling_rule.progress
    bare = {k: v for k, v in optimizer.state_dict().items() if k != "manyhands"}
    other = adaptive_run(0)
    other.scaling_rule.optimizer.load_state_dict(bare)
    assert (other.scaling_rule.progress, len(other.scaling_rule.state)) == (0.0, 4)
    optimizer.load_state_dict(bare)
    assert adp.scaling_rule.progress == progress
    adp.scaling_rule.unhook()
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
    assert not {"state_dict", "load_state_dict"} & set(vars(optimizer))


@on_ranks(2)
def test_the_state_dict_of_a_sharded_optimizer_takes_its_arguments():
    model = make_model()
    optimizer = mh.OSS(model.parameters(), torch.optim.Adam)
    adp = adaptdl.AdaptiveDataParallel(model, optimizer)
    passes_of(adp, 1)
    optimizer.step()
    state = optimizer.state_dict(all_ranks=True)
    assert len(state["state"]) == 4
    assert state["manyhands"]["progress"] == adp.scaling_rule.progress


# -- LEGW without a batch size ---------------------------------------------------------------------


def train_legw(first_sizes, later_sizes):
    """Steps of LEGWScale on batches of a size of each rank's own."""
    rank = dist.get_rank()
    model = make_model(torch.float64)
    rule = mh.LEGWScale(2, 24)
    adp = adaptdl.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), rule)
    seen = []
    for step, sizes in enumerate([first_sizes, *later_sizes]):
        x, y = make_batches(1, 1, size=sizes[rank], dtype=torch.float64, seed=10 * step + rank)
        rule.zero_grad()
        loss_of(adp, x[0, 0], y[0, 0]).backward()
        rule.step()
        seen.append((rule.batch_size, list(rule.factors)))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"seen": seen, "weights": weights}


def test_legw_finds_the_baselines_batch_in_the_first_step_and_ranks_agree_on_it():
    """15 samples on two ranks are two small batches of 7.5, also after a partial batch."""
    one, other = run_ranks(2, train_legw, [8, 7], [[8, 7], [3, 1], [8, 8]])
    assert [size for size, _ in one["seen"]] == [7.5] * 4
    assert one["seen"] == other["seen"]
    assert torch.equal(one["weights"], other["weights"])


def test_legw_before_its_batch_is_known():
    rule = mh.LEGWScale(2, 24)
    for ask in (lambda: rule.batch_size, lambda: rule.scale_lr(4.0)):
        with pytest.raises(RuntimeError, match="unknown before the first step"):
            ask()
    assert mh.LEGWScale(2, 24, batch_size=3).scale_lr(4.0) == 0.0


def test_a_rule_may_take_the_place_of_the_schedule():
    model = make_model()
    rule = mh.AdaScale()
    adp = adaptdl.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), rule)
    assert adp.scaling_rule is rule and adp.lr_scheduler is None
    with pytest.raises(TypeError, match="mp_scaler must be a GradScaler, got AdaScale"):
        adaptive(lr_scheduler=None, mp_scaler=mh.AdaScale())

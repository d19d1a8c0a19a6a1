"""Mistakes that people make: each gets an error that says what to do, on every worker."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks
from helpers.scaling_oracle import loss_of, make_batches, make_model, two_groups
from manyhands import adaptdl
from manyhands.errors import RanksDisagree
from manyhands.scaling import ScalingRuleBase


def sgd(model=None, lr=0.1):
    return torch.optim.SGD((model or make_model()).parameters(), lr=lr)


def backward(model, a=0, weight=1.0):
    x, y = make_batches(1, 4)
    (loss_of(model, x[0, a], y[0, a]) * weight).backward()


# -- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.5, 0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_makes_no_sense(scale):
    with pytest.raises(ValueError, match="scale must be a finite number at least 1"):
        mh.AdaScale(sgd(), scale=scale)
    optimizer = mh.AdaScale(sgd(), scale=2.0)
    with pytest.raises(ValueError, match="scale must be a finite"):
        optimizer.set_scale(scale)
    assert optimizer.scale == 2.0


def test_a_smaller_batch_makes_sense_for_the_rules_that_need_no_noise():
    assert mh.LinearScale(sgd(), scale=0.5).scale == 0.5
    with pytest.raises(ValueError, match="above 0"):
        mh.LinearScale(sgd(), scale=0.0)


@pytest.mark.parametrize("passes", [0, -1, 1.5, True, None])
def test_a_number_of_passes_that_makes_no_sense(passes):
    with pytest.raises(ValueError, match="num_gradients_to_accumulate must be a whole number"):
        mh.AdaScale(sgd(), num_gradients_to_accumulate=passes)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, 2.0])
def test_a_smoothing_that_makes_no_sense(smoothing):
    with pytest.raises(
        ValueError, match="smoothing must be a finite number at least 0 and below 1"
    ):
        mh.AdaScale(sgd(), smoothing=smoothing)


def test_a_world_size_without_a_process_group():
    with pytest.raises(ValueError, match=r"there is no process group. Call manyhands.start\(\)"):
        mh.AdaScale(sgd(), world_size=4)


def test_an_argument_that_is_no_optimizer():
    with pytest.raises(TypeError, match=r"wraps a torch.optim.Optimizer, got generator"):
        mh.AdaScale(make_model().parameters())


def test_a_rule_that_is_used_before_it_has_an_optimizer():
    rule = mh.AdaScale()
    for use in (rule.step, rule.zero_grad, rule.state_dict, lambda: rule.param_groups, rule.gain):
        with pytest.raises(RuntimeError, match=r"has no optimizer yet. Pass it"):
            use()
    assert isinstance(rule, torch.optim.Optimizer)


def test_wrapping_twice():
    inner = sgd()
    optimizer = mh.AdaScale(inner)
    with pytest.raises(TypeError, match="AdaScale wraps already"):
        mh.LinearScale(optimizer)
    with pytest.raises(RuntimeError, match="is wrapped by a AdaScale already"):
        mh.LinearScale(inner)
    optimizer.unhook()
    mh.LinearScale(inner)  # the way out


def test_a_rule_is_bound_once():
    rule = mh.AdaScale()
    rule.initialize(None, sgd())
    with pytest.raises(RuntimeError, match="bound to an optimizer already"):
        rule.initialize(None, sgd())


def test_adamscale_around_an_unsupported_optimizer():
    with pytest.raises(TypeError, match="AdamScale is for Adam, AdamW and RMSprop"):
        mh.AdamScale(sgd())
    with pytest.raises(TypeError, match="rescale_adam=True requires an optimizer with betas"):
        mh.SqrtScale(sgd(), rescale_adam=True)
    with pytest.raises(ValueError, match="rescale_adam must be True or False, got 'no'"):
        mh.SqrtScale(sgd(), rescale_adam="no")


def test_a_square_root_rule_that_would_need_a_negative_beta():
    adam = torch.optim.Adam(make_model().parameters(), betas=(0.9, 0.999))
    with pytest.raises(ValueError, match=r"at beta=0.9 the scale must be below 10, got 16"):
        mh.SqrtScale(adam, scale=16.0, rescale_adam=True)
    optimizer = mh.SqrtScale(adam, scale=4.0, rescale_adam=True)
    with pytest.raises(ValueError, match="the scale must be below"):
        optimizer.set_scale(16.0)
    assert optimizer.scale == 4.0


def test_legw_without_a_batch_size():
    with pytest.raises(ValueError, match="base_warmup_epochs must be a finite number"):
        mh.LEGWScale(sgd(), 1000, batch_size=4)
    with pytest.raises(ValueError, match="requires the baseline's batch size"):
        mh.LEGWScale(1, 1000, sgd(), num_gradients_to_accumulate=2)


def test_a_rule_of_ones_own_that_returns_nonsense():
    class Wrong(ScalingRuleBase):
        def scale_lr(self, scale):
            return [1.0, 2.0, 3.0]

    model = make_model()
    optimizer = Wrong(sgd(model))
    backward(model)
    with pytest.raises(ValueError, match=r"one for each of the 1 parameter groups"):
        optimizer.step()
    with pytest.raises(NotImplementedError, match="must define scale_lr"):
        ScalingRuleBase(sgd()).scale_lr(2.0)


# -- the order of calls ------------------------------------------------------------------------


def test_a_step_without_a_backward():
    model = make_model()
    optimizer = mh.AdaScale(sgd(model))
    with pytest.raises(RuntimeError, match=r"step\(\) without a backward\(\)"):
        optimizer.step()
    backward(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"step\(\) without a backward\(\)"):
        optimizer.step()
    assert optimizer.snapshot()["step"] == 1


def test_too_few_and_too_many_backward_passes():
    model = make_model()
    optimizer = mh.AdaScale(sgd(model), num_gradients_to_accumulate=3)
    backward(model)
    backward(model)
    with pytest.raises(RuntimeError, match=r"step\(\) after 2 of 3 backward passes"):
        optimizer.step()
    optimizer.zero_grad()
    for _ in range(3):
        backward(model)
    with pytest.raises(RuntimeError, match=r"backward pass 4 since the last step.*one_sample"):
        backward(model)
    optimizer.zero_grad()
    for _ in range(3):
        backward(model)
    optimizer.step()


def test_changes_in_the_middle_of_a_step():
    model = make_model()
    optimizer = mh.AdaScale(sgd(model), num_gradients_to_accumulate=3)
    state = optimizer.state_dict()
    backward(model)
    for change in (
        lambda: optimizer.set_num_gradients_to_accumulate(2),
        lambda: optimizer.set_scale(4.0),
        lambda: optimizer.load_state_dict(state),
        lambda: optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]}),
    ):
        with pytest.raises(RuntimeError, match=r"in the middle of a step, after 1 of its"):
            change()
    assert optimizer.state_dict() == state  # that of before the step
    model.zero_grad()  # seen, although nobody told the optimizer
    optimizer.set_num_gradients_to_accumulate(2)
    assert optimizer.scale == 2.0


def test_gradients_that_are_never_cleared():
    model = make_model()
    optimizer = mh.AdaScale(sgd(model))
    backward(model)
    optimizer.step()
    backward(model)
    with pytest.raises(RuntimeError, match=r"not cleared.*Call zero_grad\(\) after every step"):
        optimizer.step()


def test_a_step_from_within_backward():
    model = make_model()
    optimizer = mh.AdaScale(sgd(model))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    with pytest.raises(RuntimeError, match=r"while backward\(\) is running"):
        backward(model)


def test_parameters_that_were_moved_or_converted_after_wrapping():
    model = make_model()
    optimizer = mh.AdaScale(sgd(model))
    model.double()
    x, y = make_batches(1, 1, dtype=torch.float64)
    loss_of(model, x[0, 0], y[0, 0]).backward()
    with pytest.raises(RuntimeError, match="wrap the optimizer afterwards"):
        optimizer.step()


@pytest.mark.parametrize("kind", [mh.AdaScale, mh.NoiseScale])
def test_an_optimizer_without_parameters(kind):
    inner = torch.optim.SGD([{"params": []}, {"params": list(make_model().parameters())}], lr=0.1)
    assert len(mh.AdaScale(inner).factors) == 2  # an empty group is fine
    with pytest.raises(ValueError, match="no parameters: every group is empty"):
        kind(torch.optim.SGD([{"params": []}], lr=0.1))


def test_unscaled_losses_that_are_never_divided():
    model = make_model()
    optimizer = mh.AdaScale(sgd(model), num_gradients_to_accumulate=2, is_scaled_loss=False)
    with pytest.raises(RuntimeError, match="right after the last backward"):
        optimizer.scale_grad_by_num_grads_to_accum()
    backward(model)
    backward(model)
    with pytest.raises(RuntimeError, match="has not been divided"):
        optimizer.step()
    optimizer.scale_grad_by_num_grads_to_accum()
    with pytest.raises(RuntimeError, match="once, right after the last"):
        optimizer.scale_grad_by_num_grads_to_accum()
    optimizer.step()
    scaled = mh.AdaScale(sgd(make_model()), num_gradients_to_accumulate=2)
    with pytest.raises(RuntimeError, match="divided already"):
        scaled.scale_grad_by_num_grads_to_accum()


def test_one_sample_left_open():
    model = make_model()
    optimizer = mh.AdaScale(sgd(model))
    with optimizer.one_sample():
        backward(model)
        with pytest.raises(RuntimeError, match="already open"), optimizer.one_sample():
            pass
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="leave the `with` block first"), optimizer.one_sample():
        backward(model)
        optimizer.step()
    backward(model)  # an error inside leaves nothing behind
    optimizer.step()


def test_groups_added_to_the_inner_optimizer():
    model = make_model()
    inner = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer = mh.AdaScale(inner)
    inner.add_param_group({"params": list(model[2].parameters())})
    backward(model)
    with pytest.raises(RuntimeError, match=r"Call the rule's add_param_group"):
        optimizer.step()


def test_steps_after_unhook():
    model = make_model()
    optimizer = mh.AdaScale(sgd(model))
    optimizer.unhook()
    backward(model)
    with pytest.raises(RuntimeError, match=r"unhook\(\) was called"):
        optimizer.step()


# -- a state dict that does not belong -----------------------------------------------------------


def test_foreign_state_dicts_change_nothing():
    model = make_model()
    optimizer = mh.AdaScale(sgd(model), num_gradients_to_accumulate=2)
    for _ in range(2):
        backward(model)
    optimizer.step()
    good = optimizer.state_dict()

    def edited(**changes):
        return {**good, "manyhands": {**good["manyhands"], **changes}}

    grouped = mh.AdaScale(torch.optim.SGD(two_groups(make_model()), lr=0.1)).state_dict()
    adam = mh.LinearScale(torch.optim.Adam(make_model().parameters())).state_dict()
    adam["param_groups"] = good["param_groups"]
    damaged = edited()
    del damaged["manyhands"]["progress"]
    for state, message in (
        (sgd(lr=0.7).state_dict(), "no 'manyhands' entry"),
        (adam, "optimizer must be 'SGD', as it is here, got 'Adam'"),
        (grouped, r"group_sizes must be .*got \[2, 2\]"),
        (edited(version=99), "version must be .*got 99"),
        (edited(gradients="preconditioned"), "gradients must be"),
        (damaged, "progress must be there"),
        (edited(average={"sqr": None}), "average.debiased must be there"),
        (edited(progress="abc"), "progress must be a finite number"),
        (edited(progress=float("nan")), "progress must be a finite number"),
        (edited(previous=5), "previous must be a list"),
        (edited(previous=[torch.zeros(99)]), r"previous\[0\] must be a tensor"),
        (edited(nonfinite=None), "nonfinite must be"),
        (edited(loss_scale="x"), "loss_scale must be"),
        (edited(batch={**good["manyhands"]["batch"], "passes": 0}), "batch.passes must be"),
        (edited(batch={**good["manyhands"]["batch"], "smoothing": "x"}), "smoothing must be"),
    ):
        before = optimizer.snapshot()
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
        assert optimizer.snapshot() == before
    optimizer.load_state_dict(good)


# -- on several workers ----------------------------------------------------------------------------


def disagree(what):
    rank = dist.get_rank()
    model = make_model()
    if what == "accumulation":
        mh.AdaScale(sgd(model), num_gradients_to_accumulate=1 + rank)
    elif what == "scale":
        mh.AdaScale(sgd(model), scale=2.0 + rank)
    elif what == "batch":
        mh.LEGWScale(1, 100, sgd(model), batch_size=4 + rank)
    elif what == "smoothing":
        mh.AdaScale(sgd(model), smoothing=0.5 if rank else None)
    else:
        mh.AdaScale(torch.optim.SGD(list(model.parameters())[rank:], lr=0.1))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("accumulation", "different num_gradients_to_accumulate: rank 0: 1; rank 1: 2"),
        ("scale", "different scale: rank 0: 2; rank 1: 3"),
        ("batch", "different batch_size: rank 0: 4; rank 1: 5"),
        ("smoothing", "different smoothing: rank 0: 0.998; rank 1: 0.5"),
        ("parameters", "different number of parameters: rank 0: 4; rank 1: 3"),
    ],
)
def test_workers_that_disagree_from_the_start(what, message):
    raises_on_ranks(2, ValueError, disagree, what, match=message, timeout=10)


def disagree_later(what):
    rank = dist.get_rank()
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = mh.AdaScale(sgd(model))
    backward(wrapped, rank)
    optimizer.step()
    optimizer.zero_grad()
    passes = 1
    if what == "scale":
        optimizer.set_scale(2.0 + rank)
    elif what == "progress":
        optimizer.set_progress(7.0 * rank)
    elif what == "rates":  # as by ReduceLROnPlateau on each rank's own loss
        optimizer.param_groups[0]["lr"] /= 1 + rank
    elif what.startswith("accumulation of all"):
        passes = 1 + rank
        optimizer.set_num_gradients_to_accumulate(passes)
    elif rank == 1:
        passes = 2
        optimizer.set_num_gradients_to_accumulate(2)
    for a in range(passes):
        quiet = what.endswith("with no_sync") and a < passes - 1
        with wrapped.no_sync() if quiet else torch.enable_grad():
            backward(wrapped, rank)
    optimizer.step()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("scale", "different scale: rank 0: 2; rank 1: 3"),
        ("progress", "different statistics, progress or factors .* on every worker"),
        ("rates", r"different learning rates .* rank 0: 0\.1; rank 1: 0\.05\. Give ReduceLROn"),
        ("accumulation of all, with no_sync", "backward passes per step: rank 0: 1; rank 1: 2"),
        ("accumulation of all", "backward passes per step: rank 0: 1; rank 1: 2"),
        ("accumulation of one, with no_sync", r"rank 1: set_num_gradients_to_accumulate\(\)"),
    ],
)
def test_workers_that_disagree_later(what, message):
    raises_on_ranks(2, RanksDisagree, disagree_later, what, match=message, timeout=10)


class OfOnesOwn(ScalingRuleBase):
    """A rule that goes by what one rank alone has."""

    def scale_lr(self, scale):
        return 1.0 + dist.get_rank()


@on_ranks(2, raises=RanksDisagree, match=r"factors .* scale_lr")
def test_factors_that_differ_are_noticed_at_the_next_step():
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = OfOnesOwn(sgd(model))
    for _ in range(2):
        optimizer.zero_grad()
        backward(wrapped, dist.get_rank())
        optimizer.step()


@pytest.mark.parametrize("adaptive", [False, True])
@on_ranks(2, raises=RanksDisagree, match="no_sync", timeout=10)
def test_a_step_inside_no_sync(adaptive):
    model = make_model()
    if adaptive:
        optimizer = sgd(model)
        wrapped = adaptdl.AdaptiveDataParallel(model, optimizer)
    else:
        wrapped = DistributedDataParallel(model)
        optimizer = mh.AdaScale(sgd(model))
    with wrapped.no_sync():
        backward(wrapped, dist.get_rank())
        optimizer.step()


@on_ranks(2, raises=RanksDisagree, match="different gradients", timeout=10)
def test_several_workers_without_data_parallel():
    model = make_model()
    optimizer = mh.AdaScale(sgd(model))
    backward(model, dist.get_rank())
    optimizer.step()


@on_ranks(2, raises=RanksDisagree, match="different gradients", timeout=10)
def test_a_step_inside_no_sync_where_only_long_parameters_are_trained():
    """Every short one is frozen: the witness must be found among the long ones."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.LayerNorm(100))
    for p in model.parameters():
        p.requires_grad_(p.dim() > 1)
    wrapped = DistributedDataParallel(model)
    optimizer = mh.AdaScale(sgd(model))
    x = torch.randn(2, 4, 100)[dist.get_rank()]
    wrapped(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with wrapped.no_sync():
        wrapped(x * (1 + dist.get_rank())).pow(3).mean().backward()
    optimizer.step()


def in_another_order():
    """Two optimizers whose parameters come up in another order on each rank."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    a, b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = a, b

        def forward(self, x):
            return (self.b(self.a(x)) if rank == 0 else self.a(self.b(x))).square().mean()

    wrapped = DistributedDataParallel(Model())
    optimizers = [mh.AdaScale(sgd(a)), mh.AdaScale(sgd(b))]
    for step in range(3):
        wrapped(make_batches(3, 2)[0][step, rank]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [optimizer.progress for optimizer in optimizers]


def test_the_collectives_of_two_optimizers_on_one_model_are_not_mixed_up():
    first, second = run_ranks(2, in_another_order, timeout=20)
    assert first == second


@pytest.mark.parametrize("who", ["without gradients", "with gradients"])
@on_ranks(2, raises=RuntimeError, match="without a backward", timeout=10)
def test_a_step_without_a_backward_on_every_worker(who):
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = mh.AdaScale(sgd(model))
    if who == "with gradients":
        backward(wrapped, dist.get_rank())
        optimizer.step()
    optimizer.step()


@on_ranks(2, raises=ValueError, match="has 2 worker", timeout=10)
def test_a_world_size_that_is_not_the_groups():
    mh.AdaScale(sgd(), world_size=3)


def test_gain_on_one_rank_only_does_not_hang():
    def train():
        model = make_model()
        wrapped = DistributedDataParallel(model)
        optimizer = mh.AdaScale(sgd(model))
        for _ in range(3):
            optimizer.zero_grad()
            backward(wrapped, dist.get_rank())
            if dist.get_rank() == 0:  # as people log
                optimizer.gain()
            optimizer.step()
        return optimizer.progress

    first, second = run_ranks(2, train, timeout=10)
    assert first == second


@pytest.mark.parametrize("kind", [mh.AdaScale, mh.AdamScale, mh.LinearScale])
def test_an_unknown_argument_names_the_class_and_the_argument_that_was_meant(kind):
    with pytest.raises(TypeError) as raised:
        kind(num_grads=4)
    message = f"{kind.__name__} has no argument num_grads. Is num_gradients_to_accumulate meant?"
    assert str(raised.value) == message
    with pytest.raises(TypeError, match=rf"^{kind.__name__} has no argument quux. See help\("):
        kind(quux=4)

"""What training loops do now and then with sharded parameters must not change the numbers."""

import contextlib
import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

import manyhands as mh
from helpers.ranks import RanksFailed, on_ranks, raises_on_ranks, run_ranks
from helpers.sharding_oracle import assert_same, copied, make_batches, make_model
from manyhands._ranks.presence import RollCall
from manyhands.sharding import _agreement

from test_fsdp import nested, whole  # isort: skip

X = make_batches(3, 2, 2)[0]  # of [step][pass][worker]


def loss_of(model, x, **options):
    return model(x, **options).square().mean()


def optimizer_of(model):
    return AdamW(model.parameters(), lr=0.02, weight_decay=0.3)


def quietly(model):
    return model.no_sync() if isinstance(model, mh.FSDP) else contextlib.nullcontext()


def compare(loop, model=make_model, wrap=nested):
    """`loop(model, part)` on two workers is the same in the plain run."""

    def run():
        wrapped = wrap(model())
        loop(wrapped, lambda x: x[dist.get_rank()])
        return whole(wrapped)

    ranks = run_ranks(2, run)
    module = model()
    loop(module, lambda x: x.flatten(0, 1))
    assert_same(ranks, copied(module.parameters()))


def train(model, part, optimizer=None):
    optimizer = optimizer or optimizer_of(model)
    for x in X[:, 0]:
        optimizer.zero_grad()
        loss_of(model, part(x)).backward()
        optimizer.step()


# -- gradients that are not averaged ----------------------------------------------------------


@pytest.mark.parametrize("end", ["step", "zero_grad"])
def test_a_step_whose_passes_were_all_inside_no_sync_is_an_error(end):
    """As at the end of an epoch, where a script averages every second pass."""

    def run():
        wrapped = nested(make_model())
        optimizer, other = optimizer_of(wrapped), nn.Linear(2, 1)
        train(wrapped, lambda x: x[dist.get_rank()], optimizer)
        optimizer.zero_grad()
        with wrapped.no_sync():
            loss_of(wrapped, X[0, 0, dist.get_rank()]).backward()
        other(torch.ones(1, 2)).sum().backward()
        AdamW(other.parameters()).step()  # another optimizer is not meant
        if end == "zero_grad":
            wrapped.zero_grad()
        optimizer.step()

    if end == "zero_grad":
        run_ranks(2, run)
    else:
        raises_on_ranks(2, RuntimeError, run, match=r"all inside no_sync\(\).*model.zero_grad\(\)")


# -- forwards that no backward follows --------------------------------------------------------


def test_a_step_after_an_evaluation_with_gradients_on_is_seen_by_the_next_forward():
    def loop(model, part):
        optimizer = optimizer_of(model)
        for x, other in X:
            optimizer.zero_grad()
            loss_of(model, part(x)).backward()
            model(part(other))
            optimizer.step()

    compare(loop)


def test_an_optimizer_made_after_a_forward_trains_the_sharded_parameters():
    def loop(model, part):
        model(part(X[0, 1]))
        train(model, part)

    compare(loop)


def test_zero_grad_between_forward_and_backward():
    def loop(model, part):
        optimizer = optimizer_of(model)
        for x in X[:, 0]:
            loss = loss_of(model, part(x))
            model.zero_grad()
            loss.backward()
            optimizer.step()

    compare(loop)


def test_inference_mode_before_and_between_training():
    def loop(model, part):
        optimizer = optimizer_of(model)
        for _ in range(2):
            with torch.inference_mode():
                model(part(X[0, 0]))
            train(model, part, optimizer)

    compare(loop)


# -- passes that were given up ----------------------------------------------------------------


class Aborts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(5, 5) for _ in range(3))
        self.double()

    def forward(self, x, aborts=False, short=False):
        x = self.b(self.a(x))
        x = Aborts.apply(x) if aborts else x
        return x if short else self.c(x)


def three_wraps(model):
    model.a, model.b, model.c = map(mh.FSDP, (model.a, model.b, model.c))
    return mh.FSDP(model)


@pytest.mark.parametrize("wrap", [mh.FSDP, three_wraps])
def test_a_backward_that_raised_does_not_spoil_the_next(wrap):
    def loop(model, part):
        optimizer = optimizer_of(model)
        with contextlib.suppress(ArithmeticError):
            loss_of(model, part(X[0, 0]), aborts=True).backward()
        model.zero_grad()
        train(model, part, optimizer)

    compare(loop, Three, wrap)


def test_what_a_given_up_pass_has_used_has_no_gradient_in_the_next():
    def loop(model, part):
        optimizer = optimizer_of(model)
        with quietly(model):
            loss_of(model, part(X[0, 0])).backward()
        model.zero_grad()
        loss_of(model, part(X[0, 0]), short=True).backward()
        optimizer.step()  # whose weight decay would move what has a gradient of zeros

    compare(loop, Three, mh.FSDP)


# -- modules ----------------------------------------------------------------------------------


def test_a_module_under_two_names_goes_through_state_dicts():
    def build():
        torch.manual_seed(0)
        layer = nn.Linear(5, 5)
        return nn.Sequential(layer, nn.Tanh(), layer).double()

    def loop(model, part):
        state = model.state_dict()
        assert list(state) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        model.load_state_dict({name: value / 2 for name, value in state.items()})
        train(model, part)

    compare(loop, build, mh.FSDP)


def test_parameters_in_another_order_of_memory():
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(5, 4, 3, padding=1), nn.Flatten(), nn.Linear(36, 2))
        return model.double().to(memory_format=torch.channels_last)

    def loop(model, part):
        train(model, lambda x: part(x)[..., None, None].repeat(1, 1, 3, 3))

    compare(loop, build, mh.FSDP)


def test_parameters_that_loading_assigned_are_trained():
    def loop(model, part):
        loss_of(model, part(X[0, 0])).backward()
        state = {name: value.detach() / 2 for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        loss_of(model, part(X[0, 0])).backward()
        assert type(nn.utils.clip_grad_norm_(model.parameters(), 100.0)) is torch.Tensor
        optimizer_of(model).step()

    compare(loop)


class Box:
    def __init__(self, tensor):
        self.tensor = tensor


class TensorParts(nn.Linear):
    def forward(self, x):
        return Box(super().forward(x))


def test_an_output_whose_tensors_are_out_of_sight_is_an_error():
    def mistake():
        mh.FSDP(TensorParts(5, 5))(torch.ones(1, 5))

    texts = raises_on_ranks(2, TypeError, mistake)
    assert all("contains a Box, which hides its tensor 'tensor'" in text for text in texts)


@on_ranks(2)
def test_missing_keys_have_the_plain_models_names():
    model = nested(make_model())
    state = model.state_dict()
    del state["0.weight"], state["4.bias"]
    assert list(model.load_state_dict(state, strict=False).missing_keys) == ["0.weight", "4.bias"]


# -- workers that differ ----------------------------------------------------------------------


def in_another_order(rank):
    layers = {name: nn.Linear(2, 2) for name in ("ba" if rank else "ab")}

    class Both(nn.ModuleDict):
        def forward(self, x):
            return self["b"](self["a"](x))

    mh.FSDP(Both(layers))


def freezes(rank):
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(rank == 0)
    mh.FSDP(layer)


def buffers(rank):
    layer = nn.Linear(2, 2)
    layer.register_buffer("seen", torch.zeros(1 + rank))
    mh.FSDP(layer)


def wraps(rank):
    model = make_model()
    if rank == 0:
        model[0] = mh.FSDP(model[0])
    mh.FSDP(model)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (
            lambda rank: mh.FSDP(nn.Linear(2, 300 if rank == 0 else 2)),
            r"weight: rank 0: \(300, 2",
        ),
        (lambda rank: mh.FSDP(nn.Linear(2, 300 if rank == 1 else 2)), r"rank 1: \(300, 2"),
        (lambda rank: mh.FSDP(nn.Linear(2, 2), overlap=rank == 0), "overlap"),
        (lambda rank: mh.FSDP(nn.Linear(2, 2, device="meta" if rank else "cpu")), "without memory"),
        (freezes, "bias: rank 0: .* rank 1: .* frozen"),
        (buffers, r"seen: rank 0: \(1,\)"),
        (wraps, "rank 1: absent"),
        (in_another_order, "in another order. .* number 0: rank 0: a.weight; rank 1: b.weight"),
    ],
)
def test_workers_that_build_different_wraps_all_get_an_error_at_once(build, match):
    raises_on_ranks(2, ValueError, lambda: build(dist.get_rank()), match=match)


@on_ranks(2)
def test_workers_may_have_devices_of_different_numbers():
    options = {name: torch.device("cpu", dist.get_rank()) for name in ["state_dict_device"]}
    mh.FSDP(nn.Linear(2, 2), **options)(torch.ones(1, 2))


@pytest.mark.parametrize("later", [False, True], ids=["", "put in later"])
@on_ranks(4, raises=ValueError, match="the same process_group")
def test_wraps_of_one_model_with_different_workers_are_an_error(later):
    pairs = [dist.new_group([rank, rank + 1]) for rank in (0, 2)]
    inside = mh.FSDP(nn.Linear(2, 2), process_group=pairs[dist.get_rank() // 2])
    if later:
        model = mh.FSDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        model.module[0] = inside
        model(torch.ones(1, 2))
    else:
        mh.FSDP(nn.Sequential(inside, nn.Linear(2, 2)))


@on_ranks(2, raises=RuntimeError, match="Run the outermost")
def test_a_wrap_that_ran_before_the_one_around_it_is_an_error():
    model = nested(make_model())
    model[0](X[0, 0, 0])
    model(X[0, 0, 0])


# -- gradients --------------------------------------------------------------------------------


def test_a_gradient_is_copied_and_saved():
    def run():
        model = mh.FSDP(nn.Linear(3, 3))
        model(torch.ones(1, 3)).sum().backward()
        grad = model.module.weight.grad
        other = copy.deepcopy(grad)
        file = io.BytesIO()
        torch.save(grad, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        grad.mul_(other=2.0)
        return [g.to_local().sum().item() for g in (grad, other, loaded)]

    assert run_ranks(2, run) == [[12, 6, 6], [6, 3, 3]]


# -- what only some workers do ----------------------------------------------------------------


class Either(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = mh.FSDP(nn.Linear(5, 5)), mh.FSDP(nn.Linear(5, 5))

    def forward(self, x, first):
        return self.a(x) if first else self.b(x)


@on_ranks(2, raises=RuntimeError, match="have run different wraps")
def test_workers_that_run_different_wraps_of_one_size_all_get_an_error():
    model = mh.FSDP(Either())
    model(torch.ones(2, 5), dist.get_rank() == 0).sum().backward()


@on_ranks(2)
def test_after_a_state_dict_of_one_worker_alone_one_of_all_is_right(monkeypatch):
    model = nested(make_model())
    if dist.get_rank() == 0:
        with monkeypatch.context() as patch:
            patch.setattr(_agreement, "PATIENCE", 0.2)
            with pytest.raises(RuntimeError, match="Call it on every worker"):
                model.state_dict()
    dist.barrier()
    assert len(model.state_dict()) == 6


# -- what the engine cannot do ---------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [mh.FSDP, nested])
@on_ranks(2, raises=RuntimeError, match="does not support second derivatives.*level 2")
def test_a_backward_that_is_to_be_differentiated_again_is_refused(wrap):
    model = wrap(make_model())
    x = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
    torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


def test_a_gradient_penalty_works_on_one_rank():
    def penalty(model):
        x = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return [param.grad for param in model.parameters()]

    torch.testing.assert_close(penalty(mh.FSDP(make_model())), penalty(make_model()))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_fused_optimizers_that_do_not_step_shards_are_refused(kind):
    def mistake():
        model = mh.FSDP(nn.Linear(4, 4))
        optimizer = kind(model.parameters(), lr=0.1, fused=True)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    raises_on_ranks(2, TypeError, mistake, match=f"fused {kind.__name__} does not step sharded")


@on_ranks(2, raises=ValueError, match="parameter scale is a scalar")
def test_a_scalar_parameter_is_refused_when_it_is_wrapped():
    layer = nn.Linear(4, 4)
    layer.scale = nn.Parameter(torch.ones(()))
    mh.FSDP(layer)


def test_a_rank_that_evaluates_alone_gets_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(RollCall, "look_after", 0.2)

    def run():
        model = nested(make_model())
        optimizer = optimizer_of(model)
        x = torch.ones(2, 5, dtype=torch.float64)
        for step in range(3):
            with torch.no_grad():
                model(x)  # on every rank
            if step == 1 and dist.get_rank() == 0:
                with torch.no_grad():
                    model(x)
            model(x).sum().backward()
            optimizer.step()

    with pytest.raises(RanksFailed) as raised:
        run_ranks(2, run)
    message = str(raised.value)
    assert "rank 0 evaluates the model" in message and "ranks [1] continue training" in message
    assert "SIGABRT" not in message


def test_a_layer_that_one_rank_skips_is_named_where_another_rank_sees_it():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 5)

        def forward(self, x):
            x = self.a(x)
            return self.c(x if dist.get_rank() == 0 else self.b(x))

    def run():
        model = Skipping()
        for name, layer in list(model.named_children()):
            setattr(model, name, mh.FSDP(layer))
        mh.FSDP(model)(torch.ones(2, 5)).sum().backward()

    with pytest.raises(RanksFailed, match="have run different"):
        run_ranks(2, run)

"""Containers of any class go through wrappers as what they are."""

import copy
import types
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import manyhands as mh
from helpers import containers
from helpers.containers import MAKE, ModelOutput, tensors_of
from helpers.ranks import on_ranks, run_ranks
from manyhands import adaptdl
from manyhands._tensors.trees import as_type, tensors_in, tree_map_tensors


def boxes():
    return {name: make(torch.ones(2), torch.zeros(3)) for name, make in MAKE.items()}


@pytest.mark.parametrize("name", MAKE)
def test_a_container_with_changed_tensors_is_of_its_class(name):
    before = boxes()[name]
    old = tensors_of(before)
    after = tree_map_tensors(lambda tensor: tensor + 1, before)
    assert type(after) is type(before) and after is not before
    assert [t.tolist() for t in tensors_of(after)] == [(t + 1).tolist() for t in old]
    assert all(a is b for a, b in zip(tensors_of(before), old, strict=True))  # left alone
    assert getattr(after, "note", None) == getattr(before, "note", None)
    assert getattr(after, "default_factory", None) is getattr(before, "default_factory", None)
    assert getattr(after, "maxlen", None) == getattr(before, "maxlen", None)


@pytest.mark.parametrize("name", MAKE)
def test_a_container_whose_tensors_do_not_change_is_the_same_object(name):
    before = boxes()[name]
    assert tree_map_tensors(lambda tensor: tensor, before) is before
    assert as_type(torch.float32, before) is before


def test_attributes_and_keys_of_a_model_output_are_changed_together():
    before = ModelOutput(first=torch.ones(1))
    before["extra"] = torch.ones(1)
    after = tree_map_tensors(lambda tensor: tensor * 2, before)
    assert after.first is after["first"] and after.first.item() == 2
    assert after["extra"].item() == 2 and after.other is None
    assert list(after) == ["first", "extra"]


def test_a_tensor_at_several_places_is_changed_once_and_stays_one():
    one = torch.ones(1)
    calls = []
    after = tree_map_tensors(lambda t: calls.append(t) or t * 2, {"a": one, "b": [one, (one,)]})
    assert len(calls) == 1
    assert after["a"] is after["b"][0] is after["b"][1][0]


def test_what_contains_itself_is_walked_once():
    box = containers.Plain(torch.ones(1), torch.ones(1))
    box.note = box
    assert len(tensors_in(box)) == 2


def test_leaves_that_are_no_containers_are_told():
    found = []
    other = types.MappingProxyType({"first": torch.ones(1)})
    assert tensors_in([other, 3, None, "text", torch.ones(1)], found.append)[0].item() == 1
    assert found == [other]


# -- through the wrappers ----------------------------------------------------------------------


class Boxed(nn.Module):
    """Takes one container and returns another; one of its tensors is a view."""

    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.make = make
        self.layer = nn.Linear(4, 4)
        self.seen = None

    def forward(self, box, **named):
        self.seen = type(box), {name: type(value) for name, value in named.items()}
        total = sum(tensors_of(box)) + sum(t for v in named.values() for t in tensors_of(v))
        out = self.layer(total.to(self.layer.weight.dtype))
        return self.make(out, out[:, :2].tanh().view(-1, 2))


def step(model, make, x):
    """One step; what the model has seen and returned, and its parameters afterwards."""
    optimizer = SGD(model.parameters(), lr=0.1)
    box = make(x.clone().requires_grad_(), x.sin())
    result = model(box, named=make(x.cos(), x))
    loss = sum((tensor.float().square()).mean() for tensor in tensors_of(result))
    loss.backward()
    optimizer.step()
    return type(result), loss.detach()


def sharded_ddp(module):
    return mh.ShardedDataParallel(module, mh.OSS(module.parameters(), optim=SGD, lr=0.1))


WRAPS = {
    "FSDP": mh.FSDP,
    "FSDP in bfloat16": lambda module: mh.FSDP(
        module, mixed_precision=True, compute_dtype=torch.bfloat16
    ),
    "FSDP of float32 inputs": lambda module: mh.FSDP(module, force_input_to_fp32=True),
    "ShardedDataParallel": sharded_ddp,
    "AdaptiveDataParallel": lambda module: adaptdl.AdaptiveDataParallel(
        module, SGD(module.parameters(), lr=0.1), scaling_rule=mh.AdaScale()
    ),
}


ONE_WORKER_SHOWS = ("FSDP in bfloat16", "FSDP of float32 inputs")


@pytest.mark.sample("1-FSDP", "1-FSDP of float32 inputs", "2-FSDP", "2-AdaptiveDataParallel")
@pytest.mark.parametrize(
    ("workers", "wrap"),
    [
        *((1, wrap) for wrap in WRAPS),
        *(
            pytest.param(2, wrap, marks=[pytest.mark.long] * (wrap in ONE_WORKER_SHOWS))
            for wrap in WRAPS
        ),
    ],
)
def test_containers_go_through_a_wrapper_unchanged_in_type(wrap, workers):
    torch.manual_seed(1)
    x = torch.randn(3, 4)
    tolerance = dict(rtol=0.05, atol=0.05) if "bfloat16" in wrap else {}

    def run():
        for name, make in MAKE.items():
            plain, module = Boxed(make), Boxed(make)
            kind, loss = step(plain, make, x)
            wrapped = WRAPS[wrap](module)
            kind_here, loss_here = step_of(wrapped, make, x)
            assert kind_here is kind, name
            assert module.seen == plain.seen, name
            torch.testing.assert_close(loss_here, loss, **tolerance)
            if "FSDP" in wrap:
                state = wrapped.state_dict()
                for key, value in plain.state_dict().items():
                    torch.testing.assert_close(state[key], value, **tolerance)

    def step_of(wrapped, make, x):
        if "FSDP" in wrap:
            return step(wrapped, make, x)
        result = wrapped(make(x, x.sin()), named=make(x.cos(), x))
        return type(result), sum(t.square().mean() for t in tensors_of(result)).detach()

    run_ranks(workers, run)


@on_ranks(2)
def test_one_tensor_given_several_times_stays_one():
    """torch's attention asks whether query, key and value are one."""

    class Same(nn.Linear):
        def forward(self, query, key, value):
            assert query is key is value
            return super().forward(query)

    model = mh.FSDP(Same(4, 4))
    x = torch.ones(2, 4, requires_grad=True)
    model(x, x, value=x).sum().backward()
    torch.testing.assert_close(x.grad, model.state_dict()["weight"].sum(0).expand(2, 4))


@on_ranks(2)
def test_hooks_of_the_wrapped_module_see_what_it_takes_and_returns():
    module = Boxed(ModelOutput)
    seen = []
    module.register_forward_pre_hook(lambda _, args: seen.append(type(args[0])))
    module.register_forward_hook(lambda *given: seen.append(type(given[-1])))
    model = mh.FSDP(module)
    module.register_forward_pre_hook(lambda _, args: seen.append(type(args[0])))
    module.register_forward_hook(lambda *given: seen.append(type(given[-1])))
    model(OrderedDict(first=torch.ones(2, 4)))
    assert seen == [OrderedDict, OrderedDict, ModelOutput, ModelOutput]


@on_ranks(2, raises=TypeError, match="hides its tensor 'first'.*register_pytree_node")
def test_a_container_that_cannot_be_looked_into_is_an_error_where_its_tensors_need_a_gradient():
    mh.FSDP(Boxed(lambda first, other: types.MappingProxyType({"first": first})))(
        {"x": torch.ones(2, 4)}
    )


# -- transformers itself -----------------------------------------------------------------------


def language_model():
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: its models are not tried"
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    config._attn_implementation = "eager"
    return transformers.LlamaForCausalLM(config)


def in_layers(model, **options):
    layers = model.model.layers
    for number, layer in enumerate(layers):
        layers[number] = mh.FSDP(layer, **options)
    return mh.FSDP(model, **options)


HUGGING_FACE = {
    "FSDP": mh.FSDP,
    "FSDP of each layer": in_layers,
    "FSDP of each layer in bfloat16": lambda model: in_layers(
        model, mixed_precision=True, compute_dtype=torch.bfloat16
    ),
    "ShardedDataParallel": sharded_ddp,
    "AdaptiveDataParallel": WRAPS["AdaptiveDataParallel"],
}


@pytest.mark.sample(
    "None-FSDP", "True-FSDP", "True-AdaptiveDataParallel", "False-AdaptiveDataParallel"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("wrap", HUGGING_FACE)
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_hugging_face_model_with_labels(wrap, reentrant):
    model = language_model()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    tokens = torch.randint(0, 32, (2, 1, 7), generator=torch.Generator().manual_seed(1))
    tolerance = dict(rtol=0.05, atol=0.05) if "bfloat16" in wrap else dict(rtol=1e-4, atol=1e-6)

    def trained(model, optimizer, batch):
        kinds, losses = set(), []
        for _ in range(2):
            optimizer.zero_grad()
            output = model(input_ids=batch, labels=batch, output_hidden_states=True)
            output.loss.backward()
            optimizer.step()
            kinds.add(type(output).__name__)
            kinds.add(type(output.hidden_states).__name__)
            losses.append(output.loss.item())
        return sorted(kinds), losses

    plain = copy.deepcopy(model)
    oracle = trained(plain, SGD(plain.parameters(), lr=0.1), tokens.flatten(0, 1))

    def run():
        module = copy.deepcopy(model)
        wrapped = HUGGING_FACE[wrap](module)
        if wrap == "ShardedDataParallel":
            optimizer = wrapped._optimizers[0]
        elif wrap == "AdaptiveDataParallel":
            optimizer = SGD(module.parameters(), lr=0.1)
        else:
            optimizer = SGD(wrapped.parameters(), lr=0.1)
        return trained(wrapped, optimizer, tokens[dist.get_rank()])

    ranks = run_ranks(2, run)
    assert all(kinds == oracle[0] for kinds, _ in ranks)
    mean = torch.tensor([losses for _, losses in ranks]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(oracle[1]), **tolerance)


@on_ranks(2)
def test_a_forward_of_torchs_ddp_has_the_same_types():
    """What AdaptiveDataParallel is built on keeps types by itself; this would tell if not."""
    for name, make in MAKE.items():
        model = DistributedDataParallel(Boxed(make))
        assert type(model(make(torch.ones(2, 4), torch.ones(2, 4)))) is type(
            make(torch.ones(1), torch.ones(1))
        ), name

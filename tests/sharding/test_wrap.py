"""enable_wrap, wrap, auto_wrap and policies, with wrappers that only keep what they were given."""

import threading
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import manyhands as mh
from helpers.ranks import run_ranks
from manyhands import fairscale


class Box(nn.Module):
    """A wrapper that takes any option."""

    def __init__(self, module, **options):
        super().__init__()
        self.module = module
        self.options = options

    def forward(self, *args):
        return self.module(*args)


class Strict(nn.Module):
    """A wrapper with two options."""

    def __init__(self, module, process_group=None, mixed_precision=False):
        super().__init__()
        self.module = module
        self.options = {"process_group": process_group, "mixed_precision": mixed_precision}


def linears(*outputs):
    """Linear layers with 10 inputs: 11 parameters an output."""
    return [nn.Linear(10, number) for number in outputs]


def boxed(model):
    """The names of what is wrapped, as they were without wrappers."""
    paths = model.named_modules(remove_duplicate=False)
    return [clean(path) for path, module in paths if isinstance(module, Box | Strict)]


def clean(path):
    return ".".join(part for part in path.split(".") if part != "module")


# -- enable_wrap and wrap ------------------------------------------------------------------------


def test_outside_of_enable_wrap_nothing_changes():
    model = nn.Sequential(*linears(10))
    assert fairscale.wrap(model) is model
    assert fairscale.auto_wrap(model, min_num_params=1) is model
    assert boxed(model) == []


def test_the_documented_example_hands_on_its_options_as_they_are():
    group = fairscale.DummyProcessGroup(rank=0, size=1)
    with fairscale.enable_wrap(
        wrapper_cls=Box, process_group=group, mixed_precision=True, flatten_parameters=True
    ):
        l1 = fairscale.wrap(nn.Linear(5, 5))
    assert isinstance(l1, Box) and isinstance(l1.module, nn.Linear)
    assert l1.options["process_group"] is group
    assert {**l1.options, "process_group": None} == {
        "process_group": None,
        "mixed_precision": True,
        "flatten_parameters": True,
    }


def test_an_inner_context_adds_to_the_outer_one_and_gives_it_back():
    with fairscale.enable_wrap(wrapper_cls=Box, a=1, b=1):
        with fairscale.enable_wrap(b=2, c=2):
            assert fairscale.wrap(nn.Linear(1, 1)).options == {"a": 1, "b": 2, "c": 2}
        assert fairscale.wrap(nn.Linear(1, 1)).options == {"a": 1, "b": 1}
    assert isinstance(fairscale.wrap(nn.Linear(1, 1)), nn.Linear)


def test_a_decorated_function_wraps_each_time_it_is_called():
    @fairscale.enable_wrap(wrapper_cls=Box, min_num_params=100, a=1)
    def build():
        return fairscale.auto_wrap(nn.Sequential(*linears(10, 5)))

    assert boxed(build()) == boxed(build()) == ["0"]
    assert build()[0].options == {"a": 1}
    assert isinstance(fairscale.wrap(nn.Linear(1, 1)), nn.Linear)


def test_threads_do_not_see_each_others_context():
    found, barrier = {}, threading.Barrier(2)

    def build(number):
        with fairscale.enable_wrap(wrapper_cls=Box, number=number):
            barrier.wait(10)
            found[number] = fairscale.wrap(nn.Linear(1, 1)).options
            barrier.wait(10)

    with fairscale.enable_wrap(wrapper_cls=Box, number=-1):
        threads = [threading.Thread(target=build, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found[-1] = fairscale.wrap(nn.Linear(1, 1)).options
    assert found == {number: {"number": number} for number in (-1, 0, 1)}


def test_the_wrappers_options_are_the_contexts_below_the_modules_below_wraps_own():
    layer = nn.Linear(1, 1)
    layer.wrapper_config = {"b": "module", "c": "module"}
    with fairscale.enable_wrap(wrapper_cls=Box, a="context", b="context", c="context"):
        wrapped = fairscale.wrap(layer, c="wrap")
    assert wrapped.options == {"a": "context", "b": "module", "c": "wrap"}
    assert layer.wrapper_config == {"b": "module", "c": "module"}


def test_wrapper_cls_too_comes_from_all_three():
    layer = nn.Linear(1, 1)
    with fairscale.enable_wrap(wrapper_cls=Box):
        assert isinstance(fairscale.wrap(layer, wrapper_cls=Strict), Strict)
        layer.wrapper_config = {"wrapper_cls": Strict}
        assert isinstance(fairscale.wrap(layer), Strict)
        assert isinstance(fairscale.wrap(layer, wrapper_cls=Box), Box)
        assert boxed(
            fairscale.auto_wrap(nn.Sequential(layer), fairscale.config_auto_wrap_policy)
        ) == ["0"]


def test_wrapper_cls_may_be_a_function_or_a_partial():
    with fairscale.enable_wrap(
        wrapper_cls=lambda module, **options: Box(Box(module), **options), a=1
    ):
        assert fairscale.wrap(nn.Linear(1, 1)).options == {"a": 1}
    with fairscale.enable_wrap(wrapper_cls=partial(Strict, mixed_precision=True), process_group=1):
        model = fairscale.auto_wrap(nn.Sequential(*linears(10)), min_num_params=110)
        assert model[0].options == {"process_group": 1, "mixed_precision": True}
        assert boxed(fairscale.auto_wrap(model, min_num_params=1)) == ["0"]  # known as wrapped


# -- auto_wrap by size ---------------------------------------------------------------------------


def auto_wrapped(model, *args, **kwargs):
    with fairscale.enable_wrap(wrapper_cls=Box):
        return fairscale.auto_wrap(model, *args, **kwargs)


def nested():
    """Four layers of 110 parameters, two of them in a part of their own."""
    return nn.Sequential(*linears(10, 10), nn.Sequential(*linears(10, 10)))


@pytest.mark.parametrize(
    ("least", "expected"),
    [
        (110, ["0", "1", "2.0", "2.1"]),
        (111, ["", "2"]),  # 220 in the part, 220 left to the root
        (220, ["", "2"]),
        (221, [""]),
        (441, []),
        (None, []),  # 1e8
    ],
)
def test_what_has_enough_parameters_that_are_in_no_wrapper_is_wrapped(least, expected):
    options = {} if least is None else {"min_num_params": least}
    assert sorted(boxed(auto_wrapped(nested(), **options))) == expected


def test_the_policys_options_may_be_given_to_either_and_bound_by_partial():
    by_hand = partial(fairscale.default_auto_wrap_policy, min_num_params=111)
    with fairscale.enable_wrap(wrapper_cls=Box, min_num_params=110, a=1):
        model = fairscale.auto_wrap(nested())
        assert boxed(model) == ["0", "1", "2.0", "2.1"]
        assert model[0].options == {"a": 1}
        assert fairscale.wrap(nn.Linear(1, 1)).options == {"a": 1}
        assert boxed(fairscale.auto_wrap(nested(), min_num_params=1e3)) == []
        assert sorted(boxed(fairscale.auto_wrap(nested(), by_hand))) == ["", "2"]
        assert len(boxed(fairscale.auto_wrap(nested(), by_hand, min_num_params=110))) == 4
        with fairscale.enable_wrap(by_hand):
            assert sorted(boxed(fairscale.auto_wrap(nested()))) == ["", "2"]
        with fairscale.enable_wrap(min_num_params=111):
            assert sorted(boxed(fairscale.auto_wrap(nested()))) == ["", "2"]


def test_other_keywords_of_auto_wrap_are_options_of_the_wrappers():
    with fairscale.enable_wrap(wrapper_cls=Box, a=1, b=1):
        model = fairscale.auto_wrap(nested(), min_num_params=110, b=2)
    assert model[2][0].options == {"a": 1, "b": 2}


def test_attention_and_what_is_in_it_is_left_whole():
    model = nn.Sequential(*linears(10), nn.MultiheadAttention(100, 1))
    assert sorted(boxed(auto_wrapped(model, min_num_params=40))) == ["", "0"]
    forced = {nn.MultiheadAttention, nn.Linear}
    model = nn.Sequential(*linears(10), nn.ModuleList(linears(10)))
    assert boxed(auto_wrapped(model, min_num_params=40, force_leaf_modules=forced)) == [""]


def test_lists_and_dicts_are_looked_into_and_not_wrapped():
    assert boxed(auto_wrapped(nn.ModuleList(linears(4, 10)), min_num_params=100)) == ["1"]
    assert boxed(auto_wrapped(nn.ModuleDict({"a": nn.Linear(1, 1)}), min_num_params=1)) == ["a"]
    model = auto_wrapped(nested(), min_num_params=110, exclude_wrap_modules={nn.Linear})
    assert sorted(boxed(model)) == ["", "2"]


def test_the_root_may_be_wrapped_however_small_its_rest_is():
    model = nn.Sequential(*linears(10, 1))
    assert boxed(auto_wrapped(model, min_num_params=110)) == ["0"]
    model = nn.Sequential(*linears(10, 1))
    model = auto_wrapped(model, min_num_params=110, skip_params_check_for_root=True)
    assert boxed(model) == ["", "0"]


# -- other policies ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [set, frozenset, tuple, list])
def test_a_set_of_classes_wraps_their_instances_and_nothing_else(kind):
    model = nn.Sequential(nn.ReLU(), *linears(1), nn.ModuleList([nn.Tanh(), *linears(1)]))
    assert boxed(auto_wrapped(model, kind([nn.Linear, nn.Tanh]))) == ["1", "2.0", "2.1"]
    with fairscale.enable_wrap(kind([nn.Linear]), wrapper_cls=Box):
        assert boxed(fairscale.auto_wrap(nn.Sequential(*linears(1)))) == ["0"]


def test_a_function_is_asked_from_above_and_then_from_below():
    asked = []

    def policy(module, recurse, unwrapped_params, module_is_root, limit=110):
        asked.append((type(module).__name__, recurse, unwrapped_params, module_is_root))
        return recurse or unwrapped_params >= limit

    assert boxed(auto_wrapped(nn.Sequential(*linears(10)), policy)) == ["0"]
    assert asked == [
        ("Sequential", True, 110, True),
        ("Linear", True, 110, False),
        ("Linear", False, 110, False),
        ("Sequential", False, 0, True),
    ]
    assert boxed(auto_wrapped(nn.Sequential(*linears(10)), policy, limit=111)) == []
    assert boxed(auto_wrapped(nn.Sequential(*linears(10)), partial(policy, limit=0))) == ["", "0"]


def test_modules_marked_with_a_config_are_wrapped_with_it():
    model = nested()
    model[2].wrapper_config = {"a": 2}
    model[2][0].wrapper_config = {}
    with fairscale.enable_wrap(fairscale.config_auto_wrap_policy, wrapper_cls=Box, a=1):
        model = fairscale.auto_wrap(model)
        assert boxed(model) == ["2", "2.0"]
        assert (model[2].options, model[2].module[0].options) == ({"a": 2}, {"a": 1})
        model[0].wrapper_config = {"a": 3}  # a second pass
        assert boxed(fairscale.auto_wrap(model)) == ["0", "2", "2.0"]


# -- models that are no plain tree ---------------------------------------------------------------


def test_what_is_in_a_wrapper_already_counts_as_wrapped():
    model = nested()
    model[2] = Box(model[2])
    assert boxed(auto_wrapped(model, min_num_params=221)) == ["2"]  # 220 left to the root
    assert sorted(boxed(auto_wrapped(model, min_num_params=220))) == ["", "2"]
    assert boxed(auto_wrapped(Box(nested()), min_num_params=1)) == [""]


def test_a_parameter_that_is_also_in_a_wrapper_counts_as_wrapped():
    one, other = linears(10, 10)
    other.weight = one.weight
    model = nn.Sequential(Box(one), other)
    assert boxed(auto_wrapped(model, min_num_params=11)) == ["0"]
    assert boxed(auto_wrapped(model, min_num_params=10)) == ["", "0"]  # the bias is left


def test_a_module_at_two_places_gets_one_wrapper_at_both():
    (shared,) = linears(10)
    model = nn.Sequential(shared, nn.Sequential(shared), shared)
    model = auto_wrapped(model, min_num_params=110)
    assert boxed(model) == ["0", "1.0", "2"]
    assert model[0] is model[1][0] is model[2]


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 10)
        self.layers = nn.Sequential(*linears(10, 10))
        self.head = nn.Linear(10, 20)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)))


def test_tied_weights_stay_with_the_module_that_has_both():
    model, tokens = LanguageModel(), torch.arange(5)
    before = model(tokens)
    model = auto_wrapped(model, min_num_params=100)
    assert boxed(model) == ["", "layers.0", "layers.1"]
    assert model.module.head.weight is model.module.embedding.weight
    assert torch.equal(model(tokens), before)
    inner = nn.Sequential(LanguageModel(), *linears(30))
    assert sorted(boxed(auto_wrapped(inner, min_num_params=221))) == ["0", "1"]
    by_class = auto_wrapped(nn.Sequential(LanguageModel()), {nn.Linear})
    assert boxed(by_class) == ["0.layers.0", "0.layers.1"]


def test_a_module_that_is_also_in_attention_is_not_wrapped():
    attention = nn.MultiheadAttention(10, 1)
    model = nn.Sequential(attention.out_proj, attention)
    assert boxed(auto_wrapped(model, min_num_params=110)) == [""]
    assert type(attention.out_proj).__name__ == "NonDynamicallyQuantizableLinear"


class Node(nn.Module):
    """Parameters of its own, modules in it, and a second name for the first of those."""

    def __init__(self, params, inner, twice):
        super().__init__()
        for number, param in enumerate(params):
            self.register_parameter(f"p{number}", param)
        for number, module in enumerate(inner):
            self.add_module(f"m{number}", module)
        if twice and inner:
            self.again = inner[0]


@st.composite
def models(draw, sharing=True):
    """Any tree, and with `sharing` parameters and modules that are at several places."""
    params, modules = [], []

    def param():
        if sharing and params and draw(st.integers(0, 3)) == 0:
            return draw(st.sampled_from(params))
        params.append(nn.Parameter(torch.zeros(draw(st.integers(1, 9)))))
        return params[-1]

    def module(depth):
        if sharing and modules and draw(st.integers(0, 4)) == 0:
            return draw(st.sampled_from(modules))
        own = [param() for _ in range(draw(st.integers(0, 2)))]
        inner = [module(depth - 1) for _ in range(draw(st.integers(0, 3 if depth else 0)))]
        if inner and not own and draw(st.booleans()):
            made = nn.ModuleList(inner)
        else:
            made = Node(own, inner, twice=sharing and draw(st.booleans()))
        modules.append(made)
        return made

    return module(3)


def sites(module, path="", box=None):
    """(where, parameter, innermost wrapper) for each place of each parameter."""
    if isinstance(module, Box):
        yield from sites(module.module, path, module)
        return
    for name, param in module._parameters.items():
        yield f"{path}.{name}", param, box
    for name, child in module._modules.items():
        yield from sites(child, f"{path}.{name}", box)


@given(models(), st.integers(1, 40), st.booleans())
@settings(max_examples=300)
def test_every_parameter_is_in_one_innermost_wrapper_or_none(model, least, skip):
    before = {path: param for path, param, _ in sites(model)}
    model = auto_wrapped(model, min_num_params=least, skip_params_check_for_root=skip)
    after = list(sites(model))
    assert {path: id(param) for path, param, _ in after} == {p: id(q) for p, q in before.items()}

    wrappers, inside = {}, {}
    for _, param, box in after:
        wrappers.setdefault(param, set()).add(box)
        inside.setdefault(box, set()).add(param)
    assert all(len(boxes) == 1 for boxes in wrappers.values())
    for box in {each for each in model.modules() if isinstance(each, Box)}:
        assert not isinstance(box.module, Box | nn.ModuleList)
        number = sum(param.numel() for param in inside.get(box, ()))
        assert number >= least or (skip and box is model)


@given(models(sharing=False), st.integers(1, 40))
@settings(max_examples=200)
def test_in_a_tree_nothing_of_that_size_is_left_over(model, least):
    model = auto_wrapped(model, min_num_params=least)
    left = sum(param.numel() for _, param, box in sites(model) if box is None)
    if not isinstance(model, nn.ModuleList):
        assert left < least


def at_two_places():
    (layer,) = linears(10)
    return nn.Sequential(nn.Embedding(20, 10), layer, nn.Tanh(), layer)


@pytest.mark.parametrize("new_model", [LanguageModel, at_two_places])
def test_on_two_workers_a_model_wrapped_by_default_trains_as_the_plain_one(new_model):
    def train(wrapped):
        torch.manual_seed(0)
        model, tokens = new_model(), torch.arange(5)
        if wrapped:
            with fairscale.enable_wrap(min_num_params=100):  # FullyShardedDataParallel
                model = fairscale.auto_wrap(model, skip_params_check_for_root=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
        wrappers = sum(isinstance(module, mh.FSDP) for module in model.modules())
        return wrappers, model(tokens).detach()

    _, alone = train(False)
    for wrappers, outputs in run_ranks(2, train, True):
        assert wrappers >= 2
        torch.testing.assert_close(outputs, alone)


# -- BatchNorm -----------------------------------------------------------------------------------


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Sequential(nn.BatchNorm2d(8)))


def test_each_batch_norm_is_wrapped_by_itself_in_full_precision():
    with fairscale.enable_wrap(wrapper_cls=Box, mixed_precision=True, process_group="all", other=1):
        model = fairscale.auto_wrap_bn(convolutions(), fsdp_config={"bucket_cap_mb": 5})
    assert boxed(model) == ["1", "2.0"]
    options = model[2][0].options
    assert options["mixed_precision"] is options["force_input_to_fp32"] is False
    assert options["compute_dtype"] == options["buffer_dtype"] == torch.float32
    assert (options["process_group"], options["other"]) == ("all", 1)
    assert options["bucket_cap_mb"] == 5


def test_batch_norms_may_be_marked_only():
    model = fairscale.auto_wrap_bn(convolutions(), process_group="two", wrap_it=False)
    assert boxed(model) == []
    model = auto_wrapped(model, fairscale.config_auto_wrap_policy)
    assert boxed(model) == ["1", "2.0"]
    assert model[1].options["process_group"] == "two"


def test_batch_norms_that_are_marked_already_are_an_error_unless_allowed():
    model = fairscale.auto_wrap_bn(convolutions(), wrap_it=False)
    with pytest.raises(ValueError, match="already has a wrapper_config"):
        fairscale.auto_wrap_bn(model)
    with fairscale.enable_wrap(wrapper_cls=Box):
        assert boxed(fairscale.auto_wrap_bn(model, assert_on_collision=False)) == ["1", "2.0"]


# -- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [1e6, lambda module: True, lambda limit, **about: True])
def test_a_wrong_policy_is_an_error_before_the_model_changes(policy):
    model = nested()
    with pytest.raises(TypeError):
        auto_wrapped(model, policy)
    assert boxed(model) == []


def test_options_that_nobody_knows_are_errors_before_the_model_changes():
    with pytest.raises(TypeError, match=r"takes min_num_parms\. The policy takes .*min_num_params"):
        fairscale.enable_wrap(wrapper_cls=Strict, min_num_parms=1).__enter__()
    with fairscale.enable_wrap(wrapper_cls=Strict):
        with pytest.raises(TypeError, match="typo"):
            fairscale.wrap(nn.Linear(1, 1), typo=1)
        with pytest.raises(TypeError, match="takes typo"):
            fairscale.auto_wrap(nested(), typo=1)  # though nothing is large enough to be wrapped
        with pytest.raises(TypeError, match="takes min_num_params"):
            fairscale.auto_wrap(nested(), {nn.Linear}, min_num_params=1)


def test_a_policy_that_fails_leaves_the_model_as_it_was():
    model = nested()

    def policy(module, recurse, **about):
        if about["module_is_root"] and not recurse:
            raise KeyError
        return True

    with pytest.raises(KeyError):
        auto_wrapped(model, policy)
    assert boxed(model) == []


# -- a group of nobody ---------------------------------------------------------------------------

"""The tables of names in docs/migrating.md list every public name of the originals that differs.

The names are those in originals.json, so that this runs anywhere; where an original is installed,
its sources are read again and compared with them.
"""

import contextlib
import gc
import inspect
import re
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import manyhands as mh
from helpers.bmuf import fairseq_bmuf
from helpers.originals import VERSIONS, installed, read, stored
from helpers.public import MODULES, PUBLIC
from manyhands import adaptdl, fairscale
from manyhands.fairseq import FairseqBMUF, FairseqBMUFConfig
from manyhands.scaling import ScalingRuleBase

from test_migrating import (  # isort: skip
    ALL_OF_THEIRS,
    NAMES,
    ROWS,
    arguments_of,
    split,
)

STORED = stored()
MEMBERS = {name: found for each in STORED.values() for name, found in each["members"].items()}
FUNCTIONS = {name: found for each in STORED.values() for name, found in each["functions"].items()}
EXPORTS = sorted(
    {
        (package, module, name)
        for package, each in STORED.items()
        for module, names in each["exports"].items()
        for name in names
    }
)
SHORT = {  # what the page calls the modules in which the originals define their classes
    "fairscale.optim.adascale": "fairscale.optim",
    "fairscale.optim.oss": "fairscale.optim",
    "fairscale.nn.data_parallel.sharded_ddp": "fairscale.nn",
    "fairscale.nn.data_parallel.fully_sharded_data_parallel": "fairscale.nn",
    "fairscale.nn.wrap.auto_wrap": "fairscale.nn",
    "adaptdl.torch.parallel": "adaptdl.torch",
    "adaptdl.torch.data": "adaptdl.torch",
    "adaptdl.torch.epoch": "adaptdl.torch",
}
FUNCTIONS_ELSEWHERE = {  # and these functions
    "auto_wrap_bn": "fairscale.nn.data_parallel.auto_wrap_bn",
    "get_fsdp_instances": "fairscale.nn.data_parallel.get_fsdp_instances",
    "no_pre_load_state_dict_hook": "fairscale.nn.data_parallel.no_pre_load_state_dict_hook",
}
FSDP = "fairscale.nn.FullyShardedDataParallel"
NOWHERE = ("none", "—")


@pytest.mark.parametrize("package", VERSIONS)
def test_the_names_are_those_of_the_original(package):
    folder = installed(package)
    if folder is None:
        pytest.skip(f"{package} is not installed: make test-originals")
    assert list(folder.glob(f"{package}-{VERSIONS[package]}*-info"))
    assert read(folder, package) == STORED[package]


# -- what the page calls them --------------------------------------------------------------------


def in_page(name):
    """A class's or function's name on the page, from that of the module that defines it."""
    module, _, own = name.rpartition(".")
    return FUNCTIONS_ELSEWHERE.get(own) or f"{SHORT.get(module, module)}.{own}"


def listed():
    """By the originals' names: their arguments in the table, and what stands beside them."""
    arguments, beside = {}, {}
    for theirs, ours in ROWS:
        for name in theirs:
            dotted, given = split(name)
            arguments.setdefault(dotted, set()).update(given)
            beside.setdefault(dotted, []).extend(ours)
    return arguments, beside


ARGUMENTS, BESIDE = listed()


def plain_arguments(text):
    """Without `*args` and `**kwargs`, which are in the table where they mean something."""
    return [name for name in text.split(", ") if name and not name.startswith("*")]


# -- what is offered -----------------------------------------------------------------------------


def bound_rule():
    rule = mh.AdaScale()
    model = nn.Linear(2, 1)
    module = adaptdl.AdaptiveDataParallel(model, SGD(model.parameters(), lr=0.1), scaling_rule=rule)
    return module


def sharded():
    module = nn.Linear(2, 1)
    return mh.ShardedDataParallel(module, mh.OSS(module.parameters(), lr=0.1))


def around(kind, optimizer=SGD):
    return lambda: kind(optimizer(nn.Linear(2, 1).parameters(), lr=0.1))


OFFERED = {  # what stands for an original, as it is once it is made
    "fairscale.optim.AdaScale": around(mh.AdaScale),
    "fairscale.optim.AdaScaleWrapper": lambda: fairscale.AdaScaleWrapper(
        nn.Linear(2, 1).parameters()
    ),
    "fairscale.optim.OSS": lambda: fairscale.OSS(nn.Linear(2, 1).parameters(), lr=0.1),
    "fairscale.optim.grad_scaler.ShardedGradScaler": mh.ShardedGradScaler,
    "fairscale.nn.ShardedDataParallel": sharded,
    "fairscale.nn.FullyShardedDataParallel": lambda: fairscale.FullyShardedDataParallel(
        nn.Linear(2, 1)
    ),
    "fairscale.fair_dev.testing.testing.DummyProcessGroup": lambda: fairscale.DummyProcessGroup(
        0, 1
    ),
    "adaptdl.torch.AdaptiveDataParallel": bound_rule,
    "adaptdl.torch.AdaptiveDataLoader": lambda: adaptdl.AdaptiveDataLoader([0, 1]),
    "adaptdl.torch.gradient_noise_scale.GradientNoiseScale": lambda: bound_rule().gns,
    "fairseq.optim.bmuf.FairseqBMUF": around(fairseq_bmuf),
    **{
        f"adaptdl.torch.scaling_rules.{name}": around(kind, Adam if "Adam" in name else SGD)
        for name, kind in {
            "ScalingRuleBase": mh.LinearScale,
            "AdaScale": mh.AdaScale,
            "AdamScale": mh.AdamScale,
            "LinearScale": mh.LinearScale,
            "SqrtScale": mh.SqrtScale,
        }.items()
    },
}


def has(instance, name):
    """Whether an object of ours has an attribute. Some say first what has to be done for it."""
    with contextlib.suppress(RuntimeError):
        return hasattr(instance, name)
    return True


@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_of_theirs_is_in_the_table_or_here_with_the_same_arguments(name):
    short = in_page(name)
    instance = OFFERED.get(short, lambda: None)()
    for member, given in MEMBERS[name].items():
        dotted = short if member == "__init__" else f"{short}.{member}"
        arguments = set() if given is None else set(plain_arguments(given))
        if member in MEMBERS_OF_CONFIG.get(name, ()):
            assert hasattr(FairseqBMUFConfig(), member)
        elif absent := arguments - ARGUMENTS.get(dotted, set()):
            assert instance is not None, f"{dotted}({', '.join(absent)}) is nowhere"
            ours = arguments_of(
                type(instance) if member == "__init__" else getattr(instance, member)
            )
            assert absent <= ours, f"{dotted} has no {absent - ours}"
        elif dotted not in ARGUMENTS:
            assert instance is not None and has(instance, member), f"{dotted} is nowhere"


MEMBERS_OF_CONFIG = {  # a dataclass, whose fields are its arguments
    "fairseq.dataclass.configs.FairseqBMUFConfig": MEMBERS[
        "fairseq.dataclass.configs.FairseqBMUFConfig"
    ]
}


@pytest.mark.parametrize(("package", "module", "name"), EXPORTS)
def test_an_export_of_theirs_is_in_the_table_or_in_the_module_of_its_package(package, module, name):
    named = [e for e in ARGUMENTS if e.startswith(f"{package}.") and e.endswith(f".{name}")]
    assert named or name in MODULES[package].__all__, f"{module}.{name} is nowhere"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_argument_of_a_function_of_theirs_is_in_the_table_or_here(name):
    short = in_page(name)
    given = {argument.lstrip("*") for argument in FUNCTIONS[name].split(", ") if argument}
    if absent := given - ARGUMENTS.get(short, set()):
        package, _, own = short.partition(".")
        assert absent <= arguments_of(getattr(MODULES[package], own.rpartition(".")[2]))


def test_the_table_has_no_name_that_the_originals_do_not_have():
    known = {in_page(name) for name in (*MEMBERS, *FUNCTIONS)}
    known |= {f"{in_page(name)}.{member}" for name in MEMBERS for member in MEMBERS[name]}
    known |= {f"{module}.{name}" for _, module, name in EXPORTS}
    unknown = {split(name)[0] for name in ALL_OF_THEIRS} - known
    assert unknown == {"fairseq.dataclass.configs.OptimizationConfig"}  # has one option about BMUF


def test_what_the_page_says_is_nowhere_here_is_not():
    for dotted, ours in BESIDE.items():
        owner, _, member = dotted.rpartition(".")
        if not ours and owner in OFFERED:
            assert not has(OFFERED[owner](), member), f"{dotted} is offered after all"
        elif not ours:
            assert not any(n.split(".")[-1] == member for n in PUBLIC), (
                f"{dotted} is offered after all"
            )


def test_the_page_says_where_there_is_nothing_in_one_of_two_ways():
    for line in NAMES.splitlines():
        if re.match(r"\|`(fairscale|adaptdl|fairseq)\.", line):
            ours = line.split("|")[2]
            assert ours in NOWHERE or "`manyhands." in ours, line


# -- the order of arguments ----------------------------------------------------------------------

RENAMED = {"sharded_optimizer": "optimizer", "pg": "param_group", "data": "state_dict"}
OURS = {
    "fairscale.optim.AdaScale": mh.AdaScale,
    "fairscale.optim.AdaScaleWrapper": fairscale.AdaScaleWrapper,
    "fairscale.optim.OSS": fairscale.OSS,
    "fairscale.optim.grad_scaler.ShardedGradScaler": mh.ShardedGradScaler,
    "fairscale.nn.ShardedDataParallel": mh.ShardedDataParallel,
    "fairscale.nn.FullyShardedDataParallel": fairscale.FullyShardedDataParallel,
    "fairscale.fair_dev.testing.testing.DummyProcessGroup": fairscale.DummyProcessGroup,
    "adaptdl.torch.AdaptiveDataParallel": adaptdl.AdaptiveDataParallel,
    "adaptdl.torch.AdaptiveDataLoader": adaptdl.AdaptiveDataLoader,
    "adaptdl.torch.scaling_rules.ScalingRuleBase": ScalingRuleBase,
    "adaptdl.torch.scaling_rules.AdamScale": mh.AdamScale,
    "adaptdl.torch.scaling_rules.LEGWScale": mh.LEGWScale,
    "fairseq.optim.bmuf.FairseqBMUF": FairseqBMUF,
}
OTHER_ARGUMENTS = {  # a rule, and a rule's optimizer, come first
    "adaptdl.torch.AdaptiveDataParallel",
    *("adaptdl.torch.scaling_rules.ScalingRuleBase", "adaptdl.torch.scaling_rules.AdamScale"),
}


def pairs():
    """(name, their arguments, our function) of each that both have."""
    for name, members in MEMBERS.items():
        short = in_page(name)
        if short not in OURS:
            continue
        for member, given in members.items():
            if member == "__init__" and short in OTHER_ARGUMENTS:
                continue
            ours = inspect.getattr_static(OURS[short], member, None)
            ours = getattr(ours, "__func__", ours)
            if given is not None and inspect.isfunction(ours):
                yield f"{short}.{member}", given, ours, not is_static(OURS[short], member)
    for name, given in FUNCTIONS.items():
        ours = getattr(fairscale, name.rpartition(".")[2], None)
        if ours is not None:
            yield in_page(name), given, ours, False


def is_static(cls, member):
    return isinstance(inspect.getattr_static(cls, member), staticmethod)


PAIRS = {name: rest for name, *rest in pairs()}


@pytest.mark.parametrize("name", PAIRS)
def test_arguments_by_position_are_in_their_order(name):
    given, function, bound = PAIRS[name]
    theirs = []
    for argument in filter(None, given.split(", ")):
        if argument.startswith("*"):
            break
        theirs.append(RENAMED.get(argument, argument))
    parameters = list(inspect.signature(function).parameters.values())[1 if bound else 0 :]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return  # passed on as they come
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ours = [p.name for p in parameters if p.kind in kinds]
    assert ours[: len(theirs)] == theirs


DEFAULTS = {
    (
        in_page(name.replace("Mixin", ""))
        if name in FUNCTIONS
        else f"{in_page(name.rpartition('.')[0].replace('Mixin', ''))}.{name.rpartition('.')[2]}"
    ): given
    for each in STORED.values()
    for name, given in each["defaults"].items()
}
OTHER_DEFAULTS = {  # the table says why
    ("fairscale.optim.grad_scaler.ShardedGradScaler.__init__", "process_group"): None,
    ("fairscale.nn.ShardedDataParallel.__init__", "reduce_buffer_size"): None,
    ("fairscale.nn.ShardedDataParallel.zero_grad", "set_to_none"): True,
    ("fairscale.nn.FullyShardedDataParallel.__init__", "process_group_reduce_scatter"): None,
}


@pytest.mark.parametrize("name", sorted(DEFAULTS.keys() & PAIRS.keys()))
def test_defaults_are_theirs(name):
    parameters = inspect.signature(PAIRS[name][1]).parameters
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        return  # passed on as they come
    for argument, text in DEFAULTS[name].items():
        key = name, argument
        theirs = OTHER_DEFAULTS[key] if key in OTHER_DEFAULTS else eval(text, {"SGD": SGD})
        assert parameters[RENAMED.get(argument, argument)].default == theirs, argument


def test_fairscales_names_of_arguments_of_adascale():
    optimizer = fairscale.AdaScale(SGD(nn.Linear(2, 1).parameters(), lr=0.1), debias_ewma=False)
    state = optimizer.state_dict()
    optimizer.add_param_group(pg={"params": [nn.Parameter(torch.ones(1))]})
    assert len(optimizer.param_groups) == 2
    other = fairscale.AdaScale(SGD(nn.Linear(2, 1).parameters(), lr=0.2))
    other.load_state_dict(data=state)
    assert other.param_groups[0]["lr"] == 0.1
    with pytest.raises(TypeError, match="state_dict and data are one argument"):
        other.load_state_dict(state, data=state)


def test_a_dropped_adascale_takes_its_hooks_along():
    """fairscale's `__del__` is for that. There is none here: a copy would unhook the original."""
    param = nn.Parameter(torch.ones(1))
    optimizer = fairscale.AdaScale(SGD([param], lr=0.1), num_gradients_to_accumulate=2)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None and not param._post_accumulate_grad_hooks and not param._backward_hooks


def test_their_order_is_compared_for_all_that_is_made():
    made = {name.removesuffix(".__init__") for name in PAIRS if name.endswith(".__init__")}
    assert made == OURS.keys() - OTHER_ARGUMENTS
    assert {n.rpartition(".")[2] for n in PAIRS} >= {"wrap", "auto_wrap", "enable_wrap", "step"}


def test_what_is_documented_by_position_works():
    """As a call, because a signature may promise more than the body keeps."""
    module = nn.Linear(2, 1)
    optimizer = fairscale.OSS(module.parameters(), SGD, None, -1, True, False, lr=0.1)
    model = mh.ShardedDataParallel(module, optimizer, None, True, True, 2**23, True, False, True)
    rule = mh.AdaScale(optimizer, 1, 2.0, 0.5, 2, True, True)
    scaler = mh.ShardedGradScaler(4.0, 2.0, 0.5, 10, True, None)
    for _ in range(2):
        scaler.scale(model(torch.ones(3, 2)).sum() / 2).backward()
    scaler.step(rule)
    scaler.update()
    assert optimizer.clip_grad_norm(1.0, 2.0, None) > 0
    wrapped = fairscale.FullyShardedDataParallel(
        nn.Linear(2, 1), None, None, True, True, False, False, True, False
    )
    assert wrapped(torch.ones(3, 2)).shape == (3, 1)

"""docs/migrating-names.md leaves out no public name of the originals, and says nothing else.

The names are those in originals.json, so that this runs anywhere; where an original is installed,
its sources are read again and compared with them.
"""

import contextlib
import inspect
import re

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import manyhands as mh
from helpers.originals import VERSIONS, installed, read, stored

from test_migrating import (  # isort: skip
    ALL_OF_THEIRS,
    NAMES_PAGE,
    ROWS,
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
        pytest.skip(f"{package} is not installed")
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
    module = mh.AdaptiveDataParallel(model, SGD(model.parameters(), lr=0.1), rule)
    return module


def sharded():
    module = nn.Linear(2, 1)
    return mh.ShardedDataParallel(module, mh.OSS(module.parameters(), lr=0.1))


def around(kind, optimizer=SGD):
    return lambda: kind(optimizer(nn.Linear(2, 1).parameters(), lr=0.1))


OFFERED = {  # what stands for an original, as it is once it is made
    "fairscale.optim.AdaScale": around(mh.AdaScale),
    "fairscale.optim.AdaScaleWrapper": lambda: mh.AdaScaleWrapper(nn.Linear(2, 1).parameters()),
    "fairscale.optim.OSS": lambda: mh.OSS(nn.Linear(2, 1).parameters(), lr=0.1),
    "fairscale.optim.grad_scaler.ShardedGradScaler": mh.ShardedGradScaler,
    "fairscale.nn.ShardedDataParallel": sharded,
    "fairscale.nn.FullyShardedDataParallel": lambda: mh.FSDP(nn.Linear(2, 1)),
    "fairscale.fair_dev.testing.testing.DummyProcessGroup": lambda: mh.DummyProcessGroup(0, 1),
    "adaptdl.torch.AdaptiveDataParallel": bound_rule,
    "adaptdl.torch.AdaptiveDataLoader": lambda: mh.AdaptiveDataLoader([0, 1]),
    "adaptdl.torch.gradient_noise_scale.GradientNoiseScale": lambda: bound_rule().gns,
    "fairseq.optim.bmuf.FairseqBMUF": around(mh.BMUF),
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
def test_no_public_member_of_theirs_is_missing(name):
    """Methods, properties and what instances have: in the table, or ours under the same name."""
    short = in_page(name)
    assert short in ARGUMENTS, f"{short} is not in {NAMES_PAGE.name}"
    instance = OFFERED.get(short, lambda: None)()
    missing = set()
    for member, given in MEMBERS[name].items():
        dotted = short if member == "__init__" else f"{short}.{member}"
        if dotted not in ARGUMENTS and member in MEMBERS_OF_CONFIG.get(name, ()):
            assert member in ARGUMENTS[short]
        elif dotted not in ARGUMENTS:
            if given is not None or instance is None or not has(instance, member):
                missing.add(dotted)
        elif given is not None:
            absent = set(plain_arguments(given)) - ARGUMENTS[dotted]
            assert not absent, f"{dotted}({', '.join(absent)}) is not in {NAMES_PAGE.name}"
    assert not missing, f"{missing} not in {NAMES_PAGE.name}"


MEMBERS_OF_CONFIG = {  # a dataclass, whose fields are its arguments
    "fairseq.dataclass.configs.FairseqBMUFConfig": MEMBERS[
        "fairseq.dataclass.configs.FairseqBMUFConfig"
    ]
}


@pytest.mark.parametrize(("package", "module", "name"), EXPORTS)
def test_no_export_of_theirs_is_missing(package, module, name):
    named = [e for e in ARGUMENTS if e.startswith(f"{package}.") and e.endswith(f".{name}")]
    assert named, f"{module}.{name} is not in {NAMES_PAGE.name}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_argument_of_a_function_of_theirs_is_missing(name):
    short = in_page(name)
    given = {argument.lstrip("*") for argument in FUNCTIONS[name].split(", ") if argument}
    assert given <= ARGUMENTS[short]


def test_the_table_has_no_name_that_the_originals_do_not_have():
    known = {in_page(name) for name in (*MEMBERS, *FUNCTIONS)}
    known |= {f"{in_page(name)}.{member}" for name in MEMBERS for member in MEMBERS[name]}
    known |= {f"{module}.{name}" for _, module, name in EXPORTS}
    unknown = {split(name)[0] for name in ALL_OF_THEIRS} - known
    assert unknown == {
        "fairscale.nn.default_auto_wrap_policy.FORCE_LEAF_MODULES",  # set on the function
        "fairscale.nn.default_auto_wrap_policy.EXCLUDE_WRAP_MODULES",
        "fairseq.dataclass.configs.OptimizationConfig",  # of whose options one is about BMUF
    }


def test_what_the_page_says_is_nowhere_here_is_not():
    for dotted, ours in BESIDE.items():
        owner, _, member = dotted.rpartition(".")
        if not ours and owner in OFFERED:
            assert not has(OFFERED[owner](), member), f"{dotted} is offered after all"
        elif not ours:
            assert member not in mh.__all__, f"{dotted} is offered after all"


def test_the_page_says_where_there_is_nothing_in_one_of_two_ways():
    for line in NAMES_PAGE.read_text(encoding="utf-8").splitlines():
        if re.match(r"\| `(fairscale|adaptdl|fairseq)\.", line):
            ours = line.strip().strip("|").split("|")[1].strip()
            assert ours in NOWHERE or "`manyhands." in ours, line


# -- the order of arguments ----------------------------------------------------------------------

RENAMED = {"sharded_optimizer": "optimizer", "pg": "param_group", "data": "state_dict"}
OURS = {
    "fairscale.optim.AdaScale": mh.AdaScale,
    "fairscale.optim.AdaScaleWrapper": mh.AdaScaleWrapper,
    "fairscale.optim.OSS": mh.OSS,
    "fairscale.optim.grad_scaler.ShardedGradScaler": mh.ShardedGradScaler,
    "fairscale.nn.ShardedDataParallel": mh.ShardedDataParallel,
    "fairscale.nn.FullyShardedDataParallel": mh.FSDP,
    "fairscale.fair_dev.testing.testing.DummyProcessGroup": mh.DummyProcessGroup,
    "adaptdl.torch.scaling_rules.ScalingRuleBase": mh.ScalingRuleBase,
    "adaptdl.torch.scaling_rules.AdamScale": mh.AdamScale,
    "adaptdl.torch.scaling_rules.LEGWScale": mh.LEGWScale,
    "fairseq.optim.bmuf.FairseqBMUF": mh.BMUF,
}
OTHER_ARGUMENTS = {  # a rule's optimizer, and BMUF's, come first
    *("adaptdl.torch.scaling_rules.ScalingRuleBase", "adaptdl.torch.scaling_rules.AdamScale"),
    "fairseq.optim.bmuf.FairseqBMUF",
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
        ours = getattr(mh, name.rpartition(".")[2], None)
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


def test_their_order_is_compared_for_all_that_is_made():
    made = {name.removesuffix(".__init__") for name in PAIRS if name.endswith(".__init__")}
    assert made == OURS.keys() - OTHER_ARGUMENTS
    assert {n.rpartition(".")[2] for n in PAIRS} >= {"wrap", "auto_wrap", "enable_wrap", "step"}


def test_what_is_documented_by_position_works():
    """As a call, because a signature may promise more than the body keeps."""
    module = nn.Linear(2, 1)
    optimizer = mh.OSS(module.parameters(), SGD, None, -1, True, False, lr=0.1)
    model = mh.ShardedDataParallel(module, optimizer, None, True, True, 2**23, True, False, True)
    rule = mh.AdaScale(optimizer, 1, 2.0, 0.5, 2, True, True)
    scaler = mh.ShardedGradScaler(4.0, 2.0, 0.5, 10, True, None)
    for _ in range(2):
        scaler.scale(model(torch.ones(3, 2)).sum() / 2).backward()
    scaler.step(rule)
    scaler.update()
    assert optimizer.clip_grad_norm(1.0, 2.0, None) > 0
    wrapped = mh.FSDP(nn.Linear(2, 1), None, None, True, True, False, False, True, False)
    assert wrapped(torch.ones(3, 2)).shape == (3, 1)

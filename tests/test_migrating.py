"""The tables of names and the corrections of docs/migrating.md, compared with the libraries.

The originals' half needs fairscale and adaptdl (benchmarks/peers.py makes an environment with
both) and is skipped without them.
"""

import contextlib
import copy
import functools
import importlib
import inspect
import io
import math
import re
import sys
import typing
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, RMSprop

import manyhands as mh
from helpers.pages import ROOT, TORCHRUN, blocks, launch, run_page
from helpers.public import MODULES, PUBLIC
from helpers.ranks import RanksFailed, run_ranks
from manyhands import fairscale

PAGE = ROOT / "docs" / "migrating.md"
LOOPS = ROOT / "tests" / "helpers" / "documented_loops.md"  # those that the page leaves out
NAMES = PAGE.read_text(encoding="utf-8").partition("\n## Name by name\n")[2]
ORIGINALS = ("fairscale", "adaptdl", "fairseq")


def table_rows():
    """(originals' names, our names) of each row of the tables of names."""
    for line in NAMES.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and cells[0].startswith(tuple(f"`{name}." for name in ORIGINALS)):
            theirs, ours = (re.findall(r"`([^`]+)`", cell) for cell in cells[:2])
            yield theirs, ours


ROWS = list(table_rows())
ALL_OF_THEIRS = [name for theirs, _ in ROWS for name in theirs]
WRITTEN_OUT = [name for name in ALL_OF_THEIRS if name.startswith("fairseq.")]
"""Compared with a list, as all are, in test_migrating_names.py. fairseq is not imported."""
FOR_GPUS = ["fairscale.optim.Adam", "fairscale.optim.Precision"]  # not built where there is none
THEIRS = [name for name in ALL_OF_THEIRS if name not in (*WRITTEN_OUT, *FOR_GPUS)]
OURS = sorted({name for _, ours in ROWS for name in ours})


def split(name):
    """`a.b.C(x, y)` as ("a.b.C", ["x", "y"])."""
    dotted, _, arguments = name.partition("(")
    return dotted, [a.strip() for a in arguments.rstrip(")").split(",") if a.strip()]


def resolve(dotted):
    """What a dotted name stands for; for an attribute that only instances have, True."""
    parts = dotted.split(".")
    for length in range(len(parts) - 1, 0, -1):  # the last part is no module
        try:
            found = importlib.import_module(".".join(parts[:length]))
            break
        except ImportError:
            continue
    for name in parts[length:]:
        if isinstance(found, property):  # go on in what it returns
            getter = found.fget
            hints = typing.get_type_hints(getter, vars(sys.modules[getter.__module__]))
            found = hints["return"]
        if not hasattr(found, name) and sets(found, name):
            return True
        found = getattr(found, name)
    return found


def sets(cls, name):
    """Whether instances have the attribute: of a wrapper one is made, of others the source is read.

    A wrapper shows its options, which no line of its source sets by name.
    """
    if cls is mh.FullyShardedDataParallel:
        return hasattr(mh.FullyShardedDataParallel(torch.nn.Linear(1, 1)), name)
    methods = [m for c in inspect.getmro(cls) for m in vars(c).values() if inspect.isfunction(m)]
    return any(re.search(rf"\bself\.{name}\b[^=\n]*=[^=]", inspect.getsource(m)) for m in methods)


def arguments_of(found):
    """The names that can be given; where a class passes `*args` up, also those of its base."""
    if not inspect.isclass(found):
        return set(inspect.signature(found).parameters)
    names = set()
    for cls in inspect.getmro(found):
        if "__init__" in vars(cls):
            parameters = inspect.signature(vars(cls)["__init__"]).parameters
            names |= set(parameters)
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                break
    return names


def check(name):
    dotted, arguments = split(name)
    found = resolve(dotted)
    missing = set(arguments) - (arguments_of(found) if arguments else set())
    assert not missing, f"{dotted} has no argument {missing}"


@pytest.mark.parametrize("name", OURS)
def test_our_name_exists(name):
    assert name.startswith("manyhands.")
    dotted = split(name)[0].removeprefix("manyhands.").split(".")
    assert dotted[0] in PUBLIC or dotted[1] in MODULES[dotted[0]].__all__
    check(name)


def peer(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = name.partition(".")[0]
        return pytest.importorskip(name, reason=f"{package} is not installed: make test-originals")


def need_peer_of(name):
    """Import the library that a name is of, or skip."""
    if name.startswith("adaptdl"):
        peer("adaptdl.torch.parallel")
    else:
        peer("fairscale.optim.grad_scaler")
        peer("fairscale.nn")


@pytest.mark.parametrize("name", THEIRS)
def test_their_name_exists(name):
    need_peer_of(name)
    check(name)


def test_the_other_documented_loops_run(tmp_path):
    run_page(LOOPS, in_folder=tmp_path)


BY_TORCHRUN = ["scheduler_loop.py", "manual_loop.py"]
ADAPTDL = ["rule_loop.py", "autoscale_loop.py"]
BY_THEMSELVES = [*ADAPTDL, "oss_loop.py", "amp_loop.py"]


@pytest.mark.parametrize("title", [*BY_TORCHRUN, *BY_THEMSELVES])
def test_the_old_side_of_a_loop_runs_too(title, tmp_path):
    peer("adaptdl.torch" if title in ADAPTDL else "fairscale.optim")
    for block in (*blocks(PAGE), *blocks(LOOPS)):
        if block.title is not None:
            (tmp_path / block.title).write_text(block.side(old=True))
    ranks = [*TORCHRUN, "2"]
    done = launch([*(ranks if title in BY_TORCHRUN else [sys.executable]), title], tmp_path)
    assert done.returncode == 0, done.stderr


def documented(title, change=lambda code: code):
    """The names that a documented loop's script makes, and those that it imports."""
    scripts = {block.title: block.side() for block in blocks(LOOPS) if block.title is not None}
    names = {"__name__": "a script that is imported"}
    exec(scripts["problem.py"], names)
    exec(change(scripts[title].replace("from problem import *", "")), names)
    return names


def with_ddp(code):
    """The loop as it is documented for OSS under DDP."""
    before = "    dataloader = mySuperFastDataloader()"
    code = code.replace(before, f"    model = DDP(model)\n{before}")
    code = code.replace("    model = ShardedDDP(model, optimizer)\n", "")
    return f"from torch.nn.parallel import DistributedDataParallel as DDP\n{code}"


@pytest.mark.parametrize(
    ("title", "change", "rtol"),
    [
        pytest.param("oss_loop.py", str, 1e-5, id="OSS and ShardedDDP"),
        pytest.param("oss_loop.py", with_ddp, 1e-5, id="OSS and DDP"),
        pytest.param("amp_loop.py", str, 5e-2, id="AMP"),  # bfloat16
    ],
)
def test_a_documented_sharding_loop_trains_as_one_process_does(title, change, rtol):
    names = documented(title, change)
    rank_of_data, models = [], []

    def my_awesome_model():
        models.append(made := documented(title)["myAwesomeModel"]())
        return made

    def train():
        names.update(
            dist_init=lambda *_: torch.device("cpu"),  # the ranks are here already
            myAwesomeModel=my_awesome_model,
        )
        with unchanged_group():
            names["train"](dist.get_rank(), 2, 3)
        return [p.detach() for p in models[0].parameters()]

    trained = run_ranks(2, train)

    names["dist"] = SimpleNamespace(get_rank=lambda: rank_of_data[-1])
    data = []
    for rank in range(2):
        rank_of_data.append(rank)
        data.append(names["mySuperFastDataloader"]())
    alone = names["myAwesomeModel"]()
    optimizer = SGD(alone.parameters(), lr=1e-2)
    for _ in range(3):
        for pair in zip(*data, strict=True):
            optimizer.zero_grad()
            x, y = (torch.cat(parts) for parts in zip(*pair, strict=True))
            nn.functional.mse_loss(alone(x), y).backward()
            optimizer.step()
    assert [p.tolist() for p in trained[0]] == [p.tolist() for p in trained[1]]
    torch.testing.assert_close(trained[0], list(alone.parameters()), rtol=rtol, atol=rtol / 10)


@contextlib.contextmanager
def unchanged_group():
    """The scripts leave the process group; a forked rank still needs its own."""
    leave, dist.destroy_process_group = dist.destroy_process_group, lambda: None
    try:
        yield
    finally:
        dist.destroy_process_group = leave


# -- what is corrected ---------------------------------------------------------------------------
#
# Each fact is a function that runs either side: `theirs` is None for ours.


class Given(nn.Module):
    """A parameter whose gradient is whatever it is called with."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


def fairscale_or_ours(side):
    return mh.AdaScale if side == "ours" else peer("fairscale.optim").AdaScale


def optimizer_of(side, lr=0.0, passes=2, **options):
    model = Given()
    inner = SGD(model.parameters(), lr=lr)
    options["num_gradients_to_accumulate"] = passes
    return model, fairscale_or_ours(side)(inner, **options)


def backward(model, gradients, loss_scale=1.0):
    model.zero_grad()
    for gradient in gradients:
        (model(gradient) * loss_scale / len(gradients)).backward()


def both_sides(original, ours):
    """Run the test with each side and what it should find there."""
    return pytest.mark.parametrize(("side", "expected"), [("original", original), ("ours", ours)])


def outcome(action):
    """What it returns, or the name of the error that it raises."""
    try:
        return action()
    except Exception as error:
        return type(error).__name__


@both_sides(original=(1.5, 1.4), ours=(1.0, 1.5))
def test_floors_on_every_step(side, expected):
    model, optimizer = optimizer_of(side, smoothing=0.9999)
    for _ in range(500):
        for gradients in ((1.0, 3.0), (1.0, -1.0)):  # products 3 and -1; the noise is 2 in both
            backward(model, gradients)
            optimizer.step()
    sqr = optimizer.noise.sqr_of() if side == "ours" else optimizer._grad_sqr_avg()
    assert (sqr, optimizer.gain()) == pytest.approx(expected, abs=2e-3)


@both_sides(original=2.0, ours=2.5)
def test_a_change_of_scale(side, expected):
    model, optimizer = optimizer_of(side)
    backward(model, (1 + math.sqrt(2 / 3), 1 - math.sqrt(2 / 3)))  # noise 4/3, signal 1/3
    optimizer.step()
    optimizer.set_scale(4.0)
    assert optimizer.gain() == pytest.approx(expected)


@both_sides(original=1.019, ours=1.0)
def test_a_change_of_the_loss_scale(side, expected):
    """The gain with the first step at twice the loss scale, by what it is without a change."""

    def gain(last_loss_scale):
        scaler = SimpleNamespace(is_enabled=lambda: True, get_scale=lambda: 1024.0)
        options = {"grad_scaler": scaler} if side == "ours" else {}
        model, optimizer = optimizer_of(side, smoothing=0.9, **options)
        for step in range(100):
            backward(model, (1.0, 3.0) if step % 2 else (1.0, 0.0), loss_scale=1024.0)
            optimizer.step()
        scaler.get_scale = lambda: last_loss_scale
        backward(model, (1.0, 0.0), loss_scale=last_loss_scale)
        return optimizer.gain()

    assert gain(2048.0) / gain(1024.0) == pytest.approx(expected, abs=1e-3)


@both_sides(original=True, ours=False)
def test_one_nan(side, expected):
    model, optimizer = optimizer_of(side, smoothing=0.9)
    for step in range(100):
        backward(model, (math.nan, 1.0) if step == 3 else (1.0, 2.0))
        optimizer.step()
        model.weight.data.zero_()
    assert math.isnan(optimizer.gain()) is expected


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@both_sides(original=True, ours=False)
def test_norms_of_float16(side, expected):
    model = Given(torch.float16)
    optimizer = fairscale_or_ours(side)(
        SGD(model.parameters(), lr=0.0), num_gradients_to_accumulate=2, is_scaled_loss=False
    )
    for _ in range(2):
        model(300.0).backward()
    gain = optimizer.gain()
    assert math.isnan(gain) is expected
    if not expected:
        assert gain == pytest.approx(1.0)


@both_sides(original=(0.05, 0.1), ours=(0.05, 0.05))
def test_a_schedule_after_loading(side, expected):
    model, optimizer = optimizer_of(side, lr=0.1)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    backward(model, (1.0, 1.0))
    optimizer.step()
    schedule.step()
    inner = optimizer.optimizer if side == "ours" else optimizer._optimizer
    rates = optimizer.param_groups[0]["lr"], inner.param_groups[0]["lr"]
    assert rates == pytest.approx(expected)


@both_sides(original=-1.0, ours=-4 / 3)
def test_a_closure(side, expected):
    model, optimizer = optimizer_of(side, lr=1.0)
    gradients = (1 + math.sqrt(1 / 3), 1 - math.sqrt(1 / 3))  # noise and signal 2/3: gain 4/3

    def closure():
        backward(model, gradients)
        return torch.zeros(())

    optimizer.step(closure)
    assert model.weight.item() == pytest.approx(expected, rel=1e-4)


@both_sides(original="UnpicklingError", ours="loaded")
def test_loading_weights_only(side, expected):
    model, optimizer = optimizer_of(side)
    backward(model, (1.0, 2.0))
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert outcome(lambda: torch.load(file, weights_only=True) and "loaded") == expected


@both_sides(original=("RuntimeError", "AttributeError"), ours=(1.0, 1.0))
def test_a_frozen_and_an_unused_parameter(side, expected):
    def train(frozen):
        model, extra = Given(), nn.Parameter(torch.zeros(1), requires_grad=not frozen)
        inner = SGD([model.weight, extra], lr=0.1)
        optimizer = fairscale_or_ours(side)(inner, num_gradients_to_accumulate=2)
        backward(model, (2.0, 2.0))
        optimizer.step()
        return round(optimizer.gain(), 4)

    assert (outcome(lambda: train(True)), outcome(lambda: train(False))) == expected


@pytest.mark.filterwarnings("ignore")  # fairscale's __del__ recurses without end after the error
@both_sides(original="RuntimeError", ours=-2.0)
def test_one_worker_without_accumulation(side, expected):
    def train():
        model, optimizer = optimizer_of(side, lr=1.0, passes=1)
        backward(model, (2.0,))
        optimizer.step()
        return model.weight.item()

    assert outcome(train) == expected


@both_sides(original=None, ours="RuntimeError")
def test_a_step_without_a_backward(side, expected):
    _, optimizer = optimizer_of(side)
    assert outcome(optimizer.step) == expected


def test_the_wrappers_debias_ewma_is_their_is_scaled_loss():
    wrapper = peer("fairscale.optim").AdaScaleWrapper
    options = {"num_gradients_to_accumulate": 2, "debias_ewma": False}
    optimizer = wrapper(Given().parameters(), **options, lr=0.1)
    assert (optimizer._debias_ewma, optimizer._is_scaled_loss) == (True, False)


# Sharding: two workers (or three), each with its own samples.


def sharding_of(side):
    """(OSS, ShardedDataParallel): theirs in the mode in which it shards gradients."""
    if side == "ours":
        return mh.OSS, mh.ShardedDataParallel
    need_peer_of("fairscale.nn")
    data_parallel = resolve("fairscale.nn.ShardedDataParallel")
    sharded = functools.partial(data_parallel, reduce_buffer_size=0)
    return resolve("fairscale.optim.OSS"), sharded


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def sharded_model(side, module=None, group=None, **options):
    """A model, its optimizer, and the module around it, with gradients of norm 8.92."""
    oss, sharded = sharding_of(side)
    module = small_model() if module is None else module
    optimizer = oss(module.parameters(), optim=SGD, lr=0.1, momentum=0.9, group=group)
    wrapped = sharded(module, optimizer, group, **options)
    return module, optimizer, wrapped


def ranks_or_hang(world_size, fn):
    """What the ranks return, or "hangs"."""
    try:
        return run_ranks(world_size, fn, timeout=5)
    except RanksFailed as error:
        if "did not finish" not in str(error) and "still waiting" not in str(error):
            raise
        return "hangs"


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@both_sides(original=0.48, ours=0.0)
def test_shardedddp_as_it_is_by_default(side, expected):
    """How far off the parameters are after ten steps, by the distance from plain training."""
    options = {} if side == "ours" else {"reduce_buffer_size": 2**23}
    sharding_of(side)
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(10, 2, 4, 8, generator=draw), torch.randn(10, 2, 4, 3, generator=draw)

    def train(model, optimizer, samples):
        for step in range(10):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(samples(x[step])), samples(y[step]))
            loss.backward()
            optimizer.step()

    def ranks():
        module, optimizer, wrapped = sharded_model(side, **options)
        train(wrapped, optimizer, lambda both: both[dist.get_rank()])
        return flat(module)

    alone = small_model()
    inner = SGD(alone.parameters(), lr=0.1, momentum=0.9)
    train(alone, inner, lambda both: both.flatten(0, 1))
    for found in run_ranks(2, ranks):
        off = (found - flat(alone)).norm() / flat(alone).norm()
        assert float(off) == pytest.approx(expected, abs=5e-3 if expected else 1e-6)


@both_sides(original=[195, 195], ours=[99, 96])
def test_gradients_held_after_backward(side, expected):
    options = {} if side == "ours" else {"reduce_buffer_size": 2**23}
    sharding_of(side)

    def held():
        module, _, wrapped = sharded_model(side, **options)
        wrapped(torch.ones(2, 8)).sum().backward()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        if side == "ours":
            return sum(piece.numel() for grad in grads for piece in grad.slices)
        return sum(grad.numel() for grad in grads)

    assert run_ranks(2, held) == expected


class OneOfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 1, bias=False) for _ in range(2)])

    def forward(self, x, which):
        return self.layers[which](x)


@both_sides(original="hangs", ours=[[1.0, 1.0], [1.0, 1.0]])
def test_workers_that_use_different_parameters(side, expected):
    sharding_of(side)

    def step():
        module, optimizer, wrapped = sharded_model(side, OneOfTwo())
        before = [float(layer.weight.detach().sum()) for layer in module.layers]
        wrapped(torch.full((1, 4), 5.0), dist.get_rank()).sum().backward()
        optimizer.step()  # each gradient is 5 on one worker: 2.5 in the mean, at rate 0.1
        after = [float(layer.weight.detach().sum()) for layer in module.layers]
        return [round(a - b, 3) for a, b in zip(before, after, strict=True)]

    assert ranks_or_hang(2, step) == expected


@both_sides(original=[4.49, 7.71], ours=[8.92, 8.92])
def test_torchs_clipping_of_sharded_gradients(side, expected):
    sharding_of(side)

    def clip():
        module, _, wrapped = sharded_model(side)
        wrapped(torch.ones(2, 8)).sum().backward()
        return outcome(lambda: round(float(nn.utils.clip_grad_norm_(module.parameters(), 99)), 2))

    assert run_ranks(2, clip) == expected


class Growing(nn.Module):
    """Of whose three layers the first step uses one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x, layers):
        return sum(layer(x).sum() for layer in self.layers[:layers])


@both_sides(original=8.94, ours=15.49)
def test_clipping_when_more_parameters_have_gradients(side, expected):
    oss, _ = sharding_of(side)

    def clip():
        module = Growing()
        optimizer = oss(module.parameters(), optim=SGD, lr=0.0)
        model = DistributedDataParallel(module, find_unused_parameters=True)
        for layers in (1, 3):
            optimizer.zero_grad()
            model(torch.ones(2, 4), layers).backward()
            norm = float(optimizer.clip_grad_norm(1e9))
        return round(norm, 2)

    assert run_ranks(2, clip) == [expected] * 2


@pytest.mark.filterwarnings("ignore:.*_get_global_rank:FutureWarning")  # fairscale's
@both_sides(original="hangs", ours=[8.92, 8.92, None])
def test_clipping_in_a_group(side, expected):
    sharding_of(side)

    def clip():
        group = dist.new_group([0, 1])
        if dist.get_rank() == 2:
            return None
        _, optimizer, wrapped = sharded_model(side, group=group)
        wrapped(torch.ones(2, 8)).sum().backward()
        return round(float(optimizer.clip_grad_norm(1e9)), 2)

    assert ranks_or_hang(3, clip) == expected


@both_sides(original=[1, 3], ours=[4, 4])
def test_the_dict_that_is_loaded(side, expected):
    """How many momenta are still in it."""
    sharding_of(side)

    def load():
        _, optimizer, wrapped = sharded_model(side)
        wrapped(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict(all_ranks=True)
        assert all("momentum_buffer" in entries for entries in state["state"].values())
        optimizer.load_state_dict(state)
        return sum("momentum_buffer" in entries for entries in state["state"].values())

    assert run_ranks(2, load) == expected


@both_sides(original="AssertionError", ours="stepped")
def test_types_mixed_in_one_optimizer(side, expected):
    oss, _ = sharding_of(side)

    def step():
        module = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).double()])
        optimizer = oss(module.parameters(), optim=SGD, lr=0.1)
        for layer in module:
            layer(torch.ones(2, 4, dtype=layer.weight.dtype)).sum().backward()
        optimizer.step()
        return "stepped"

    assert run_ranks(2, lambda: outcome(step)) == [expected] * 2


@both_sides(original=False, ours=True)
def test_an_exception_inside_no_sync(side, expected):
    """Whether the next step, on samples of each worker's own, is the plain one."""
    sharding_of(side)

    def train(model, optimizer, samples):
        model(samples).mean().backward()
        optimizer.step()

    def step():
        module, optimizer, wrapped = sharded_model(side)
        with contextlib.suppress(KeyError), wrapped.no_sync():
            raise KeyError
        train(wrapped, optimizer, torch.full((1, 8), 1.0 + dist.get_rank()))
        return flat(module)

    alone = small_model()
    inner = SGD(alone.parameters(), lr=0.1)
    train(alone, inner, torch.tensor([[1.0], [2.0]]).expand(2, 8))
    found = [torch.allclose(params, flat(alone), atol=1e-6) for params in run_ranks(2, step)]
    assert found == [expected] * 2


@pytest.mark.filterwarnings("ignore")  # fairscale's scaler warns
@both_sides(original=False, ours=True)
def test_the_scaler_on_a_cpu(side, expected):
    need = mh.ShardedGradScaler
    if side == "original":
        need = peer("fairscale.optim.grad_scaler").ShardedGradScaler
    assert need().is_enabled() is expected


@both_sides(original="hangs", ours=["RuntimeError"] * 2)
def test_a_plain_scaler(side, expected):
    sharding_of(side)

    def step():
        module, optimizer, wrapped = sharded_model(side)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(wrapped(torch.ones(2, 8)).sum()).backward()
        last = module[2].bias.grad
        if side == "original" and last is not None:
            last.fill_(math.inf)
        return outcome(lambda: scaler.step(optimizer))

    assert ranks_or_hang(2, step) == expected


class Box(nn.Module):
    def __init__(self, module, process_group=None):
        super().__init__()
        self.module, self.process_group = module, process_group


def wrapping_of(side):
    return fairscale if side == "ours" else peer("fairscale.nn.wrap")


def auto_wrapped(side, model, **options):
    """With the policy that takes whatever has 100 parameters."""
    w = wrapping_of(side)
    policy = functools.partial(w.default_auto_wrap_policy, min_num_params=100)
    with w.enable_wrap(policy, wrapper_cls=Box):
        return w.auto_wrap(model, **options)


@both_sides(original="NotImplementedError", ours=2)
def test_a_context_inside_another(side, expected):
    w = wrapping_of(side)

    def nest():
        with (
            w.enable_wrap(wrapper_cls=Box, process_group=1),
            w.enable_wrap(wrapper_cls=Box, process_group=2),
        ):
            return w.wrap(nn.Linear(1, 1)).process_group

    assert outcome(nest) == expected


@both_sides(original="TypeError", ours="Linear")
def test_the_policys_options(side, expected):
    def build():
        return type(auto_wrapped(side, nn.Linear(10, 10), min_num_params=111)).__name__

    assert outcome(build) == expected


@both_sides(original="AssertionError", ours="Box")
def test_a_wrapped_module_inside(side, expected):
    model = nn.Sequential(Box(nn.Linear(1, 1)), nn.Linear(10, 10))
    assert outcome(lambda: type(auto_wrapped(side, model)[1]).__name__) == expected


@both_sides(original=2, ours=1)
def test_two_layers_with_one_weight(side, expected):
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    model[1].weight = model[0].weight
    model = auto_wrapped(side, model)
    boxes = [module for module in model.modules() if isinstance(module, Box)]
    assert len(boxes) == expected


@both_sides(original=["Box", "Linear"], ours=["Box", "Box"])
def test_a_module_that_has_two_names(side, expected):
    layer = nn.Linear(10, 10)
    model = auto_wrapped(side, nn.Sequential(layer, layer))
    assert [type(module).__name__ for module in model] == expected
    assert (model[0] is model[1]) is (side == "ours")


# adaptdl


def bind(side, rule, optimizer, noise="GradientNoiseScale", per_pass=1.0):
    """One worker whose passes are counted: adaptdl's rule without its loader, or ours.

    Returns the rule and a switch for whether the next pass is the step's last.
    """
    switch = SimpleNamespace(require_backward_grad_sync=True)
    if side == "ours":
        rule = getattr(mh, rule)()
        rule.initialize(switch, optimizer, patch_optimizer=True)
        rule.set_scale_per_pass(per_pass)
    else:
        rules = peer("adaptdl.torch.scaling_rules")
        statistics = getattr(peer("adaptdl.torch.gradient_noise_scale"), noise)
        rule = getattr(rules, rule)()
        switch.gns = statistics(switch, optimizer, num_replicas=1, accum_scale=per_pass)
        rule.initialize(switch, optimizer, patch_optimizer=True)
    return rule, switch


@both_sides(original=-2.0, ours=-1.0)
def test_accumulated_gradients(side, expected):
    model = Given()
    rule, switch = bind(side, "LinearScale", SGD(model.parameters(), lr=1.0), per_pass=0.5)
    for last in (False, True):
        switch.require_backward_grad_sync = last
        model(1.0).backward()
    rule.step()
    assert model.weight.item() == expected


def adam_steps(side, change_at=None, steps=12):
    model = Given()
    optimizer = Adam(model.parameters(), lr=0.1)
    rule, switch = bind(side, "AdamScale", optimizer, "AdamGradientNoiseScale", per_pass=2.0)
    for step in range(steps):
        if step == change_at:
            new = switch.gns.set_accum_scale if side == "original" else rule.set_scale_per_pass
            new(4.0)
        optimizer.zero_grad()
        model(1.0 + step % 3).backward()
        optimizer.step()
    return "stepped"


@both_sides(original="RuntimeError", ours="stepped")
def test_adamscale_through_a_change_of_scale(side, expected):
    assert outcome(lambda: adam_steps(side, change_at=8)) == expected


@both_sides(original="KeyError", ours="bound")
def test_adamscale_around_rmsprop(side, expected):
    inner = RMSprop(Given().parameters(), lr=0.1)
    found = outcome(lambda: bind(side, "AdamScale", inner, "AdamGradientNoiseScale") and "bound")
    assert found == expected


@both_sides(original="RuntimeError", ours="stepped")
def test_a_sparse_gradient(side, expected):
    model = nn.Embedding(3, 2, sparse=True)

    def train():
        rule, _ = bind(side, "AdaScale", SGD(model.parameters(), lr=0.1))
        model(torch.tensor([1])).sum().backward()
        rule.step()
        return "stepped"

    assert outcome(train) == expected


@both_sides(original=None, ours=3.0)
def test_the_closures_loss(side, expected):
    model = Given()
    rule, _ = bind(side, "AdaScale", SGD(model.parameters(), lr=0.1))
    if side == "original":
        model(1.0).backward()

    def closure():
        model.zero_grad()
        model(1.0).backward()
        return 3.0

    assert rule.step(closure) == expected


@both_sides(original=-4.5, ours=0.5)
def test_groups_that_are_added(side, expected):
    model, added = Given(), Given()
    optimizer = SGD(model.parameters(), lr=0.0)
    rule, switch = bind(side, "AdaScale", optimizer)
    group = {"params": list(added.parameters())}
    (rule if side == "ours" else optimizer).add_param_group(group)
    for last in (False, True):
        switch.require_backward_grad_sync = last
        (model(1.0 + last) + added(1.0 + last)).backward()
    rule.step()
    noise = rule.noise.raw_var if side == "ours" else switch.gns.raw_var_avg
    assert noise[0] == pytest.approx(0.5)
    assert float(noise[1]) == pytest.approx(expected)  # the same gradients as the first group


@both_sides(original="UnpicklingError", ours="loaded")
def test_adaptdls_checkpoint_weights_only(side, expected):
    model = Given()
    optimizer = SGD(model.parameters(), lr=0.1)
    rule, _ = bind(side, "AdaScale", optimizer)
    model(1.0).backward()
    rule.step()
    file = io.BytesIO()
    torch.save((rule if side == "ours" else optimizer).state_dict(), file)
    file.seek(0)
    assert outcome(lambda: torch.load(file, weights_only=True) and "loaded") == expected

"""Our optimizers and wrappers inside Accelerate's loop, as somebody would use them there.

The oracle is the plain run, in one process, with nothing of ours or of Accelerate's in it: the
gradient of a step is the mean of the small batches that it had.
"""

import contextlib
import importlib.util
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from helpers.ranks import as_under_torchrun, on_ranks, raises_on_ranks, run_ranks
from helpers.run_command import Command
from helpers.scaling_oracle import PlainRun, adamscale, adascale, make_batches, make_model
from manyhands import adaptdl
from manyhands.ramp import _ramp

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is missing"
)

N, EPOCHS, BATCHES = 4, 2, 7  # passes of a step; small batches of each rank in an epoch: 4 + 3
MOMENTUM = {"lr": 0.05, "momentum": 0.9}
RULES = {
    "AdaScale": (mh.AdaScale, adascale, SGD, MOMENTUM),
    "AdamScale": (mh.AdamScale, adamscale, AdamW, {"lr": 0.01}),
}
BEFORE, AFTER = "the rule, then prepare", "prepare, then the rule"


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Once, before the ranks are forked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import accelerate
        import accelerate.checkpointing
        import accelerate.utils.fsdp_utils

    return accelerate


def prepare(*objects):
    from manyhands.integrations import accelerate

    return accelerate.prepare(*objects)


def accelerator_of(**options):
    """This rank's Accelerator, as under torchrun."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    as_under_torchrun(OMP_NUM_THREADS="1")
    options = {"gradient_accumulation_steps": N, **options}
    return Accelerator(cpu=True, **options)


def data():
    """The small batches of an epoch, of all ranks."""
    return make_batches(1, BATCHES * 2)


def loader():
    x, y = data()
    return DataLoader(TensorDataset(x[0].flatten(0, 1), y[0].flatten(0, 1)), batch_size=4)


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x), y)


def epochs_of(accelerator, model, optimizer, batches, schedule=None, epochs=EPOCHS, clip=None):
    """The loop of Accelerate's documentation."""
    for _ in range(epochs):
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x, y))
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                optimizer.zero_grad()


def whole(model):
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for p in model.parameters()
    ]


def numbers(rule):
    shown = rule.snapshot()
    keys = ("scale", "passes", "gain", "progress", "short", "step")
    return torch.tensor([shown[key] for key in keys], dtype=torch.float64)


def prepared(accelerator, order, name, model, **options):
    """The model, the optimizer that the loop uses, and the rule."""
    rule, _, optim, arguments = RULES[name]
    plain = optim(model.parameters(), **arguments)
    options["measure_every"] = 1
    if order == AFTER:
        model, used = accelerator.prepare(model, plain)
        used = rule(used, **options)
        return model, used, used
    made = rule(plain, num_gradients_to_accumulate=accelerator, **options)
    return (*accelerator.prepare(model, made), made)


def train(order, name="AdaScale", clip=None, precision="no", epochs=EPOCHS, **options):
    accelerator = accelerator_of(mixed_precision=precision)
    model, used, rule = prepared(accelerator, order, name, make_model(), **options)
    batches = accelerator.prepare(loader())
    epochs_of(accelerator, model, used, batches, clip=clip, epochs=epochs)
    return whole(model), numbers(rule)


class Autocast(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            result = self.model(x)
        return result.float()


def plain(name="AdaScale", clip=None, precision="no", epochs=EPOCHS, size=2):
    _, factor, optim, arguments = RULES[name]
    model = make_model()
    optimizer = optim(model.parameters(), **arguments)
    if clip is not None:

        def clipped(*_):
            nn.utils.clip_grad_norm_(model.parameters(), clip)

        optimizer.register_step_pre_hook(clipped)
    computed = Autocast(model) if precision == "bf16" else model
    run = PlainRun(computed, optimizer, factor, preconditioned=name == "AdamScale")
    x, y = data()
    whole_step, batches = N * size, 2 * BATCHES
    ends = [*range(whole_step, batches, whole_step), batches]
    for _ in range(epochs):
        for begin, end in zip([0, *ends], ends, strict=False):
            run.step(x[0, begin:end], y[0, begin:end])
    last = ends[-1] - ends[-2]
    short = 0 if last == whole_step else epochs
    read = [last, last / size, run.gains[-1], run.progress, short, epochs * len(ends)]
    return [p.detach() for p in model.parameters()], torch.tensor(read, dtype=torch.float64)


def assert_plain(result, expected):
    torch.testing.assert_close(result[1], expected[1], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(result[0], expected[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("order", [BEFORE, AFTER])
@pytest.mark.parametrize("name", RULES)
def test_two_ranks_are_the_plain_run(order, name):
    expected = plain(name)
    assert expected[1][4] == EPOCHS  # each epoch ends with a short step
    for result in run_ranks(2, train, order, name):
        assert_plain(result, expected)


@pytest.mark.parametrize("order", [BEFORE, AFTER])
@pytest.mark.parametrize("setting", [{"clip": 0.5}, {"precision": "bf16"}])
def test_clipping_and_bfloat16(order, setting):
    expected = plain(**setting)
    for result in run_ranks(2, train, order, **setting):
        assert_plain(result, expected)


@pytest.mark.parametrize("order", [BEFORE, AFTER])
def test_one_rank_is_the_plain_run(order):
    (result,) = run_ranks(1, train, order)
    assert_plain(result, plain(size=1))


def test_the_noise_scale_of_a_prepared_optimizer_is_that_of_a_bare_one():
    def measured(order):
        accelerator = accelerator_of()
        model = make_model()
        plain = SGD(model.parameters(), lr=0.0)
        if order == BEFORE:
            noise = mh.NoiseScale(plain, num_gradients_to_accumulate=accelerator)
            model, used = accelerator.prepare(model, plain)
        else:
            model, used = accelerator.prepare(model, plain)
            noise = mh.NoiseScale(used)
        epochs_of(accelerator, model, used, accelerator.prepare(loader()))
        return [noise.steps, noise.squared_norm, noise.variance]

    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.0)
    sums = []
    x, y = data()
    for begin, end in ((0, 8), (8, 14)) * EPOCHS:
        run = PlainRun(model, optimizer, adascale, smoothing=0.0)
        run.step(x[0, begin:end], y[0, begin:end])
        sums.append((run.sqr_averages[0].value, run.var_averages[0].value))
    weights = [0.99**i for i in reversed(range(len(sums)))]
    expected = [4]
    for each in zip(*sums, strict=True):
        expected.append(sum(w * s for w, s in zip(weights, each, strict=True)) / sum(weights))
    for results in run_ranks(2, lambda: [measured(BEFORE), measured(AFTER)]):
        for result in results:
            assert result == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("order", [BEFORE, AFTER])
@pytest.mark.parametrize("rule", [True, False])
def test_a_weighted_mean_is_not_divided_by_the_passes_once_more(order, rule):
    """Micro-batches of different sizes, steps of four passes, and a last one of three."""
    sizes = [[3, 1, 4, 2, 2, 4, 1], [1, 4, 4, 3, 4, 2, 0]]  # of each rank

    def micro_batches(rank):
        x, y = data()
        return [(x[0, 2 * a + rank, :n], y[0, 2 * a + rank, :n]) for a, n in enumerate(sizes[rank])]

    def loss_sum(model, x, y):
        return nn.functional.mse_loss(model(x), y, reduction="sum")

    def train():
        accelerator = accelerator_of()
        model = make_model()
        optimizer = SGD(model.parameters(), **MOMENTUM)
        if rule:
            model, used, rule_of_it = prepared(accelerator, order, "AdaScale", model)
        else:
            model, used = accelerator.prepare(model, optimizer)
        batches = micro_batches(dist.get_rank())
        for _ in range(EPOCHS):
            for own in (batches[:4], batches[4:]):
                mean = mh.WeightedMean([len(x) for x, _ in own], rule_of_it if rule else used)
                for i, (x, y) in enumerate(own):
                    accelerator.gradient_state._set_sync_gradients(i == len(own) - 1)
                    with contextlib.nullcontext() if i == len(own) - 1 else model.no_sync():
                        accelerator.backward(mean(loss_sum(model, x, y)))
                    used.step()
                    used.zero_grad()
        return whole(model), numbers(rule_of_it) if rule else None

    def plain_loop():
        """One process, and the same rule told of each step's passes."""
        model = make_model()
        optimizer = SGD(model.parameters(), **MOMENTUM)
        if rule:
            optimizer = mh.AdaScale(optimizer, num_gradients_to_accumulate=8)
        batches = [each for pair in zip(*map(micro_batches, (0, 1)), strict=True) for each in pair]
        for _ in range(EPOCHS):
            for own in (batches[:8], batches[8:]):
                if rule:
                    optimizer.set_num_gradients_to_accumulate(len(own))
                mean = mh.WeightedMean([len(x) for x, _ in own], optimizer)
                for x, y in own:
                    mean(loss_sum(model, x, y)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return whole(model), optimizer.progress if rule else None

    params, progress = plain_loop()
    for ours, read in run_ranks(2, train):
        torch.testing.assert_close(ours, params, rtol=1e-4, atol=1e-6)
        if rule:
            assert float(read[3]) == pytest.approx(progress, rel=1e-4)


# -- float16, with a scaler --------------------------------------------------------------------


class Overflowing(nn.Module):
    """A model whose gradient overflows where an input is 1000."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, x):
        out = self.inner(x)
        return out * torch.where((x == 1000.0).any(), torch.inf, 1.0)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("order", [BEFORE, AFTER])
def test_a_step_that_overflows_is_skipped_and_said_to_be(order, clip):
    """Accelerate refuses float16 on a CPU, so its scaler is set by hand."""

    def train():
        accelerator = accelerator_of(gradient_accumulation_steps=1)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        accelerator.native_amp = True
        accelerator.state._mixed_precision = "fp16"
        model = Overflowing()
        plain = SGD(model.parameters(), **MOMENTUM)
        if order == AFTER:
            used = rule = mh.AdaScale(accelerator.prepare_optimizer(plain))
        else:
            rule = mh.AdaScale(
                plain,
                num_gradients_to_accumulate=accelerator,
                grad_scaler=accelerator.scaler,
            )
            used = accelerator.prepare_optimizer(rule)
        accelerated = accelerator._optimizers[0]
        model = nn.parallel.DistributedDataParallel(model)
        x, y = make_batches(6, 2)
        x[2, 0] = x[4] = 1000.0
        seen = []
        for step in range(6):
            rank = dist.get_rank()
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x[step, rank], y[step, rank]))
                if clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                used.step()
                used.zero_grad()
            seen.append([accelerated.step_was_skipped, accelerator.optimizer_step_was_skipped])
        return (
            seen,
            whole(model),
            rule.progress,
            rule.snapshot()["skipped"],
            accelerator.scaler.get_scale(),
        )

    def expected():
        model = make_model()
        optimizer = SGD(model.parameters(), **MOMENTUM)
        if clip is not None:
            optimizer.register_step_pre_hook(
                lambda *_: nn.utils.clip_grad_norm_(model.parameters(), clip) and None
            )
        run = PlainRun(model, optimizer, adascale)
        x, y = make_batches(6, 2)
        for step in (0, 1, 3, 5):
            run.step(x[step], y[step])
        return [p.detach() for p in model.parameters()], run.progress

    params, progress = expected()
    for seen, ours, own_progress, skipped, scale in run_ranks(2, train):
        assert seen == [[step in (2, 4)] * 2 for step in range(6)]
        torch.testing.assert_close(ours, params, rtol=1e-4, atol=1e-6)
        assert own_progress == pytest.approx(progress, rel=1e-4)
        assert (skipped, scale) == (2, 256.0)


# -- schedules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [BEFORE, AFTER])
@on_ranks(2)
def test_a_prepared_schedule_steps_by_progress(order):
    accelerator = accelerator_of()
    model = make_model()
    plain = SGD(model.parameters(), **MOMENTUM)
    decay = LambdaLR(plain, lambda step: 0.9**step)
    if order == AFTER:
        model, used = accelerator.prepare(model, plain)
        used = rule = mh.AdaScale(used)
    else:
        rule = mh.AdaScale(plain, num_gradients_to_accumulate=accelerator)
        model, used = accelerator.prepare(model, rule)
    schedule, batches = accelerator.prepare(mh.ProgressScheduler(decay, rule), loader())
    epochs_of(accelerator, model, used, batches, schedule)
    progress = rule.progress
    last = schedule.get_last_lr()[0]
    rate = plain.param_groups[0]["lr"]
    assert last == rate == pytest.approx(0.05 * 0.9 ** int(progress))
    assert progress > 4


# -- checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [BEFORE, AFTER])
@pytest.mark.parametrize("size", [1, 2])
def test_a_saved_run_goes_on_as_the_whole_one(order, size, tmp_path):
    """Saved by two ranks after one epoch; the second epoch on as many, or on one."""

    def half(load, passes):
        accelerator = accelerator_of(gradient_accumulation_steps=passes)
        model, used, rule = prepared(accelerator, order, "AdaScale", make_model())
        schedule = accelerator.prepare(mh.ProgressScheduler(LambdaLR(rule, lambda _: 1.0), rule))
        batches = accelerator.prepare(loader())
        if load:
            accelerator.load_state(str(tmp_path))
        before = rule.progress
        epochs_of(accelerator, model, used, batches, schedule, epochs=1)
        if not load:
            accelerator.save_state(str(tmp_path))
        return before, rule.progress, whole(model), numbers(rule)

    expected = run_ranks(2, train, order)[0]
    _, saved, _, _ = run_ranks(2, half, False, N)[0]
    # on one rank a step has twice the passes: the same batch
    for at_load, _, params, read in run_ranks(size, half, True, N * 2 // size):
        assert at_load == saved
        torch.testing.assert_close(params, expected[0], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(read[[0, 2, 3, 4, 5]], expected[1][[0, 2, 3, 4, 5]])


# -- the batch that sets itself ----------------------------------------------------------------

RAMP = {"max_scale": 8, "goal": "steps"}


def ramp_of(optimizer):
    rule = mh.AdaScale(optimizer, smoothing=0.9)
    return rule, mh.Ramp(rule, **RAMP)


def ramped_epochs(folder=None, load=False, epochs=4):
    """The loop of the page; saved after the second epoch, or continued from there."""
    accelerator = accelerator_of(gradient_accumulation_steps=1)
    model = make_model()
    model, plain, batches = accelerator.prepare(
        model, SGD(model.parameters(), **MOMENTUM), loader()
    )
    rule, ramp = ramp_of(plain)
    accelerator.register_for_checkpointing(ramp)
    scales = []
    if load:
        accelerator.load_state(str(folder))
        accelerator.gradient_accumulation_steps, accelerator.step = ramp.passes, 0
    for epoch in range(2 if load else 0, epochs):
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x, y))
                rule.step()
                rule.zero_grad()
                if accelerator.sync_gradients:
                    scales.append(rule.snapshot()["scale"])
                    accelerator.gradient_accumulation_steps, accelerator.step = ramp.passes, 0
        if epoch == 1 and folder is not None and not load:
            accelerator.save_state(str(folder))
    return whole(model), rule.progress, ramp.passes, scales


def test_a_ramp_under_accelerate_is_the_plain_loop_and_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(_ramp, "EVERY", 1)

    def plain_loop():
        model = make_model()
        wrapped = nn.parallel.DistributedDataParallel(model)
        rule, ramp = ramp_of(SGD(model.parameters(), **MOMENTUM))
        x, y = data()
        own, scales = range(dist.get_rank(), 2 * BATCHES, 2), []
        for _ in range(4):
            first = 0
            while first < BATCHES:
                passes = min(ramp.passes, BATCHES - first)  # fewer at the end of an epoch
                rule._core.batch.passes = passes
                for i in own[first : first + passes]:
                    (loss_of(wrapped, x[0, i], y[0, i]) / passes).backward()
                rule.step()
                rule.zero_grad()
                first += passes
                scales.append(rule.snapshot()["scale"])
        return whole(model), rule.progress, ramp.passes, scales

    def all_of_them():
        return plain_loop(), ramped_epochs(tmp_path), ramped_epochs(tmp_path, load=True)

    for expected, ours, resumed in run_ranks(2, all_of_them):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)
        assert set(ours[3]) == {4.0, 8.0}  # of the next step
        torch.testing.assert_close(resumed[:3], ours[:3], rtol=0, atol=0)


# -- sharding, blocks --------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["OSS", "sharded", "FSDP"])
@pytest.mark.parametrize("order", [BEFORE, AFTER])
def test_sharding_under_accelerate_is_the_plain_run(wrapper, order, tmp_path):
    def make(accelerator):
        model = make_model()
        if wrapper == "FSDP":
            model = mh.FSDP(model)
            optimizer = SGD(model.parameters(), **MOMENTUM)
        else:
            optimizer = mh.OSS(
                model.parameters(), optim=SGD, bucket_size=8, gather_state=True, **MOMENTUM
            )
        if wrapper == "sharded":
            model = mh.ShardedDataParallel(model, optimizer)
        options = {"measure_every": 1}
        if order == AFTER:
            model, used = prepare(accelerator, model, optimizer)
            used = rule = mh.AdaScale(used, **options)
        else:
            rule = mh.AdaScale(optimizer, num_gradients_to_accumulate=accelerator, **options)
            model, used = prepare(accelerator, model, rule)
        return model, used, rule

    def train():
        accelerator = accelerator_of()
        model, used, rule = make(accelerator)
        epochs_of(accelerator, model, used, accelerator.prepare(loader()))
        result = whole(model), numbers(rule)
        if wrapper == "FSDP":  # saved by mh.save
            return result, result
        accelerator.save_state(str(tmp_path))
        accelerator = accelerator_of()
        model, used, rule = make(accelerator)
        accelerator.load_state(str(tmp_path))
        return result, (whole(model), numbers(rule))

    expected = plain()
    for result, loaded in run_ranks(2, train):
        assert_plain(result, expected)
        torch.testing.assert_close(loaded[0], result[0], rtol=0, atol=0)
        assert loaded[1][3] == result[1][3]


@pytest.mark.parametrize("rule", [mh.AdaScale, mh.AdamScale, None])
@pytest.mark.parametrize("wrapper", ["OSS", "sharded"])
@pytest.mark.parametrize("order", [BEFORE, AFTER])
def test_a_sharded_run_goes_on_on_one_process_and_without_sharding(wrapper, order, rule, tmp_path):
    """Saved by two ranks after one epoch; the second epoch on two, on one, and without wrapper."""
    if rule is None and order == BEFORE:
        pytest.skip("without a rule there is one order")
    kind = SGD if rule is mh.AdaScale else AdamW
    arguments = MOMENTUM if kind is SGD else {"lr": 0.01}

    def epoch(size, wrapper, load=None, save=None):
        accelerator = accelerator_of(gradient_accumulation_steps=N * 2 // size)
        model = make_model()
        optimizer = (
            kind(model.parameters(), **arguments)
            if wrapper == "plain"
            else mh.OSS(model.parameters(), optim=kind, gather_state=True, **arguments)
        )
        if wrapper == "sharded":
            model = mh.ShardedDataParallel(model, optimizer)
        if rule is not None and order == BEFORE:
            optimizer = rule(optimizer, num_gradients_to_accumulate=accelerator)
        model, used = prepare(accelerator, model, optimizer)
        if rule is not None and order == AFTER:
            used = rule(used)
        if load is not None:
            accelerator.load_state(str(load))
        epochs_of(accelerator, model, used, accelerator.prepare(loader()), epochs=1)
        if save is not None:
            accelerator.save_state(str(save))
        return whole(model)

    first, second = tmp_path / "first", tmp_path / "second"
    run_ranks(2, epoch, 2, wrapper, None, first)
    expected = run_ranks(2, epoch, 2, "plain", first)[0]
    for size, again in ((2, wrapper), (1, wrapper), (1, "plain")):
        for params in run_ranks(size, epoch, size, again, first, second):
            torch.testing.assert_close(params, expected, rtol=1e-4, atol=1e-6)


class Tied(nn.Module):
    """A model whose first and last layer have one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x))


@pytest.mark.parametrize("wrapper", ["plain", "OSS", "sharded"])
def test_tied_weights_are_saved_whole_and_loaded(wrapper, tmp_path):
    def make(wrapper):
        accelerator = accelerator_of(gradient_accumulation_steps=1)
        model = Tied()
        optimizer = (
            SGD(model.parameters(), **MOMENTUM)
            if wrapper == "plain"
            else mh.OSS(model.parameters(), optim=SGD, gather_state=True, **MOMENTUM)
        )
        if wrapper == "sharded":
            model = mh.ShardedDataParallel(model, optimizer)
        return accelerator, *prepare(accelerator, model, optimizer)

    def train():
        accelerator, model, optimizer = make(wrapper)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        accelerator.save_state(str(tmp_path / "state"))
        accelerator.save_model(model, str(tmp_path / "model"))
        return whole(model), type(accelerator.unwrap_model(model)).__name__

    def load(wrapper):
        accelerator, model, _ = make(wrapper)
        accelerator.load_state(str(tmp_path / "state"))
        return whole(model)

    from safetensors.torch import load_file

    trained, inner = run_ranks(2, train)[0]
    assert inner == "Tied"
    names = ["first.weight", "first.bias", "last.bias"]
    file = load_file(tmp_path / "model" / "model.safetensors")
    assert sorted(file) in (sorted(names), sorted([*names[1:], "last.weight"]))
    for size in (1, 2):
        for again in {wrapper, "plain"}:
            for params in run_ranks(size, load, again):
                torch.testing.assert_close(params, trained, rtol=0, atol=0)


@on_ranks(1, raises=RuntimeError, match=r'Missing key.* "2.weight", "2.bias"')
def test_weights_that_are_missing_are_an_error(tmp_path):
    accelerator = accelerator_of()
    prepare(accelerator, make_model(), SGD(make_model().parameters(), lr=0.1))
    accelerator.save_state(str(tmp_path))
    from safetensors.torch import load_file, save_file

    file = tmp_path / "model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if name[0] != "2"}, file)
    accelerator.load_state(str(tmp_path))


@on_ranks(2, raises=RuntimeError, match=r"Write mh.save\(path, model=model")
def test_a_sharded_model_is_an_error_that_says_what_to_use(tmp_path):
    accelerator = accelerator_of()
    model = mh.FSDP(make_model())
    prepare(accelerator, model, SGD(model.parameters(), lr=0.1))
    accelerator.save_state(str(tmp_path))


@on_ranks(2)
def test_blocks_in_place_of_local_sgd_are_blocks_in_a_plain_loop():
    expected = make_model()
    optimizer = mh.DiLoCo(SGD(expected.parameters(), **MOMENTUM), every=2)
    x, y = data()
    rank = dist.get_rank()
    for passes in ((0, 1, 2, 3), (4, 5, 6)) * EPOCHS:
        for a in passes:
            (loss_of(expected, x[0, 2 * a + rank], y[0, 2 * a + rank]) / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    accelerator = accelerator_of()
    model = make_model()
    optimizer = mh.DiLoCo(SGD(model.parameters(), **MOMENTUM), every=2)
    model, used = prepare(accelerator, model, optimizer)
    epochs_of(accelerator, model, used, accelerator.prepare(loader()))
    torch.testing.assert_close(whole(model), whole(expected), rtol=0, atol=0)


def test_blocks_are_saved_synchronized(tmp_path):
    """Saved in the middle of a block: all workers then have what the files have."""

    def make():
        accelerator = accelerator_of(gradient_accumulation_steps=1)
        model = make_model()
        optimizer = mh.DiLoCo(SGD(model.parameters(), **MOMENTUM), every=3)
        return accelerator, *prepare(accelerator, model, optimizer)

    def train():
        accelerator, model, optimizer = make()
        batches = accelerator.prepare(loader())
        epochs_of(accelerator, model, optimizer, batches, epochs=1)
        accelerator.save_state(str(tmp_path))
        rounds = optimizer.optimizer.rounds
        accelerator.save_state(str(tmp_path))
        assert optimizer.optimizer.rounds == rounds == 3  # after 3, 6 and 7 steps
        return whole(model)

    def load():
        accelerator, model, _ = make()
        accelerator.load_state(str(tmp_path))
        return whole(model)

    results = run_ranks(2, train)
    for size in (1, 2):
        results += run_ranks(size, load)
    for params in results:
        torch.testing.assert_close(params, results[0], rtol=0, atol=0)


# -- mistakes ----------------------------------------------------------------------------------


def fsdp2():
    """Set up what Accelerate does on GPUs; on CPUs it leaves its FSDP out without a word."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator = accelerator_of()
    # every new AcceleratorState() takes it from there
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    assert accelerator.is_fsdp2
    return accelerator


def test_fsdp2_of_accelerate_is_the_plain_run():
    def train():
        accelerator = fsdp2()
        model, used, rule = prepared(accelerator, AFTER, "AdaScale", make_model())
        epochs_of(accelerator, model, used, accelerator.prepare(loader()), clip=0.5)
        return whole(model), numbers(rule)

    expected = plain(clip=0.5)
    for result in run_ranks(2, train):
        assert_plain(result, expected)


def test_a_saved_run_of_fsdp2_goes_on_as_the_whole_one(tmp_path):
    def make():
        from manyhands.integrations.accelerate import RuleState

        accelerator = fsdp2()
        accelerator.state.fsdp_plugin.state_dict_type = "SHARDED_STATE_DICT"
        accelerator.state.fsdp_plugin.set_state_dict_type()
        model, used, rule = prepared(accelerator, AFTER, "AdaScale", make_model())
        accelerator.register_for_checkpointing(RuleState(rule))
        return accelerator, model, used, rule

    def train():
        accelerator, model, used, rule = make()
        batches = accelerator.prepare(loader())
        epochs_of(accelerator, model, used, batches, epochs=1)
        accelerator.save_state(str(tmp_path))
        epochs_of(accelerator, model, used, batches, epochs=1)
        expected = whole(model), numbers(rule)
        accelerator, model, used, rule = make()
        accelerator.load_state(str(tmp_path))
        epochs_of(accelerator, model, used, accelerator.prepare(loader()), epochs=1)
        return (whole(model), numbers(rule)), expected

    for ours, expected in run_ranks(2, train):
        assert_plain(ours, plain())
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-8)


@on_ranks(2, raises=RuntimeError, match=r"mh.AdaScale\(accelerator.prepare\(optimizer\)\)")
def test_a_rule_before_fsdp2_is_an_error_before_the_first_step():
    accelerator = fsdp2()
    model, used, _ = prepared(accelerator, BEFORE, "AdaScale", make_model())
    epochs_of(accelerator, model, used, accelerator.prepare(loader()))


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "FSDP"])
@on_ranks(1, raises=TypeError, match="AdaScale (cannot measure|needs) .* Use ")
def test_what_cannot_be_measured(kind):
    from accelerate.utils import DistributedType

    accelerator = accelerator_of()
    optimizer = accelerator.prepare(SGD(make_model().parameters(), lr=0.1))
    accelerator.state.distributed_type = DistributedType(kind)
    accelerator.state.fsdp_plugin = type("Plugin", (), {"fsdp_version": 1})
    mh.AdaScale(optimizer)


@on_ranks(2, raises=ValueError, match=r"accumulates 4 passes. Omit the argument")
def test_a_number_of_passes_that_is_not_accelerates():
    accelerator = accelerator_of()
    optimizer = accelerator.prepare(SGD(make_model().parameters(), lr=0.1))
    mh.AdaScale(optimizer, num_gradients_to_accumulate=3)


@on_ranks(
    2,
    raises=TypeError,
    match=r"integrations.accelerate.prepare\(accelerator, model, mh.DiLoCo\(optimizer",
)
def test_blocks_around_a_prepared_optimizer():
    accelerator = accelerator_of()
    optimizer = accelerator.prepare(SGD(make_model().parameters(), lr=0.1))
    mh.DiLoCo(optimizer, every=2)


OURS = r"manyhands.integrations.accelerate.prepare"


@pytest.mark.parametrize("wrapper", ["Sharded", "FullySharded", "Adaptive"])
def test_accelerates_own_prepare_of_a_model_that_averages_its_gradients(wrapper):
    def prepared_by_accelerate():
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        if wrapper == "Sharded":
            optimizer = mh.OSS(model.parameters(), optim=SGD, lr=0.1)
            model = mh.ShardedDataParallel(model, optimizer)
        elif wrapper == "FullySharded":
            model = mh.FSDP(model)
        else:
            model = adaptdl.AdaptiveDataParallel(model, optimizer)
        accelerator_of().prepare(model)

    match = f"{wrapper}DataParallel is inside DistributedDataParallel.*{OURS}"
    raises_on_ranks(2, RuntimeError, prepared_by_accelerate, match=match)


def test_a_model_of_blocks_that_accelerates_own_prepare_has_put_in_ddp():
    def train(order):
        accelerator = accelerator_of(gradient_accumulation_steps=1)
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if order == BEFORE:
                optimizer = mh.DiLoCo(optimizer, every=2)
            model = accelerator.prepare(model)
            if order == AFTER:
                optimizer = mh.DiLoCo(optimizer, every=2)
            epochs_of(accelerator, model, optimizer, accelerator.prepare(loader()), epochs=1)
        return [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]

    for texts in run_ranks(2, lambda: [train(BEFORE), train(AFTER)]):
        assert all(any(OURS in text for text in of_order) for of_order in texts), texts


@pytest.mark.parametrize("rule", [True, False])
def test_accelerates_own_prepare_of_oss_warns_that_parameters_are_not_saved(rule):
    def prepared(by):
        model = make_model()
        optimizer = mh.OSS(model.parameters(), optim=SGD, lr=0.1, gather_state=True)
        accelerator = accelerator_of()
        if rule:
            optimizer = mh.AdaScale(optimizer, num_gradients_to_accumulate=accelerator)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            by(accelerator, model, optimizer)
        return [str(each.message) for each in caught if OURS in str(each.message)]

    def both():
        return prepared(lambda accelerator, *made: accelerator.prepare(*made)), prepared(prepare)

    for own, ours in run_ranks(2, both):
        assert len(own) == 1 and "save_model() omit parameters" in own[0]
        assert ours == []
    assert run_ranks(1, both) == [([], [])]


@pytest.mark.filterwarnings("ignore:accelerator.save_state")
@on_ranks(2, raises=RuntimeError, match=rf"gather_state=True.*{OURS}")
def test_the_state_of_a_shard_leads_to_prepare(tmp_path):
    accelerator = accelerator_of()
    model = make_model()
    model, optimizer = accelerator.prepare(model, mh.OSS(model.parameters(), optim=SGD, lr=0.1))
    epochs_of(accelerator, model, optimizer, accelerator.prepare(loader()), epochs=1)
    accelerator.save_state(str(tmp_path))


@on_ranks(2)
def test_loaders_that_divide_their_samples_among_the_ranks_stay_as_they_are():
    x, y = data()
    dataset = TensorDataset(x[0].flatten(0, 1), y[0].flatten(0, 1))
    loaders = adaptdl.AdaptiveDataLoader(dataset, batch_size=4), mh.Cursor(dataset, 4, seed=0)
    accelerator = accelerator_of()
    ours = accelerator.prepare(*loaders)
    accelerator.prepare(make_model(), loader())
    assert [a is b for a, b in zip(ours, loaders, strict=True)] == [True, True]
    assert len(list(ours[0])) == 2 * BATCHES


CREW = """
    import os
    from pathlib import Path
    import torch
    from accelerate import Accelerator
    import manyhands as mh
    {imported}

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    crew = mh.Crew()
    optimizer = mh.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.05), every=5, crew=crew)
    began, last = optimizer.steps, Path("last")
    dies = crew.number == 1 and began == 0
    model, prepared = {prepare}(model, optimizer)
    assert optimizer.steps == began
    if crew.number == 1 and not dies:  # it is back: all take 100 steps more
        Path("some").write_text(str(began + 100))
        Path("some").rename(last)
    generator = torch.Generator().manual_seed(crew.number)
    while not last.exists() or optimizer.steps < int(last.read_text()):
        prepared.zero_grad()
        x = torch.randn(8, 4, generator=generator)
        accelerator.backward((model(x) - x.sum(dim=1, keepdim=True)).square().mean())
        prepared.step()
        if dies and optimizer.steps == 12:
            os._exit(1)
    optimizer.finish()
    print(began, torch.nn.utils.parameters_to_vector(model.parameters()).tolist(), flush=True)
"""


@pytest.mark.parametrize("ours", [True, False], ids=["our prepare", "its own prepare"])
def test_a_worker_of_a_crew_that_is_started_again_is_prepared(tmp_path, ours):
    """Accelerate's `prepare` loads the optimizer's own state into it."""
    imported, prepare = "", "accelerator.prepare"
    if ours:
        imported = "from manyhands.integrations.accelerate import prepare"
        prepare = "(lambda *made: prepare(accelerator, *made))"
    script = CREW.format(imported=imported, prepare=prepare)
    with Command(tmp_path, script, "--workers", "2") as command:
        assert command.wait(60) == 0, command.err.read_text()
    first, second = sorted(command.out.read_text().splitlines())
    assert first.split(" ", 2)[2] == second.split(" ", 2)[2]
    assert second.startswith("[1]") and int(second.split()[1]) > 0

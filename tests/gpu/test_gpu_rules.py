"""Scaling rules on a GPU: the same numbers, and no more waiting for the device than promised."""

import copy
import time
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.scaling_oracle import loss_of, make_batches, make_model

pytestmark = pytest.mark.gpu

PASSES = 2
RULES = {
    "AdaScale": lambda p, **o: mh.AdaScale(torch.optim.SGD(p, lr=0.05, momentum=0.9), **o),
    "AdamScale": lambda p, **o: mh.AdamScale(torch.optim.AdamW(p, lr=0.01), **o),
    "AdamScale fused": lambda p, **o: mh.AdamScale(torch.optim.AdamW(p, lr=0.01, fused=True), **o),
    "AdamScale capturable": lambda p, **o: mh.AdamScale(
        torch.optim.AdamW(p, lr=0.01, capturable=p[0].is_cuda), **o
    ),
    "LinearScale": lambda p, **o: mh.LinearScale(torch.optim.SGD(p, lr=0.05), **o),
    "LEGWScale": lambda p, **o: mh.LEGWScale(
        0.5, 16, torch.optim.SGD(p, lr=0.05), batch_size=4, **o
    ),
}
MEASURING = [name for name in RULES if name.startswith("Ada")]


def train(rule, device, steps=8, around_step=None, dtype=torch.float32, wrap=None, **options):
    model = make_model(dtype).to(device)
    optimizer = RULES[rule](list(model.parameters()), num_gradients_to_accumulate=PASSES, **options)
    wrapped = wrap(model) if wrap else model
    x, y = (t.to(device) for t in make_batches(steps, PASSES, dtype=dtype))
    for step in range(steps):
        if around_step is not None:
            around_step(step)
        optimizer.zero_grad()
        for a in range(PASSES):
            (loss_of(wrapped, x[step, a], y[step, a]) / PASSES).backward()
        optimizer.step()
    return model, optimizer


def assert_same(ours, theirs, rtol=1e-9, atol=1e-12):
    for (model, rule), (other, reference) in [(ours, theirs)]:
        assert rule.progress == pytest.approx(reference.progress, rel=rtol)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.detach().cpu(), q.detach().cpu(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("rule", RULES)
def test_a_gpu_trains_as_a_cpu_does(rule, device):
    """A capturable Adam computes its bias corrections in float32: 1e-3 to four digits at first."""
    ours, theirs = (train(rule, on, dtype=torch.float64) for on in (device, "cpu"))
    rounding = {"rtol": 1e-5, "atol": 1e-6} if rule.endswith("capturable") else {}
    assert_same(ours, theirs, **rounding)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_on_ddp_over_nccl_trains_as_without_ddp(rule, device, group):
    on_ddp = train(rule, device, dtype=torch.float64, wrap=DistributedDataParallel)
    assert_same(on_ddp, train(rule, device, dtype=torch.float64))


def waits_of_last_steps(rule, steps, **options):
    """How often the host waits for the device in the last 16 steps."""

    def watch(step):
        if step == steps - 16:
            torch.cuda.set_sync_debug_mode("warn")
            seen.clear()  # torch says that this mode is a prototype

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            train(rule, "cuda", steps=steps, around_step=watch, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [str(w.message) for w in seen if "synchroniz" in str(w.message)]


@pytest.mark.parametrize("rule", RULES)
def test_a_measured_step_waits_for_the_device_once(rule, cuda):
    """AdamScale once more in each 16 steps, for the least second moments that count."""
    options = {"measure_every": 1} if rule in MEASURING else {}
    assert len(waits_of_last_steps(rule, 24, **options)) <= 17


@pytest.mark.parametrize("rule", MEASURING)
def test_a_step_that_is_not_measured_does_not_wait(rule, cuda):
    """One rank; with several, the host waits for what they claim."""
    assert len(waits_of_last_steps(rule, 232, smoothing=0.995)) <= 5


@pytest.mark.parametrize("rule", RULES)
def test_a_stream_of_its_own_changes_nothing(rule, cuda):
    expected = train(rule, cuda, dtype=torch.float64)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)  # whoever reads from another stream is early
        found = train(rule, cuda, dtype=torch.float64)
    torch.cuda.synchronize()
    assert_same(found, expected)


@pytest.mark.parametrize("rule", MEASURING)
def test_a_step_with_a_real_overflow_is_skipped(rule, device):
    """float16 under autocast, with a scale at which gradients are inf; then it trains as without.

    A scale is a power of two, so float32 gradients are the same numbers with and without it.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    optimizer = RULES[rule](list(model.parameters()), num_gradients_to_accumulate=PASSES)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**40, backoff_factor=2.0**-15)
    x, y = (t.to(device) for t in make_batches(12, PASSES))
    before = copy.deepcopy(model.state_dict())
    progress, skipped = [], 0
    for step in range(12):
        scale = scaler.get_scale()
        optimizer.zero_grad()
        for a in range(PASSES):
            with torch.autocast(device, dtype=torch.float16):
                loss = loss_of(model, x[step, a], y[step, a].half())
            scaler.scale(loss / PASSES).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
            for name, value in model.state_dict().items():
                assert torch.equal(value, before[name])
        progress.append(optimizer.progress)
        before = copy.deepcopy(model.state_dict())
    assert 1 <= skipped <= 4
    assert progress[skipped - 1] == 0.0 and progress[-1] > 12 - skipped - 1e-6
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("rule", MEASURING)
def test_a_gradient_scaler_changes_nothing(rule, device):
    plain, theirs = train(rule, device)
    model = make_model().to(device)
    optimizer = RULES[rule](list(model.parameters()), num_gradients_to_accumulate=PASSES)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    x, y = (t.to(device) for t in make_batches(8, PASSES))
    for step in range(8):
        optimizer.zero_grad()
        for a in range(PASSES):
            scaler.scale(loss_of(model, x[step, a], y[step, a]) / PASSES).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_same((model, optimizer), (plain, theirs), rtol=1e-5, atol=1e-6)


def test_the_noise_of_a_gpus_gradients_is_that_of_a_cpu(device):
    def noise(on):
        model = make_model(torch.float64).to(on)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        measured = mh.NoiseScale(optimizer, num_gradients_to_accumulate=PASSES)
        x, y = (t.to(on) for t in make_batches(40, PASSES, dtype=torch.float64))
        for step in range(40):
            optimizer.zero_grad()
            for a in range(PASSES):
                (loss_of(model, x[step, a], y[step, a]) / PASSES).backward()
            optimizer.step()
        return measured.snapshot()

    ours, theirs = noise(device), noise("cpu")
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key] == pytest.approx(value, rel=1e-6, nan_ok=True), key


@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own code
@pytest.mark.parametrize("rule", MEASURING)
def test_a_compiled_model_trains_as_it_does_uncompiled(rule, device, group):
    def compiled(model):
        return torch.compile(DistributedDataParallel(model))

    found = train(rule, device, dtype=torch.float64, wrap=compiled)
    assert_same(found, train(rule, device, dtype=torch.float64), rtol=1e-6, atol=1e-9)


def test_a_record_has_the_values_of_its_steps(device, tmp_path):
    """The loss is a tensor on the device, and is overwritten at once."""
    loss = torch.zeros((), device=device)
    with mh.Record(tmp_path / "a.jsonl") as record:
        for step in range(10):
            loss.fill_(step)
            record.step(loss=loss)
    assert mh.read_record(tmp_path / "a.jsonl").column("loss") == [float(n) for n in range(10)]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_record_does_not_wait_for_the_device(cuda, tmp_path):
    loss = torch.ones((), device=cuda)
    with mh.Record(tmp_path / "a.jsonl") as record:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(10):
                record.step(loss=loss * 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_record_does_not_wait_while_the_device_is_busy(cuda, tmp_path):
    slow = torch.randn(8192, 8192, device=cuda)
    with mh.Record(tmp_path / "a.jsonl") as record:
        record.step(loss=slow[0, 0])
        torch.cuda.synchronize()
        loss = torch.zeros((), device=cuda)
        busy = slow
        for _ in range(20):
            busy = busy @ slow
        before = time.perf_counter()
        record.step(loss=loss)
        loss += 1  # the record has its own copy
        took = time.perf_counter() - before
        assert not torch.cuda.current_stream().query(), "the GPU was done before the test"
        assert took < 0.01
    assert mh.read_record(tmp_path / "a.jsonl").column("loss")[1] == 0.0


def test_the_largest_micro_batch_is_found_by_running_out_of_memory(cuda):
    """A tenth of the card, of which every sample takes 32 MB."""
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    model = nn.Linear(1024, 1, device=cuda)
    example = torch.ones(2, 8192, 1024)

    def loss(model, batch):
        return model(batch.to(cuda).sin()).mean()

    torch.cuda.set_per_process_memory_fraction(0.1)
    try:
        found = mh.largest_micro_batch(model, loss, example, most=4096)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    sample = 4 * 8192 * 1024
    assert 0.2 * whole * 0.1 < found * sample < whole * 0.1
    assert all(p.grad is None for p in model.parameters())

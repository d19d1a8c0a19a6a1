"""On a GPU: the same numbers, and no more waiting for the device than promised."""

import copy
import warnings

import pytest
import torch

import manyhands as mh
from helpers.scaling_oracle import loss_of, make_batches, make_model

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)

RULES = {
    "AdaScale": lambda p, **o: mh.AdaScale(torch.optim.SGD(p, lr=0.05, momentum=0.9), **o),
    "AdamScale": lambda p, **o: mh.AdamScale(torch.optim.AdamW(p, lr=0.01), **o),
    "AdamScale fused": lambda p, **o: mh.AdamScale(torch.optim.AdamW(p, fused=True), **o),
}


def train(rule, device, steps=8, around_step=None):
    model = make_model().to(device)
    optimizer = RULES[rule](model.parameters(), num_gradients_to_accumulate=2)
    x, y = (t.to(device) for t in make_batches(steps, 2))
    for step in range(steps):
        if around_step is not None:
            around_step(step)
        optimizer.zero_grad()
        for a in range(2):
            (loss_of(model, x[step, a], y[step, a]) / 2).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("rule", RULES)
def test_a_gpu_trains_as_a_cpu_does(rule):
    (on_gpu, ours), (on_cpu, theirs) = train(rule, "cuda"), train(rule, "cpu")
    assert ours.progress == pytest.approx(theirs.progress, rel=1e-3)
    for p, q in zip(on_gpu.parameters(), on_cpu.parameters(), strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_a_step_waits_for_the_device_once(rule):
    """Counted from the seventh step on: AdamScale looks at the optimizer's first steps closely."""

    def watch(step):
        if step == 6:
            waits.clear()
            torch.cuda.set_sync_debug_mode("warn")

    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        try:
            train(rule, "cuda", steps=16, around_step=watch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [w for w in waits if "synchroniz" in str(w.message)]
    assert len(found) <= 10


@pytest.mark.parametrize("rule", RULES)
def test_a_gradient_scaler_on_the_gpu(rule):
    model = make_model().cuda()
    plain = copy.deepcopy(model)
    x, y = (t.cuda() for t in make_batches(8, 2))
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    optimizers = [
        RULES[rule](m.parameters(), num_gradients_to_accumulate=2) for m in (model, plain)
    ]
    for step in range(8):
        for m, o, amp in zip((model, plain), optimizers, (scaler, None), strict=True):
            o.zero_grad()
            for a in range(2):
                loss = loss_of(m, x[step, a], y[step, a]) / 2
                (loss if amp is None else amp.scale(loss)).backward()
            if amp is None:
                o.step()
            else:
                amp.step(o)
                amp.update()
    assert optimizers[0].progress == pytest.approx(optimizers[1].progress, rel=1e-5)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)

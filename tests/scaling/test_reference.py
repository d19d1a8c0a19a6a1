"""Compare scaling rules with values that were recorded from adaptdl and fairscale."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import manyhands as mh
from helpers.ranks import run_ranks
from helpers.recorded import recorded_values
from manyhands import adaptdl
from manyhands.scaling import _noise
from manyhands.scaling._noise import DebiasedAverage, Estimate, NoiseAverage, apply_floor, estimate
from manyhands.scaling._rules import legw_factor

NOISE = recorded_values("noise_and_gain")
RULES = recorded_values("rules")
CASES = {case["name"]: case for case in NOISE["inputs"]}


def close(ours, theirs, rtol=1e-5):
    """Within 1e-5 relative (and 2e-6 absolute, for values about zero)."""
    torch.testing.assert_close(
        torch.tensor(ours, dtype=torch.float64),
        torch.tensor(theirs, dtype=torch.float64),
        rtol=rtol,
        atol=2e-6,
    )


class Coefficients(nn.Module):
    """A model whose gradient is whatever it is given."""

    def __init__(self, case):
        super().__init__()
        self.groups = [
            nn.ParameterList(
                [nn.Parameter(torch.tensor(v).view(s)) for v, s in zip(values, shapes, strict=True)]
            )
            for values, shapes in zip(case["init"], case["shapes"], strict=True)
        ]
        self.all = nn.ModuleList(self.groups)

    def forward(self, coefficients):
        terms = [
            (torch.tensor(c).view(p.shape) * p).sum()
            for group, params in zip(coefficients, self.groups, strict=True)
            for c, p in zip(group, params, strict=True)
            if c is not None
        ]
        return torch.stack(terms).sum()


def numbers(grads):
    """The recorded gradients with "nan" and "inf" as floats."""
    if isinstance(grads, list):
        return [numbers(g) for g in grads]
    return float(grads) if isinstance(grads, str) else grads


def optimizer_of(case, model):
    kind = getattr(torch.optim, case["optimizer"]["name"])
    return kind([{"params": list(g)} for g in model.groups], **case["optimizer"]["kw"])


def train_as_adaptdl(case):
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    model = Coefficients(case)
    optimizer = optimizer_of(case, model)
    scaler = None
    if case["loss_scale"]:
        scaler = SimpleNamespace(get_scale=lambda: case["loss_scale"])
    rule = getattr(mh, case["rule"])()
    adp = adaptdl.AdaptiveDataParallel(
        model, optimizer, scaling_rule=rule, mp_scaler=scaler, find_unused_parameters=True
    )
    steps = []
    grads = numbers(case["grads"])
    for t, passes in enumerate(case["accum"]):
        adp.gns.set_accum_scale(case["accum_scale"][t])
        rule.zero_grad()
        for a in range(passes):
            with adp.no_sync() if a < passes - 1 else torch.enable_grad():
                (adp(grads[t][a][rank]) * (case["loss_scale"] or 1.0)).backward()
        seen = {
            "raw_sqr": list(adp.gns.raw_sqr_avg),
            "raw_var": list(adp.gns.raw_var_avg),
            "sqr": adp.gns.sqr_avg(),
            "var": adp.gns.var_avg(),
            "gain": [adp.gns.gain(q) for q in case["query_scales"]],
            "factor": [factors(rule, q) for q in case["query_scales"]],
            "grad": [
                [None if p.grad is None else p.grad.flatten().tolist() for p in g]
                for g in model.groups
            ],
        }
        rule.step()
        seen["progress"] = rule.progress
        seen["params"] = [[p.detach().flatten().tolist() for p in g] for g in model.groups]
        steps.append(seen)
    return steps


def factors(rule, scale):
    value = rule.scale_lr(scale)
    groups = len(rule.param_groups)
    return list(value) if hasattr(value, "__len__") else [value] * groups


def on_ranks(case, fn):
    n = case["num_replicas"]
    return run_ranks(n, fn, case)[0] if n > 1 else fn(case)


@pytest.mark.sample(
    "n2_scale2",
    "n4_scale8",
    "n1_accum4_scale2",
    "n2_scale_changes",
    "n2_lossscale1024",
    "n2_adam_adamscale_fixed",
    "n2_linear",
)
@pytest.mark.parametrize("name", NOISE["expect"]["adaptdl"])
def test_the_noise_the_gain_and_the_training_are_adaptdls(name):
    case, expected = CASES[name], NOISE["expect"]["adaptdl"][name]
    ours = on_ranks(case, train_as_adaptdl)
    assert len(ours) == len(expected)
    for mine, theirs in zip(ours, expected, strict=True):
        for key in ("raw_sqr", "raw_var", "sqr", "var", "gain", "factor", "progress"):
            close(mine[key], theirs[key])
        for key in ("grad", "params"):
            if key in theirs and theirs[key] is not None and "nan" not in name:
                if key == "params" and case["loss_scale"]:
                    continue  # the original stepped along gradients that were still scaled
                if key == "grad" and case["loss_scale"]:
                    continue
                for a, b in zip(mine[key], theirs[key], strict=True):
                    for x, y in zip(a, b, strict=True):
                        assert (x is None) == (y is None)
                        if x is not None:
                            close(x, y)


def train_as_fairscale(case, debias_ewma):
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    model = Coefficients(case)
    passes = case["accum"][0]
    optimizer = mh.AdaScale(
        optimizer_of(case, model),
        scale=case["accum_scale"][0] * passes,
        num_gradients_to_accumulate=passes,
        is_scaled_loss=False,
        debias_ewma=debias_ewma,
    )
    wrapped = model
    if torch.distributed.is_initialized():
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    steps = []
    for t in range(len(case["accum"])):
        optimizer.zero_grad()
        for a in range(passes):
            loss = wrapped(numbers(case["grads"])[t][a][rank])
            (loss * (case["loss_scale"] or 1.0)).backward()  # of which fairscale is not told
        steps.append(
            {
                "sqr": list(optimizer.noise.raw_sqr),
                "var": list(optimizer.noise.raw_var),
                "gain": optimizer.gain(),
                "factor": [optimizer.gain(i) for i in range(len(model.groups))],
                "smoothing": optimizer.smoothing,
            }
        )
        if passes > 1:
            optimizer.scale_grad_by_num_grads_to_accum()
        optimizer.step()
        steps[-1]["params"] = [[p.detach().flatten().tolist() for p in g] for g in model.groups]
    return steps


FAIRSCALE = [
    (table, name)
    for table in ("fairscale_default", "fairscale_b3")
    for name, expected in NOISE["expect"][table].items()
    if not isinstance(expected, str)
]


@pytest.mark.sample(
    "fairscale_default-n2_scale2",
    "fairscale_default-n4_scale8",
    "fairscale_default-n1_accum4_scale2",
    "fairscale_default-n2_nan_inf",
    "fairscale_b3-n4_scale8",
    "fairscale_b3-n1_accum4_scale2",
    "fairscale_b3-n2_nan_inf",
)
@pytest.mark.parametrize(("table", "name"), FAIRSCALE)
def test_with_its_floors_the_numbers_are_fairscales(table, name, monkeypatch):
    monkeypatch.setattr(_noise, "estimate", floored_estimate)
    case, expected = CASES[name], NOISE["expect"][table][name]
    fn = run_b3 if table == "fairscale_b3" else run_default
    ours = on_ranks(case, fn)
    poisoned = False
    for mine, theirs in zip(ours, expected, strict=True):
        poisoned = poisoned or not all(map(math.isfinite, numbers(theirs["sqr"])))
        if poisoned:
            continue  # fairscale stays NaN for ever after one
        for key in ("sqr", "var", "gain", "factor", "smoothing"):
            close(mine[key], theirs[key])
        for a, b in zip(mine["params"], theirs["params"], strict=True):
            for x, y in zip(a, b, strict=True):
                close(x, y)
    assert len(ours) == len(expected)


def floored_estimate(sums):
    """fairscale has its floors in every step, and not on the averages."""
    new = estimate(sums)
    return Estimate(apply_floor(new.sqr, 0.0), apply_floor(new.var, 1e-6))


def run_default(case):
    return train_as_fairscale(case, True)


def run_b3(case):
    return train_as_fairscale(case, False)


def rule_knowing(kind, raw):
    """A rule whose averages are `raw`, without any training."""
    groups = len(raw["var"])
    params = [nn.Parameter(torch.zeros(1)) for _ in range(groups)]
    base = torch.optim.Adam if kind is mh.AdamScale else torch.optim.SGD
    rule = kind(base([{"params": [p]} for p in params], lr=0.1))
    ones = (1.0,) * groups
    rule._core.history.average = NoiseAverage(
        groups, DebiasedAverage(tuple(raw["sqr"]), ones), DebiasedAverage(tuple(raw["var"]), ones)
    )
    return rule


@pytest.mark.parametrize("index", range(len(RULES["inputs"]["raw"])))
def test_factors_of_given_statistics_are_the_originals(index):
    raw, expected = RULES["inputs"]["raw"][index], RULES["expect"]["raw"][index]
    for name in ("AdaScale", "AdamScale", "LinearScale", "SqrtScale"):
        rule = rule_knowing(getattr(mh, name), raw)
        for scale, theirs in zip(RULES["inputs"]["scales"], expected[name], strict=True):
            value = rule.scale_lr(scale)
            close(list(value) if hasattr(value, "__len__") else [value], theirs)
    adam = rule_knowing(mh.AdamScale, raw)
    for power in RULES["inputs"]["adam_power"]:
        for scale, theirs in zip(
            RULES["inputs"]["scales"], expected[f"AdamScale_power_{power:g}"], strict=True
        ):
            close(list(adam.scale_lr(scale, power=power)), theirs)


def test_legw_factors_are_the_originals():
    for case, theirs in zip(RULES["inputs"]["legw"], RULES["expect"]["legw"], strict=True):
        ours = legw_factor(
            case["scale"],
            case["progress"],
            case["base_warmup_epochs"],
            case["data_size"],
            case["batch_size"],
        )
        assert math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-12)

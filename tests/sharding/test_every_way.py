"""What every sharding must do: one process that trains on the batches of all ranks is right.

A new sharding joins by a line in `helpers/ways.py`.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW

import manyhands as mh
from helpers.ranks import run_ranks
from helpers.sharding_oracle import everyone, loss_of, make_batches, make_model
from helpers.ways import CONTRACT, HYBRID

OPTIMIZERS = {
    "SGD": (SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "AdamW": (AdamW, {"lr": 0.02, "weight_decay": 0.1}),
}
RULES = {"SGD": mh.AdaScale, "AdamW": mh.AdamScale}
STEPS = 6

contract = pytest.mark.parametrize("way", CONTRACT)
in_one_dimension = pytest.mark.parametrize("way", [way for way in CONTRACT if way not in HYBRID])
any_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


class Run:
    """A model and its optimizer, on one of the ranks, or plain with the batches of all."""

    def __init__(self, way, kind, *, rule=False, passes=1, scaler=None, group=None):
        optim, options = OPTIMIZERS[kind]
        rank, ranks = everyone() if group is None else (dist.get_rank(group), 2)
        self.rank, self.passes, self.scaler = rank, passes, scaler
        self.model = self.module = make_model()
        if ranks > 1:
            make = CONTRACT[way]
            self.model, optimizer = make(
                self.module, self.module.parameters, optim, group, **options
            )
        else:
            optimizer = optim(self.module.parameters(), **options)
        if rule:
            optimizer = RULES[kind](optimizer, num_gradients_to_accumulate=passes)
        self.optimizer = optimizer
        self.averaged = ranks > 1

    def train(self, steps=STEPS, begin=0, clip=None, overflow_at=None, *, ranks):
        x, y = make_batches(STEPS, self.passes, ranks)
        for step in range(begin, begin + steps):
            self.optimizer.zero_grad()
            for a in range(self.passes):
                inside = self.averaged and a < self.passes - 1
                with self.model.no_sync() if inside else contextlib.nullcontext():
                    one = (step, a, self.rank) if self.averaged else (step, a)
                    loss = loss_of(self.model, x[one].reshape(-1, 5), y[one].reshape(-1, 3))
                    if step == overflow_at and self.rank == 0:
                        loss = loss * torch.inf
                    (self.scaler.scale(loss) if self.scaler else loss / self.passes).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            if self.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
        return self

    def whole(self):
        params = [param.detach() for param in self.module.parameters()]
        return [p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for p in params]


def ranks_of(way):
    return 4 if way in HYBRID else 3


def assert_near(ranks, expected):
    for found in ranks:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.sample(
    "1-None-plain-SGD", "2-None-plain-SGD", "2-None-Alternate-AdamW", "1-0.3-Alternate-AdamW"
)
@any_optimizer
@contract
@pytest.mark.parametrize(("passes", "clip"), [(1, None), (2, None), (1, 0.3)])
def test_training_is_the_plain_run(way, kind, passes, clip):
    def go():
        return Run(way, kind, passes=passes).train(clip=clip, ranks=ranks_of(way)).whole()

    assert_near(run_ranks(ranks_of(way), go), go())


@pytest.mark.sample("plain-SGD", "Alternate-AdamW")
@any_optimizer
@contract
def test_a_rule_takes_the_steps_that_it_takes_under_ddp(way, kind):
    def go(way):
        run = Run(way, kind, rule=True, passes=2).train(ranks=ranks)
        return [*run.whole(), torch.tensor([run.optimizer.gain(), run.optimizer.progress])]

    ranks = ranks_of(way)
    under_ddp, found = zip(*run_ranks(ranks, lambda: [go("plain"), go(way)]), strict=True)
    for mine in found:
        # AdamScale's bias correction is taken in float32
        torch.testing.assert_close(mine, under_ddp[0], rtol=2e-5, atol=2e-5)


@pytest.mark.sample("plain", "ShardedDataParallel", "FSDP, 2 x 2", "Alternate")
@contract
def test_all_ranks_skip_the_step_that_overflows_on_one(way):
    def go(kind=mh.ShardedGradScaler):
        run = Run(way, "SGD", scaler=kind(device="cpu", init_scale=4.0))
        run.train(4, overflow_at=1, ranks=ranks_of(way))
        return [*run.whole(), torch.tensor(run.scaler.get_scale())]

    expected = go(GradScaler)
    assert expected[-1] == 2.0
    assert_near(run_ranks(ranks_of(way), go), expected)


@pytest.mark.sample("plain-SGD", "Alternate-AdamW")
@any_optimizer
@contract
def test_a_run_goes_on_plain_and_the_other_way_round(way, kind, tmp_path):
    def go(save=None, load=None):
        run = Run(way, kind)
        given = {"model": run.model, "optimizer": run.optimizer}
        if load is not None:
            mh.load(load, **given)
        run.train(3, begin=0 if load is None else 3, ranks=ranks)
        if save is not None:
            mh.save(save, **given)
        return run.whole()

    ranks = ranks_of(way)
    whole = Run(way, kind).train(6, ranks=ranks).whole()
    run_ranks(ranks, go, save=tmp_path / "sharded")
    go(save=tmp_path / "plain")
    assert_near([go(load=tmp_path / "sharded")], whole)
    assert_near(run_ranks(ranks, go, load=tmp_path / "plain"), whole)


@pytest.mark.sample("plain", "ShardedDataParallel", "Alternate")
@in_one_dimension
def test_two_sharded_workers_train_in_blocks(way):
    """Two ranks shard a worker, and two workers average their parameters every other step."""

    def go(way):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "inside"))
        inside = mesh["inside"].get_group()
        run = Run(way, "SGD", group=inside)
        groups = {"process_group": mesh["workers"].get_group()}
        if not hasattr(next(run.module.parameters()), "full_tensor"):
            groups["inner_group"] = inside
        run.optimizer = mh.DiLoCo(run.optimizer, every=2, **groups)
        run.rank = dist.get_rank()
        return run.train(6, ranks=4).whole()

    plain, sharded = zip(*run_ranks(4, lambda: [go("plain"), go(way)]), strict=True)
    assert_near(sharded, plain[0])

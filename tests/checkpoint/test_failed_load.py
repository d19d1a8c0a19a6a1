"""A load that fails late: where code that is not ours refuses, everything is as it was before."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import manyhands as mh
from helpers.checkpoint_oracle import Setup, assert_equal
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks


class Sampler:
    """A user's own, which takes something of what it is given before it refuses."""

    def __init__(self, epoch=0, refuses=False):
        self.epoch, self.order, self.refuses = epoch, torch.arange(3) + epoch, refuses

    def state_dict(self):
        return {"epoch": self.epoch, "order": self.order}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        self.order.copy_(state["order"])
        if self.refuses and state["epoch"] == 5:
            raise RuntimeError("not this one")

    def held(self):
        return self.epoch, self.order.tolist()


def scaler(enabled=True, scale=8.0):
    made = torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)
    made.scale(torch.ones(1))
    return made


def state_of(setup, *others):
    return setup.held(), setup.scheduler.state_dict(), [other.state_dict() for other in others]


def test_a_disabled_scalers_file_for_an_enabled_one_leaves_all_as_it_was(tmp_path):
    mh.save(tmp_path, **Setup("plain").train(2).given(), scaler=scaler(enabled=False))
    setup, mine = Setup("plain", seed=3).train(1), scaler()
    before, generator = state_of(setup, mine), torch.get_rng_state()
    with pytest.raises(ValueError, match="disabled instance of GradScaler"):
        mh.load(tmp_path, **setup.given(), scaler=mine)
    after = state_of(setup, mine)
    assert_equal(after[0], before[0])
    assert after[1:] == before[1:]
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("refusing", [0, 1])
def test_one_rank_that_refuses_undoes_it_on_all(refusing, tmp_path):
    run_ranks(
        2, lambda: mh.save(tmp_path, **Setup("OSS").train(2).given(), a=Sampler(5), b=1) and None
    )

    def go():
        setup = Setup("fully_shard", seed=3).train(1)
        sampler = Sampler(1, refuses=dist.get_rank() == refusing)
        before = state_of(setup), sampler.held()
        try:
            mh.load(tmp_path, **setup.given(), a=sampler)
        finally:
            assert_equal(setup.held(), before[0][0])
            assert setup.scheduler.state_dict() == before[0][1]
            assert sampler.held() == before[1]

    raises_on_ranks(2, ValueError, go, match="a= has refused its state: RuntimeError: not this one")


class Refusing(nn.Linear):
    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]
        if state["seen"] == 5:
            raise RuntimeError("not this one")


def test_a_modules_extra_state_is_given_back(tmp_path):
    model, other = Refusing(2, 2), Refusing(2, 2)
    model.seen, other.seen = 5, 1
    mh.save(tmp_path, model=model)
    before = other.weight.detach().clone()
    with pytest.raises(ValueError, match="refused its state: RuntimeError: not this one"):
        mh.load(tmp_path, model=other)
    assert torch.equal(other.weight, before) and other.seen == 1


class Own(torch.optim.AdamW):
    """An optimizer of the user's, with a `load_state_dict` of its own."""

    refuses = False

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.refuses:
            raise RuntimeError("not this one")


@pytest.mark.parametrize("way", ["plain", "OSS", "fully_shard"])
@on_ranks(2)
def test_an_optimizers_own_loading_may_refuse_after_the_model_is_filled(way, tmp_path):
    kind = (Own, {"lr": 0.02})
    setup = Setup(way, kind, rule=mh.AdamScale).train(2)
    mh.save(tmp_path, **setup.given(), sampler=Sampler(2))
    other = Setup(way, kind, seed=3, rule=mh.AdamScale).train(1)
    sampler = Sampler(1)
    before = other.scheduler.state_dict()
    Own.refuses = dist.get_rank() == 1
    try:
        mh.load(tmp_path, **other.given(), sampler=sampler)
    except RuntimeError as error:
        assert str(tmp_path) in str(error)
        assert "Own has refused its state: RuntimeError: not this one." in str(error)
        assert "model and the optimizer are now partially loaded" in str(error)
    else:
        raise AssertionError("loaded")
    assert other.scheduler.state_dict() == before and sampler.epoch == 1
    Own.refuses = False
    mh.load(tmp_path, **other.given(), sampler=sampler)
    assert_equal(other.held(), setup.held())
    other.train(1, 2), setup.train(1, 2)
    assert_equal(other.held(), setup.held())


def test_an_object_that_refuses_its_earlier_state_is_named(tmp_path):
    class Once(Sampler):
        def load_state_dict(self, state):
            raise RuntimeError("never")

    mh.save(tmp_path, sampler=Sampler(5))
    with pytest.raises(
        RuntimeError, match=r"sampler= .RuntimeError: never. could not be restored"
    ) as raised:
        mh.load(tmp_path, sampler=Once())
    assert "never" in str(raised.value.__context__)


def test_a_state_that_its_owner_goes_on_changing_is_kept(tmp_path):
    class Growing(Sampler):
        def __init__(self):
            super().__init__()
            self.all = {"list": [torch.zeros(2)], "pair": (1, {"a": torch.ones(1)})}

        def state_dict(self):
            return self.all

        def load_state_dict(self, state):
            self.all["list"][0].fill_(7)
            self.all["pair"][1]["a"].fill_(7)
            if "epoch" in state:
                raise RuntimeError("no")
            self.all = state

    mh.save(tmp_path, value=Sampler(5))
    mine = Growing()
    with pytest.raises(ValueError, match="RuntimeError: no"):
        mh.load(tmp_path, value=mine)
    assert mine.all["list"][0].tolist() == [0, 0] and mine.all["pair"][1]["a"].item() == 1

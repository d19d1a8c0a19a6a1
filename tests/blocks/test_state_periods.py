"""Optimizer state that is averaged at some sync rounds only: each name with a period of its own."""

import copy
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam

import manyhands as mh
from helpers.blocks_oracle import INNER, loss_of, train
from helpers.crew_workers import Log, Store, Workers, fork
from helpers.ranks import raises_on_ranks, run_ranks
from manyhands.blocks.averaging import _round
from manyhands.blocks.crew._crew import Crew

PERIODS = {"exp_avg": 3, "exp_avg_sq": 6}
SHAPES = [(6, 3), (6,), (2, 6), (2,)]
SIZE = 18 + 6 + 12 + 2


def begin():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in SHAPES]


def batches(steps):
    """Return for each step the inputs and the targets of two workers."""
    draw = torch.Generator().manual_seed(1)
    data = torch.randn(steps, 2, 4, 5, generator=draw, dtype=torch.float64)
    return [([x[:, :3] for x in both], [x[:, 3:] for x in both]) for both in data]


class Run:
    """One rank that trains the oracle's network, and counts what its sync rounds send."""

    def __init__(self, kind="adam_torch", every=2, **options):
        self.sent = []  # bytes of parameters, of buffers and, if there is any, of state: each round
        self.params = [nn.Parameter(p) for p in begin()]
        self.optimizer = mh.LocalSGD(INNER[kind](self.params), every=every, **options)

    def train(self, first, steps):
        original, rank = _round.cut_into_chunks, dist.get_rank()

        def count(workers, payloads):
            self.sent.append(sum(p.length * p.dtype.itemsize for p in payloads))
            return original(workers, payloads)

        _round.cut_into_chunks, seen = count, []
        for xs, ys in batches(steps)[first:]:
            self.optimizer.zero_grad()
            loss_of(self.params, xs[rank], ys[rank]).backward()
            self.optimizer.step()
            seen.append(torch.cat([p.detach().flatten() for p in self.params]))
        _round.cut_into_chunks = original
        return torch.stack(seen)

    def moments(self):
        states = [self.optimizer.state[p] for p in self.params]
        return {name: torch.cat([s[name].flatten() for s in states]) for name in PERIODS}


def test_moments_are_averaged_at_the_rounds_of_their_periods_and_no_byte_is_sent_at_others():
    def blocks():
        run = Run(state=PERIODS)
        return run.train(0, 19), run.sent

    plain = train(
        [begin(), begin()], "adam_torch", batches(19), lambda _, a, m: m, every=2, periods=PERIODS
    )
    third, sixth = [8 * SIZE, 0, 8 * SIZE], [8 * SIZE, 0, 2 * 8 * SIZE]
    rounds = [[8 * SIZE, 0], [8 * SIZE, 0], third, [8 * SIZE, 0], [8 * SIZE, 0], sixth]
    rounds = [*rounds, *rounds[:3]]  # nine of them
    for rank, (seen, sent) in enumerate(run_ranks(2, blocks)):
        expected = torch.stack([torch.cat([p.flatten() for p in step]) for step in plain[rank]])
        torch.testing.assert_close(seen, expected, rtol=1e-11, atol=1e-11)
        assert sent == [count for each in rounds for count in each]


@pytest.mark.parametrize(
    ("periods", "word"),
    [
        ({"exp_avg": 1, "exp_avg_sq": 1}, "average"),
        ({"exp_avg_sq": 1, "exp_avg": 1}, "average_moments"),
        ({"exp_avg": 100}, "keep"),
    ],
)
def test_a_period_of_one_is_every_round_and_a_long_one_is_none(periods, word):
    def both():
        return Run(state=periods).train(0, 9), Run(state=word).train(0, 9)

    for one, other in run_ranks(2, both):
        assert torch.equal(one, other)


def test_with_fragments_and_an_overlap_the_blocks_count_and_not_the_rounds():
    def blocks():
        run = Run(every=4, fragments=2, overlap=1, state={"exp_avg": 2})
        run.train(0, 18)
        return [i for i, sent in enumerate(run.sent) if sent == 8 * SIZE], run.optimizer.rounds

    # Two lists in each round of a fragment, four in each block; and the state at each second block.
    assert run_ranks(2, blocks) == [([8, 17], 8)] * 2


@pytest.mark.parametrize("kept", ["each worker's", "the first's", "mh.save"])
def test_a_run_that_is_saved_between_two_averages_goes_on_with_its_count(kept, tmp_path):
    """Saved after four rounds: the second one from there averages."""

    def blocks():
        run, resumed = Run(state=PERIODS), Run(state=PERIODS)
        run.train(0, 8)
        model, other = (nn.ParameterList(each.params) for each in (run, resumed))
        if kept == "mh.save":
            mh.save(tmp_path / "run", model=model, optimizer=run.optimizer)
            mh.load(tmp_path / "run", model=other, optimizer=resumed.optimizer)
        else:
            states = [None, None]
            dist.all_gather_object(states, run.optimizer.state_dict())
            other.load_state_dict(model.state_dict())
            state = states[0 if kept == "the first's" else dist.get_rank()]
            resumed.optimizer.load_state_dict(state)
        seen = resumed.train(8, 12)
        return torch.equal(seen, run.train(8, 12)), resumed.sent, resumed.moments()

    for equal, sent, moments in (results := run_ranks(2, blocks)):
        assert equal == (kept != "the first's")  # whose moments all have then
        assert sent == [8 * SIZE, 0, 8 * SIZE, 0, 2 * 8 * SIZE]
        for name in PERIODS:
            assert torch.equal(moments[name], results[0][2][name])


@pytest.mark.filterwarnings("ignore:in the first block all")  # of one parameter, and one way
def test_at_the_end_of_a_local_warm_up_all_that_is_ever_averaged_is():
    def blocks():
        param = nn.Parameter(torch.ones(3))
        inner = Adam([param], lr=0.1)
        more = {"warmup_iterations": 3, "global_sync_iter": 4, "state": {"exp_avg": 9}}
        optimizer = mh.BMUF(inner, **more)
        for _ in range(3):
            param.grad = torch.full((3,), dist.get_rank() + 1.0)
            optimizer.step()
        return [inner.state[param][name][0].item() for name in PERIODS]

    (mean, square), (same, other) = run_ranks(2, blocks)
    assert mean == same == pytest.approx(1.5 * (1 - 0.9**3))
    assert other == pytest.approx(4 * square)


# -- mistakes --------------------------------------------------------------------------------------


def test_a_name_that_the_state_does_not_have_is_an_error_on_all_at_the_first_round():
    def blocks(kind):
        run = Run(kind, state={"exp_avg": 3, "exp_avg_square": 6})
        try:
            run.train(0, 2)
        finally:
            assert run.optimizer.steps == len(batches(2))

    for kind in ("adam_torch", "sgdm"):
        match = r"a name that the inner .* \(on rank\(s\) 0, 1\). Use names of tensors in"
        raises_on_ranks(2, ValueError, blocks, kind, match=match)


def amsgrad_in_one_group(period):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups = [{"params": model[0].parameters(), "amsgrad": True}, {"params": model[1].parameters()}]
    inner = torch.optim.Adam(groups)
    optimizer = mh.LocalSGD(inner, every=2, state={"exp_avg": 1, "max_exp_avg_sq": period})
    return model, optimizer


def test_a_name_counts_as_unknown_on_all_ranks_once_every_parameter_has_state():
    def blocks(late):
        model, optimizer = amsgrad_in_one_group(1)
        for step in range(6):
            for param in model.parameters():
                param.grad = torch.full_like(param, step + 1.0 - 2 * dist.get_rank())
            if step < 2 and dist.get_rank() == 1 and late:
                optimizer.zero_grad()  # as if a scaler had skipped the step here
            if step == 4:
                model[0].requires_grad_(False)  # its state stays known
            optimizer.step()
        return optimizer.rounds

    for late in (False, True):
        assert run_ranks(2, blocks, late) == [3, 3]


def test_a_misspelled_name_is_an_error_on_all_ranks_if_one_has_no_state_yet():
    def blocks():
        param = nn.Parameter(torch.ones(3))
        optimizer = mh.LocalSGD(Adam([param]), every=2, state={"exp_average": 1})
        for _ in range(4):
            param.grad = torch.ones(3) if dist.get_rank() == 0 else None
            optimizer.step()

    raises_on_ranks(2, ValueError, blocks, match=r"\(on rank\(s\) 0\)")


def test_a_worker_that_has_dropped_its_state_is_left_out_until_its_next_step():
    def blocks():
        param = nn.Parameter(torch.arange(3.0))
        other = nn.Parameter(torch.ones(5))
        inner = Adam([param, other], lr=0.1)
        optimizer = mh.LocalSGD(inner, every=4, overlap=2, state={"exp_avg": 2})
        for step in range(12):
            for each in (param, other):
                each.grad = torch.ones_like(each)
            if step == 3 and dist.get_rank() == 1:
                param.grad[0] = torch.nan
            optimizer.step()
            if step == 3:  # while its first round is in flight, which averages no state
                optimizer.synchronize()
        optimizer.synchronize()
        return param.detach().clone()

    one, other = run_ranks(2, blocks)
    assert one.isfinite().all() and torch.equal(one, other)


def test_without_any_state_there_is_nothing_to_average():
    def blocks():
        param = nn.Parameter(torch.ones(3))
        optimizer = mh.LocalSGD(SGD([param], lr=0.1), every=2, state={"momentum_buffer": 1})
        for _ in range(4):
            param.grad = torch.full((3,), 1.0 + dist.get_rank())
            optimizer.step()
        return optimizer.rounds

    assert run_ranks(2, blocks) == [2, 2]


def made(state, method=mh.LocalSGD, **options):
    return method(Adam([nn.Parameter(torch.ones(3))]), state=state, **options)


@pytest.mark.parametrize("state", ["x", None, {}, [("exp_avg", 3)], {3: 1}, 3, ["average"]])
def test_states_that_mean_nothing(state):
    with pytest.raises(ValueError, match=r"state must be one of 'keep', .* or say for tensors"):
        made(state)


@pytest.mark.parametrize("period", [0, -1, 2.5, 2.0, "3", None, True])
def test_a_period_is_a_number_of_rounds(period):
    with pytest.raises(ValueError, match=r"state\['exp_avg'\] must be a whole number of at least"):
        made({"exp_avg": period})


def test_bmufs_average_sync_is_at_every_round():
    with pytest.raises(ValueError, match=r"at each sync round, and state=\{'exp_avg': 3\} does"):
        made({"exp_avg": 3}, mh.BMUF, average_sync=True)


def test_the_order_of_the_names_and_the_kind_of_a_number_do_not_matter():
    def blocks():
        first = dist.get_rank() == 0
        made(PERIODS if first else {"exp_avg_sq": np.int64(6), "exp_avg": torch.tensor(3)})
        made({"exp_avg": 3 if first else 4})

    match = r"state: rank 0: \{'exp_avg': 3\}; rank 1: \{'exp_avg': 4\}"
    raises_on_ranks(2, ValueError, blocks, match=match)
    assert "state={'exp_avg': 3, 'exp_avg_sq': 6}" in repr(made({"exp_avg_sq": 6, "exp_avg": 3}))


@pytest.mark.parametrize("method", [mh.LocalSGD, mh.BMUF])
def test_other_periods_of_a_saved_run_are_an_error_unless_they_are_meant(method):
    saved = made(PERIODS, method).state_dict()
    made({"exp_avg_sq": 6, "exp_avg": 3}, method).load_state_dict(copy.deepcopy(saved))
    other = made({"exp_avg": 2}, method)
    match = r"state: saved \{'exp_avg': 3, 'exp_avg_sq': 6\}, now \{'exp_avg': 2\}"
    with pytest.raises(ValueError, match=match) as error:
        other.load_state_dict(copy.deepcopy(saved))
    proposed = str(error.value).partition("optimizer_overrides=")[2].removesuffix(").")
    other.load_state_dict(copy.deepcopy(saved), optimizer_overrides=eval(proposed))
    more = {"state": {"exp_avg_sq": 6, "exp_avg": 3}}
    made(PERIODS, method).load_state_dict(copy.deepcopy(saved), optimizer_overrides=more)
    with pytest.raises(ValueError, match=r"has state=.*, and .* made with keep"):
        made("keep", method).load_state_dict(saved, optimizer_overrides=more)


# -- workers that come and go ----------------------------------------------------------------------


class Trainers(Workers):
    def start(self, numbers, steps):
        for number in numbers:
            incarnation = self.incarnations[number] = self.incarnations.get(number, 0) + 1
            log = self.folder / f"{number}.{incarnation}.jsonl"
            self.pids[number] = fork(
                lambda number=number, log=log: in_a_crew(
                    Crew(self.store.address, number=number, **self.options), Log(log), steps
                ),
                self.folder / f"{number}.errors",
            )


def in_a_crew(crew, log, steps):
    param = nn.Parameter(torch.zeros(10))
    optimizer = mh.LocalSGD(Adam([param]), every=4, overlap=1, crew=crew, state={"exp_avg": 3})
    sent, rounds, original = [], 0, optimizer._sync.extras.state_payloads

    def state_payloads(block=None):
        found = original(block)
        sent.append((block, sum(payload.length for payload in found)))
        return found

    vars(optimizer._sync.extras)["state_payloads"] = state_payloads
    while optimizer.steps < steps:
        param.grad = torch.full_like(param, 1.0 + crew.number)
        optimizer.step()
        if optimizer.rounds != rounds:
            rounds = optimizer.rounds
            log("round", rounds=rounds, sent=sent[-1] if sent else None)
        time.sleep(0.005)
    optimizer.finish()
    log("done", rounds=optimizer.rounds, blocks=optimizer._sync.state.blocks)


def test_one_that_joins_counts_as_the_others(tmp_path):
    with (
        Store() as store,
        Trainers(store, tmp_path, expected=2, stall=1.0) as workers,
    ):
        workers.start([0, 1], 160)
        workers.until(lambda: len(workers.events(1, "round")) >= 4)
        workers.kill(1, report=True)
        workers.start([1], 160)
        workers.finish()
        for number in (0, 1):
            assert workers.events(number, "done")[-1]["rounds"] > 10
            for event in workers.events(number, "round"):
                block, elements = event["sent"] or (1, 0)
                assert elements == (0 if block % 3 else 10)
        counts = {workers.events(n, "done")[-1]["blocks"] for n in (0, 1)}
        assert len(counts) == 1 and counts == {workers.events(0, "done")[-1]["rounds"]}

"""Each cause of a wrong resume, in records that are written by hand."""

from copy import deepcopy

import pytest

from manyhands.tools.check._records import SeenBatch
from manyhands.tools.check.resume._case import ResumeCase
from manyhands.tools.check.resume._data_causes import other_values, samples, variable_batch
from manyhands.tools.check.resume._rate_causes import learning_rates, schedules
from manyhands.tools.check.resume._records import RankHistory, RankStep, State
from manyhands.tools.check.resume._run_causes import number_of_steps, random_state
from manyhands.tools.check.resume._state_causes import (
    averages,
    buffers,
    optimizer_state,
    parameters,
    scaler,
)

pytestmark = pytest.mark.quick

FIRST = [[0, 1], [2, 3], [4, 5], [6, 7]]  # samples of each step of an epoch
SECOND = [[5, 2], [1, 0], [7, 3], [6, 4]]
RATES = [0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
SAVED = State(
    parameters={"0:0": "a", "0:1": "b", "frozen": "c"},
    names={"0:0": "weight", "0:1": "bias"},
    trained=["0:0", "0:1"],
    buffers={"mean": "m"},
    optimizer={"0:0 momentum": "p", "0:1 momentum": "q"},
    scaler={"scale": 4.0},
    random={"torch": "r1", "numpy": "n"},
    averages={"ema": "e"},
)


def history(*epochs, rates=RATES, start=0):
    """A rank that takes the steps of some epochs, and ends."""
    made = RankHistory(ended=True)
    for epoch, batches in enumerate(epochs, 1):
        for batch in batches:
            number = start + len(made.steps)
            seen = SeenBatch([f"h{index}" for index in batch], batch, epoch)
            rate = [rates[number % len(rates)]]
            made.steps.append(RankStep(passes=[seen], rates=rate, schedules=[number]))
    return made


def case(*resumed, at=2, ranks=1, whole=(FIRST, SECOND), **options):
    """A run that is killed after `at` steps, and resumes with the steps of some epochs."""
    without = history(*whole)
    start = State(parameters={"0:0": "a0", "0:1": "b0", "frozen": "c"}, random={"torch": "r0"})
    without.states = {0: start, at: SAVED}
    start.random["numpy"] = "n"
    killed = RankHistory(states={at: SAVED})
    again = history(*resumed, start=at, **options)
    again.states = {0: deepcopy(SAVED)}
    runs = [[deepcopy(each) for _ in range(ranks)] for each in (killed, again, without)]
    return ResumeCase(*runs, at)


def restored(**changes):
    """A case whose resumed state differs."""
    made = case(FIRST[2:], SECOND)
    for name, value in changes.items():
        setattr(made.resumed[0].states[0], name, value)
    return made


def test_a_right_resume_has_no_cause():
    right = case(FIRST[2:], SECOND)
    for cause in (
        samples, other_values, learning_rates, schedules, number_of_steps, random_state, averages,
        buffers, optimizer_state, parameters, scaler,
    ):  # fmt: skip
        assert cause(right) is None
    assert variable_batch(right) is None


@pytest.mark.parametrize(
    ("resumed", "at", "cause", "text"),
    [
        ((FIRST, SECOND), 2, "samples repeated", "repeats 4 samples, from step 1 on"),
        ((FIRST[3:], SECOND), 2, "samples skipped", "skips 2 samples, and continues with step"),
        ((FIRST,), 4, "epoch counter", "epoch 2 has the order of epoch 1"),
        (
            ([[4, 6], [7, 5]], SECOND),
            2,
            "shuffle order",
            "from step 3 on, the order of samples differs",
        ),
        (([[90, 91], [92, 93]],), 2, "other samples", "do not occur in the run"),
        (([[1, 4], [0, 6]], SECOND), 2, "shuffle order", ": the epoch has 2 samples twice"),
    ],
)
def test_other_samples(resumed, at, cause, text):
    found = samples(case(*resumed, at=at))
    assert found.cause == cause
    assert text in found.text


def test_samples_differ_because_the_random_state_does():
    made = case([[90, 91], [92, 93]])
    made.resumed[0].states[0].random["torch"] = "other"
    assert samples(made).cause == "random state"
    made = case([[4, 6], [7, 5]], SECOND)
    made.resumed[0].states[0].random["torch"] = "other"
    assert "the random state was not restored either" in samples(made).text


@pytest.mark.parametrize(
    ("resumed", "cause"),
    [
        (([[4], [5], [6], [7]], SECOND), None),
        (([[0], [1], [2], [3], [4], [5], [6], [7]], SECOND), "samples repeated"),
        (([[7]], SECOND), "samples skipped"),
    ],
)
def test_samples_of_the_epoch_on_another_number_of_ranks(resumed, cause):
    made = case(*resumed)
    made.killed *= 2
    made.whole = [deepcopy(made.whole[0]) for _ in range(2)]
    found = samples(made)
    assert (found and found.cause) == cause


def test_the_end_of_the_epoch_has_to_be_known_for_other_ranks():
    made = case([[7]], whole=(FIRST,))
    made.killed *= 2
    assert samples(made) is None


def test_samples_with_equal_indices_and_other_values():
    made = case(FIRST[2:], SECOND)
    made.resumed[0].steps[1].passes[0].hashes = ["x", "y"]
    assert other_values(made).cause == "other samples"
    made.resumed[0].states[0].random["torch"] = "other"
    assert other_values(made).cause == "random state"


def test_a_batch_that_grows_is_not_an_error():
    made = case([[4, 5], [6, 7, 5]], SECOND)
    assert variable_batch(made) == 1
    assert variable_batch(case([[6, 7]])) is None


@pytest.mark.parametrize(
    ("cause", "changes", "name", "text"),
    [
        (parameters, {"parameters": {"0:0": "a0", "0:1": "b0", "frozen": "c"}}, "adapter weights",
         "(2 of 3 parameters) have initial values, and all frozen parameters are"),
        (parameters, {"parameters": {"0:0": "a", "0:1": "b", "frozen": "x"}}, "parameters",
         "frozen (1 of 3 parameters) differ from the checkpoint"),
        (buffers, {"buffers": {"mean": "x"}}, "running statistics", "mean (1 of 1 buffers)"),
        (averages, {"averages": {"ema": "x"}}, "weight average", "ema, outside the model"),
        (optimizer_state, {"optimizer": {}}, "optimizer state", "starts without state"),
        (optimizer_state, {"optimizer": {"0:0 momentum": "p"}}, "optimizer state",
         "starts without bias momentum"),
        (optimizer_state, {"optimizer": {"0:0 momentum": "x", "0:1 momentum": "q"}},
         "optimizer state", "weight momentum in the optimizer's state differs"),
        (scaler, {"scaler": {"scale": 8.0}}, "gradient scaler", "scale 8.0, not 4.0"),
        (random_state, {"random": {"torch": "x", "numpy": "n"}}, "random state",
         "the random state of torch was not restored"),
    ],
)  # fmt: skip
def test_other_state(cause, changes, name, text):
    found = cause(restored(**changes))
    assert found.cause == name
    assert text in found.text


def test_numbers_that_no_step_draws_do_not_matter():
    assert random_state(restored(random={"torch": "r1", "numpy": "x"})) is None


def test_state_of_another_rank():
    made = case(FIRST[2:], SECOND, ranks=2)
    own = made.killed[1].states[2]
    own.optimizer = {"0:0 momentum": "p1", "0:1 momentum": "q1"}
    own.random = {"torch": "r2", "numpy": "n"}
    assert optimizer_state(made).text == "rank 1 has the optimizer's state of rank 0"
    assert random_state(made).text == "rank 1 has the random state of rank 0"


def test_optimizer_state_on_another_number_of_ranks():
    made = case(FIRST[2:], SECOND)
    made.killed *= 2
    assert optimizer_state(made) is None
    made.resumed[0].states[0].optimizer = {}
    assert "starts without state" in optimizer_state(made).text
    made.resumed[0].states[0].optimizer = {"0:0 momentum": "x", "0:1 momentum": "q"}
    assert "differs from the checkpoint" in optimizer_state(made).text


@pytest.mark.parametrize(
    ("counters", "cause"),
    [
        ([0, 1, 2], "schedule not restored"),
        ([3, 4, 5], "schedule off"),
        ([2, 4, 6], "schedule stepped twice"),
        ([2, 3, 9], "schedule off"),
    ],
)
def test_counters_of_schedules(counters, cause):
    made = case(FIRST[2:], SECOND)
    for step, counter in zip(made.resumed[0].steps, counters, strict=False):
        step.schedules = [counter]
    assert schedules(made).cause == cause


@pytest.mark.parametrize(
    ("rates", "cause"),
    [
        (RATES, "schedule not restored"),
        (RATES[3:], "schedule off"),
        (RATES[1:], "schedule off"),
        ([0.6, 0.4, 0.2], "schedule stepped twice"),
        ([9.0, 9.0, 9.0], "learning rate"),
    ],
)
def test_learning_rates_without_a_schedule(rates, cause):
    made = case(FIRST[2:], SECOND)
    del made.resumed[0].steps[len(rates) :]
    for step, rate in zip(made.resumed[0].steps, rates, strict=False):
        step.rates = [rate]
    assert learning_rates(made).cause == cause


def test_a_lost_optimizer_has_lost_the_learning_rate():
    made = restored(optimizer={})
    for step in made.resumed[0].steps:
        step.rates = [9.0]
    assert learning_rates(made) is None


def test_the_number_of_steps_that_are_left():
    assert "ends after 2 steps" in number_of_steps(case(FIRST[2:])).text
    assert "makes 8 steps, but 6 remain" in number_of_steps(case(FIRST, SECOND)).text

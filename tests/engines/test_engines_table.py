"""The judge of `tools/engines_table.py` says what is wrong, and says right of nothing else."""

import importlib.util

import pytest

from helpers.pages import ROOT

pytestmark = pytest.mark.quick

spec = importlib.util.spec_from_file_location("table", ROOT / "tools" / "engines_table.py")
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)


def results(digest, number=2, **more):
    plain = {"digest": digest, "progress": 5.0, "weights": [0.5, 1.0], "loaded": "saved"}
    return [{**plain, **more} for _ in range(number)]


def case(cell="blocks, AdaScale", size=2, end="end", crew=True, **changes):
    """What `judge` is given if all is right, with some of it changed."""
    given = {
        "begun": results("saved"),
        "resumed": results(end, size),
        "whole": results("whole"),
        "ranks_begun": results("saved"),
        "ranks_resumed": results(end, size),
    }
    return table.judge(cell, size, **{**given, **changes}, crew=crew)


@pytest.mark.parametrize("size", table.SIZES)
def test_a_right_run_is_right(size):
    assert case(size=size) == ("ok (r)", "")
    of_step = case("DDP, none", size, end="whole", crew=False)
    assert of_step == (("=", "") if size == 2 else ("ok", ""))
    assert case(size=size, end="whole", crew=False) == (("=", "") if size == 2 else ("ok (r)", ""))


@pytest.mark.parametrize("size", table.SIZES)
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"begun": results("saved", 1)}, "workers are missing"),
        ({"begun": [*results("saved", 1), *results("other", 1)]}, "workers differ"),
        ({"begun": results("other")}, "not the saved parameters"),
        ({"begun": results("saved", progress=6.0)}, "not the checkpoint of plain ranks"),
        ({"ranks_begun": results("other")}, "not the checkpoint of plain ranks"),
    ],
)
def test_what_is_wrong_with_a_crews_checkpoint(size, changes, text):
    assert case(size=size, **changes) == ("WRONG", text)


@pytest.mark.parametrize("size", table.SIZES)
def test_what_is_wrong_with_a_crew_that_goes_on(size):
    missing = case(size=size, resumed=results("end", size - 1))
    assert missing == ("WRONG", "workers are missing")
    elsewhere = case(size=size, resumed=results("end", size, loaded="other"))
    assert elsewhere == ("WRONG", "not the saved parameters")
    for other in (results("other", size), results("end", size, progress=6.0)):
        # Such as: with the wrong worker's inner state, or with none.
        wrong = case(size=size, resumed=other)
        assert wrong == ("WRONG", "not what plain ranks make of this checkpoint")


def test_workers_that_end_apart_are_wrong():
    apart = [*results("end", 1), *results("other", 1)]
    assert case(resumed=apart, ranks_resumed=apart) == ("WRONG", "workers differ")


@pytest.mark.parametrize("cell", ["DDP, none", "blocks, none"])
def test_fixed_ranks_reach_the_end_of_the_training_without_a_stop(cell):
    wrong = case(cell, end="other", crew=False)
    assert wrong == ("WRONG", "not the training without a stop")


def test_another_number_of_ranks_reaches_it_up_to_rounding():
    near = {"resumed": results("near", 4, weights=[0.5, 1.00001])}
    assert case("DDP, none", 4, crew=False, ranks_resumed=None, **near) == ("ok", "")
    far = {"resumed": results("far", 4, weights=[0.5, 1.001])}
    wrong = case("DDP, none", 4, crew=False, ranks_resumed=None, **far)
    assert wrong == ("WRONG", "not the training without a stop")


def test_an_error_keeps_its_text():
    given = {"resumed": [{"error": "ValueError: no"}]}
    assert case(**given) == ("error", "ValueError: no")

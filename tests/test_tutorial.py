"""docs/tutorial.md, done: each step runs, and prints what the page shows."""

import re

import pytest
import torch.distributed.fsdp  # noqa: F401  # here, so that 13 forks need not import it

import manyhands  # noqa: F401  # likewise
from helpers.pages import ROOT, apply_patch, blocks, run_command, write_file

PAGE = ROOT / "docs" / "tutorial.md"
NUMBER = re.compile(r"\d+(?:\.\d+)?")
TOLERANCE = 0.03  # sums in another order, as other versions of torch make them, move the numbers


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each command of the page prints, beside what the page shows, by the script's name."""
    folder = tmp_path_factory.mktemp("tutorial")
    shown_blocks = iter(everything := list(blocks(PAGE)))
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in shown_blocks:
            if block.title is not None:
                write_file(block, folder)
            else:
                assert block.language == "sh", f"{block.where}: every command is followed by a text"
                shown = next(shown_blocks)
                assert shown.language == "text", shown.where
                output = run_command(block.code.strip(), block)
                runs.append((block.code.split()[-1], output.strip(), shown.code.strip()))
    assert {block.title for block in everything} - {None} == {script for script, _, _ in runs}
    return runs


def numbers(printed, script):
    """All numbers that a script printed, over all of its runs."""
    texts = [output for name, output, _ in printed if name == script]
    return [float(number) for text in texts for number in NUMBER.findall(text)]


def test_each_step_prints_what_the_page_shows(printed):
    for script, output, shown in printed:
        assert NUMBER.sub("#", output) == NUMBER.sub("#", shown), script
        found = [float(number) for number in NUMBER.findall(output)]
        expected = [float(number) for number in NUMBER.findall(shown)]
        assert found == pytest.approx(expected, rel=TOLERANCE), script


def test_two_workers_take_fewer_steps_to_the_same_loss(printed):
    _, _, loss_of_one = numbers(printed, "plain.py")
    steps, _, gain, loss = numbers(printed, "ddp.py")
    assert 1.0 < gain < 2.0
    assert 120 <= steps < 180
    assert loss < 1.03 * loss_of_one


def test_a_growing_batch_takes_fewer_steps_still(printed):
    steps, _, _, loss = numbers(printed, "ddp.py")
    fewer, samples, loss_of_ramp = numbers(printed, "ramp.py")
    assert fewer < 0.75 * steps and samples / fewer > 2 * 32
    assert loss_of_ramp < 1.03 * loss


def test_sharding_does_not_change_the_numbers(printed):
    by_ddp = numbers(printed, "ddp.py")
    *same, parameters, momenta = numbers(printed, "sharded.py")
    assert same == by_ddp
    *same, held = numbers(printed, "fsdp.py")
    assert same == by_ddp
    assert momenta == pytest.approx(parameters / 2, rel=0.05)
    assert held == (32 * 4 + 32) / 2 + 32 + 1  # of the second layer's single row, all


def test_three_workers_continue_where_two_have_ended(printed):
    steps, _, saved, continued_after, loaded, end, _, loss = numbers(printed, "checkpoint.py")
    assert numbers(printed, "blocks.py")[-1] == saved == loaded
    assert (steps, continued_after, end) == (120, 120, 240)
    assert loss < loaded


def test_a_patch_must_fit_its_file_once(tmp_path):
    (tmp_path / "base.py").write_text("a = 1\nb = 1\na = 1\n")
    assert (
        apply_patch("--- base.py\n@@\n b = 1\n+c = 1\n", tmp_path) == "a = 1\nb = 1\nc = 1\na = 1\n"
    )
    with pytest.raises(AssertionError, match="2 times"):
        apply_patch("--- base.py\n@@\n-a = 1\n", tmp_path)
    with pytest.raises(AssertionError, match="out of order"):
        apply_patch("--- base.py\n@@\n-b = 1\n@@\n a = 1\n a = 1\n", tmp_path)

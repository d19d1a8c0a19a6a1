"""Wrong resumes that `manyhands check --resume` has to find, and right ones."""

import sys
from pathlib import Path

import pytest

from manyhands.tools.check._job import CheckedScript
from manyhands.tools.check.resume import ResumeRequest, check_resume

sys.path.insert(0, str(Path(__file__).parent))
from check_scripts import fill, written
from resume_scripts import (
    CHECKPOINTS_LATER,
    CURSOR,
    CURSOR_DEFAULTS,
    FRAMEWORK_BUGS,
    FRAMEWORKS,
    REPORTS,
    RESUME_BUGS,
    RESUME_RIGHT,
    RESUMING,
    RESUMING_DEFAULTS,
    SAVE,
)

QUICK_BUGS = {
    "schedule not saved",
    "optimizer not loaded",
    "last batch repeated",
    "order of a set of strings",
}
QUICK_RIGHT = {"plain", "checkpoint per epoch"}


def few(names, quick):
    return [
        pytest.param(name, id=name, marks=() if name in quick else pytest.mark.long)
        for name in names
    ]


def checked(folder, text, *arguments, **options):
    script = CheckedScript(written(folder, text), arguments)
    verdict = check_resume(ResumeRequest(script, **options))
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    return verdict


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", few(RESUME_BUGS, QUICK_BUGS))
def test_a_wrong_resume_is_found_and_its_cause_named(name, tmp_path):
    right, bug, causes = RESUME_BUGS[name]
    text = fill(RESUMING, RESUMING_DEFAULTS, **{**right, **bug})
    verdict = checked(tmp_path, text, at=CHECKPOINTS_LATER.get(name, 1))
    assert verdict.code == 1, verdict.as_text()
    assert verdict.findings[0].cause in causes, verdict.as_text()


@pytest.mark.parametrize("name", few(RESUME_RIGHT, QUICK_RIGHT))
def test_a_right_resume_is_judged_right(name, tmp_path):
    verdict = checked(tmp_path, fill(RESUMING, RESUMING_DEFAULTS, **RESUME_RIGHT[name]))
    assert verdict.code == 0, verdict.as_text()


@pytest.mark.parametrize("name", few(FRAMEWORK_BUGS, ()))
def test_a_wrong_resume_with_a_trainer_is_found(name, tmp_path):
    framework, slots, at, then, causes = FRAMEWORK_BUGS[name]
    verdict = checked(tmp_path, fill(*FRAMEWORKS[framework], **slots), at=at, then=then)
    assert verdict.code == 1, verdict.as_text()
    assert verdict.findings[0].cause in causes, verdict.as_text()


@pytest.mark.parametrize("name", few(FRAMEWORKS, ()))
def test_a_right_resume_with_a_trainer_is_judged_right(name, tmp_path):
    verdict = checked(tmp_path, fill(*FRAMEWORKS[name]))
    assert verdict.code == 0, verdict.as_text()


@pytest.mark.parametrize("name", few(REPORTS, ()))
def test_a_bug_reported_in_public_is_found(name, tmp_path):
    template, slots, at, (ranks, then), causes = REPORTS[name]
    if "stateful" in slots.get("accelerator", ""):
        pytest.importorskip("torchdata.stateful_dataloader")
    verdict = checked(tmp_path, fill(*template, **slots), at=at, ranks=ranks, then=then)
    assert verdict.code == 1, verdict.as_text()
    assert verdict.findings[0].cause in causes, verdict.as_text()


@pytest.mark.long
@pytest.mark.parametrize("then", [1, 3])
def test_another_number_of_ranks_may_resume(then, tmp_path):
    verdict = checked(tmp_path, fill(CURSOR, CURSOR_DEFAULTS), then=then)
    assert verdict.code == 0, verdict.as_text()
    assert verdict.untested == [
        f"gradients, parameters and random states of later steps, as 2 ranks became {then}"
    ]


@pytest.mark.long
def test_a_checkpoint_may_be_written_while_training_goes_on(tmp_path):
    save = """
        group = dist.new_group(backend="gloo")
        dcp.async_save(state, checkpoint_id="ckpt", process_group=group)
    """
    template, slots = FRAMEWORKS["FSDP2"]
    verdict = checked(tmp_path, fill(template, slots, save=save))
    assert verdict.code == 0, verdict.as_text()


@pytest.mark.long
def test_rounding_of_three_ranks_is_allowed(tmp_path):
    verdict = checked(tmp_path, fill(RESUMING, RESUMING_DEFAULTS), ranks=3)
    assert verdict.code == 0, verdict.as_text()
    assert "DDP changes the order" in verdict.untested[0]


def test_the_cpu_passes_for_accelerators_that_a_script_requires(tmp_path):
    guard = "import torch, sys\nif torch.cuda.device_count() < 2: sys.exit('needs 2 GPUs')\n"
    verdict = checked(tmp_path, guard + fill(RESUMING, RESUMING_DEFAULTS))
    assert verdict.code == 0, verdict.as_text()
    assert "the CPU simulated an accelerator" in verdict.notes[-1]


NOT_JUDGED = {
    "no checkpoint": ({"save": SAVE + "\ncontinue"}, {}, "wrote no checkpoint between the first"),
    "a later checkpoint is wanted": (
        {},
        {"at": 1000},
        "made no step after the checkpoint and after step 1000",
    ),
    "never read": (
        {"load optimizer": "", "load schedule": "", "load extra": "", "load random": ""},
        {"script": lambda text: text.replace('os.path.exists("ckpt.pt")', "False")},
        "did not read this checkpoint",
    ),
    "wrong arguments": (
        {"load extra": "raise SystemExit(len(__import__('sys').argv))"},
        {"arguments": ("--resume", "{checkpoint}")},
        "failed: the script ended with exit code 3",
    ),
    "an error while loading": (
        {"load extra": "state['missing']"},
        {},
        "failed: KeyError: 'missing'",
    ),
    "a long error while loading": (
        {"load extra": "raise OSError('broken\\nfile')"},
        {},
        "failed: OSError: broken (File",
    ),
    "not reproducible": (
        {"extra": "torch.manual_seed(os.urandom(1)[0])\nmodel[0].reset_parameters()"},
        {},
        "the script is not reproducible",
    ),
}


@pytest.mark.parametrize("name", few(NOT_JUDGED, {"no checkpoint"}))
def test_without_a_result_the_reason_is_given(name, tmp_path):
    slots, options, reason = NOT_JUDGED[name]
    options = dict(options)
    change = options.pop("script", str)
    verdict = checked(tmp_path, change(fill(RESUMING, RESUMING_DEFAULTS, **slots)), **options)
    assert verdict.code == 2, verdict.as_text()
    assert reason in verdict.reason, verdict.as_text()
    assert "Traceback" not in verdict.as_text()


def test_the_killed_run_overwrites_no_file_of_the_user(tmp_path):
    (tmp_path / "ckpt.tmp").write_text("mine")
    script = CheckedScript(written(tmp_path, fill(RESUMING, RESUMING_DEFAULTS)))
    assert check_resume(ResumeRequest(script)).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt.tmp", "train.py"]
    assert (tmp_path / "ckpt.tmp").read_text() == "mine"

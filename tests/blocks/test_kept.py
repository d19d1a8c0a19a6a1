"""Workers that are forked from a process with torch imported: what they see, how they end."""

import errno
import json
import os
import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from helpers.run_command import Command, gone
from manyhands.blocks.crew import _fork_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forked workers need Linux")

# Worker 1 ends each time that the file "die" is there. Worker 0 trains until "enough" is there.
TRAIN = """
    import os, signal, sys, time, torch
    import manyhands as mh
    {start}
    crew = mh.Crew()
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = mh.LocalSGD(torch.optim.SGD([param], lr=1.0), every=4, crew=crew)
    print("in", crew.number, os.getpid(), flush=True)
    while not os.path.exists("enough"):
        param.grad = torch.ones(3)
        optimizer.step()
        time.sleep(0.01)
        if optimizer.steps > 8 and os.path.exists("die") and crew.number == 1:
            os.remove("die")
            {end}
    crew.leave()
"""
SEEN = """
    import atexit, json, multiprocessing, random, resource, threading, numpy
    main = sys.modules["__main__"]
    def function(): pass
    seen = dict(
        main=[__name__, __file__, __package__, __doc__, sorted(vars(main))],
        spec=__spec__ and [__spec__.name, __spec__.origin],
        loader=type(__loader__).__name__, code=function.__code__.co_filename,
        arguments=[sys.argv, sys.orig_argv, sys.path, sys.flags, os.getcwd()],
        environment=dict(os.environ),
        session=[os.getpid() == os.getpgid(0) == os.getsid(0), os.getppid()],
        descriptors=sorted(os.readlink(f"/proc/self/fd/{n}").partition(":")[0]
                           for n in os.listdir("/proc/self/fd") if n in "012"),
        open=len(os.listdir("/proc/self/fd")),
        streams=[[s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty()]
                 for s in (sys.stdin, sys.stdout, sys.stderr)], stdin=sys.stdin.read(),
        handlers=[repr(signal.getsignal(n)) for n in range(1, 32)],
        blocked=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        threads=[len(os.listdir("/proc/self/task")), torch.get_num_threads()],
        thread=threading.current_thread() is threading.main_thread(),
        process=[multiprocessing.current_process().name, multiprocessing.parent_process()],
        limits=resource.getrlimit(resource.RLIMIT_NOFILE),
    )
    drawn = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
    with open(f"seen-{os.getpid()}", "w") as file:
        json.dump([seen, drawn], file, default=repr)
    atexit.register(lambda: print("the end of", os.getpid(), flush=True))
""".strip()


def script(start="pass", end="os.kill(os.getpid(), signal.SIGKILL)"):
    return TRAIN.format(start=start, end=end)


def lives(command):
    """The process numbers of worker 1, one after the other, as far as they are in."""
    return re.findall(r"\[1\] in 1 (\d+)", command.said())


def die(command):
    """Let worker 1 die and come back; return its new process number."""
    before = len(lives(command))
    (command.folder / "die").touch()
    command.until(rf"(?s)(\[1\] in 1 .*){{{before + 1}}}", 60)
    return lives(command)[-1]


def is_forked(pid):
    return "_fork_server import serve" in Path(f"/proc/{pid}/cmdline").read_text()


def die_until_forked(command):
    """Let worker 1 die until it is forked: the kept process needs a second at first."""
    command.until(r"\[1\] in 1", 60)
    for _ in range(9):
        if is_forked(pid := die(command)):
            return pid
        time.sleep(1.0)
    raise AssertionError(command.said())


def kept_process(command, seconds=30.0):
    """The number of the kept process: a forked worker has its command line, and the same parent."""
    path = Path(f"/proc/{command.pid}/task/{command.pid}/children")
    until = time.monotonic() + seconds
    while True:
        found = {pid for pid in path.read_text().split() if is_forked(pid)} - {*lives(command)}
        if found or time.monotonic() > until:
            (pid,) = found
            return int(pid)
        time.sleep(0.05)


def finish(command):
    (command.folder / "enough").touch()
    assert command.wait(60) == 0, command.said()


@pytest.mark.long
@pytest.mark.parametrize("module", [False, True])
def test_a_forked_worker_sees_what_a_fresh_one_sees(tmp_path, module):
    options = ["--workers", "2", *(["-m", "train"] if module else [])]  # or the script's path
    with Command(tmp_path, script(SEEN), *options, arguments=["a", "--b"]) as command:
        forked = die_until_forked(command)
        finish(command)
    fresh = lives(command)[0]
    assert f"[1] the end of {forked}" in command.said()
    (expected, one), (found, other) = (
        json.loads((tmp_path / f"seen-{pid}").read_text()) for pid in (fresh, forked)
    )
    assert found == expected
    assert not set(one) & set(other)  # random numbers


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("raise ValueError('no such data')", "exit code 1"),
        ("sys.exit(7)", "exit code 7"),
        ("os._exit(9)", "exit code 9"),
        ("os.kill(os.getpid(), signal.SIGUSR1)", "SIGUSR1"),
        ("os.abort()", "SIGABRT"),
    ],
)
def test_a_forked_worker_ends_as_a_fresh_one_does(tmp_path, end, how):
    options = ["--workers", "2", "--restarts", "99"]
    with Command(tmp_path, script(end=end), *options) as command:
        die_until_forked(command)
        die(command)
        finish(command)
    said, deaths = command.said(), len(lives(command)) - 1
    assert said.count(f"worker 1 ended ({how}) and is started again.") == deaths
    # A traceback shows the script's own lines only.
    assert said.count("most recent call last") == (deaths if "ValueError" in end else 0)
    assert "_fork_server" not in said


@pytest.mark.long
def test_killing_the_kept_process_does_nothing_to_the_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(_fork_server, "REPLACE", 0.5)
    with Command(tmp_path, script(), "--workers", "2") as command:
        worker = die_until_forked(command)
        kept = kept_process(command)
        os.kill(kept, signal.SIGKILL)
        time.sleep(1.0)
        assert lives(command)[-1] == worker
        assert is_forked(worker)
        assert kept_process(command) != kept
        die_until_forked(command)
        finish(command)


@pytest.mark.long
def test_a_kept_process_that_is_killed_while_it_starts_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(_fork_server, "REPLACE", 0.5)
    with Command(tmp_path, script(), "--workers", "2") as command:
        command.until(r"\[1\] in 1", 60)
        os.kill(kept_process(command), signal.SIGKILL)
        die_until_forked(command)
        finish(command)
    assert "no worker is forked" not in command.said()


@pytest.mark.long
def test_a_kept_process_that_does_not_answer_is_replaced_and_forks_nothing_late(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(_fork_server, "REPLACE", 0.5)
    with Command(tmp_path, script(), "--workers", "2") as command:
        die_until_forked(command)
        kept = kept_process(command)
        os.kill(kept, signal.SIGSTOP)
        assert not is_forked(die(command))
        assert gone([kept])
        die_until_forked(command)
        finish(command)


@pytest.mark.long
def test_the_run_goes_on_if_no_process_can_be_kept(tmp_path, monkeypatch):
    def fail(name):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "memfd_create", fail)
    with Command(tmp_path, script(), "--workers", "2") as command:
        command.until("no worker is forked .*: .*Cannot allocate memory", 60)
        assert not is_forked(die(command))
        finish(command)


THREAD = """
    import threading
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("preload", "why"),
    [
        ("thread", "the fork server has 2 threads"),
        ("missing", "the fork server ended with exit code 1"),
    ],
)
def test_where_forking_is_not_safe_workers_are_started_afresh(tmp_path, preload, why):
    (tmp_path / "thread.py").write_text(textwrap.dedent(THREAD))
    with Command(tmp_path, script(), "--workers", "2", "--preload", preload) as command:
        command.until(r"\[1\] in 1", 60)
        while "no worker is forked" not in command.said():
            assert not is_forked(die(command))
        assert not is_forked(die(command))
        finish(command)
    assert command.said().count(f"no worker is forked from now on ({why})") == 1


@pytest.mark.long
def test_a_script_with_long_arguments_is_forked(tmp_path):
    """The system allows 128 KiB in each, and more in all."""
    start = "print('lengths', [len(word) for word in sys.argv[1:]])"
    words = ["a" * 100_000, "\u00e9" * 50_000]
    with Command(tmp_path, script(start), "--workers", "2", arguments=words) as command:
        die_until_forked(command)
        finish(command)
    lengths = re.findall(r"\[1\] lengths (.*)", command.said())
    assert set(lengths) == {"[100000, 50000]"}
    assert len(lengths) == len(lives(command))


@pytest.mark.long
def test_no_fork_keeps_no_process(tmp_path):
    with Command(tmp_path, script(), "--workers", "2", "--no-fork") as command:
        command.until(r"\[1\] in 1", 60)
        time.sleep(2.0)
        assert not is_forked(die(command))
        with pytest.raises(ValueError):
            kept_process(command, 0.0)
        finish(command)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_forked_worker_outlives_the_command(tmp_path, number):
    child = "import subprocess; subprocess.Popen(['sleep', '100'], start_new_session=True)"
    with Command(tmp_path, script(start=child), "--workers", "2") as command:
        worker = int(die_until_forked(command))
        kept = kept_process(command)
        os.kill(command.pid, number)
        assert gone([worker, kept])
        os.waitpid(command.pid, 0)
        command.code = -number

"""The command `manyhands run`: what it starts, passes on, starts again and returns."""

import os
import re
import signal
import socket
import subprocess
import threading
import time

import pytest

from helpers.crew_workers import SECRET, Store
from helpers.run_command import Command, alive, gone
from manyhands._ranks.message_box import HeartbeatMonitor
from manyhands.blocks.crew import _launcher, _link, _store
from manyhands.blocks.crew._roster import Member, Version
from manyhands.blocks.crew._shared_roster import SharedRoster
from manyhands.blocks.crew._store import Signer, StoreClient


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


SLEEPERS = """
    import os, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    print("pids", os.getpid(), child.pid, flush=True)
    time.sleep(100)
"""


def test_each_line_stands_behind_its_workers_number_and_arguments_pass_through(tmp_path):
    script = """
        import os, sys
        print(sys.argv[1:], os.environ["MANYHANDS_WORKERS"], os.environ["OMP_NUM_THREADS"])
        sys.stdout.buffer.write(b"\\xff no newline"); sys.stdout.flush()
        print(os.environ["MANYHANDS_STALL"], os.environ["MANYHANDS_PATIENCE"], file=sys.stderr)
    """
    options = ("--workers", "2", "--stall", "3", "--patience", "90")
    with Command(tmp_path, script, *options, arguments=("--steps", "9", "--help", "-x")) as command:
        assert command.wait() == 0
    assert sorted(command.out.read_bytes().splitlines()) == [
        b"[0] ['--steps', '9', '--help', '-x'] 2 1",
        b"[0] \xff no newline",
        b"[1] ['--steps', '9', '--help', '-x'] 2 1",
        b"[1] \xff no newline",
    ]
    *lines, note = command.err.read_text().splitlines()
    assert sorted(lines) == ["[0] 3 90", "[1] 3 90"]
    assert note == f"manyhands run: {_launcher.NO_CREW}"


@pytest.mark.long
def test_workers_whose_blocks_got_no_crew_are_told_that_each_trains_alone(tmp_path):
    script = """
        import torch, manyhands as mh
        model = torch.nn.Linear(2, 1)
        optimizer = mh.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), every=2{crew})
        optimizer.finish()
    """
    told = "UserWarning: this run has 2 workers, but DiLoCo got no crew"
    for name, crew, workers, warnings, notes in (
        ("alone", "", "2", 2, 1),
        ("one", "", "1", 0, 0),
        ("crew", ", crew=mh.Crew()", "2", 0, 0),
    ):
        own = script.format(crew=crew)
        with Command(tmp_path, own, "--workers", workers, name=name) as command:
            assert command.wait(60) == 0
        said = command.err.read_text()
        assert (said.count(told), said.count(_launcher.NO_CREW)) == (warnings, notes), said


@pytest.mark.parametrize("own", [None, "ndots:2"])
def test_a_lost_answer_of_a_name_server_costs_a_second_unless_the_user_says_otherwise(
    tmp_path, monkeypatch, own
):
    """torch asks for a name at each new connection to the store."""
    monkeypatch.delenv("RES_OPTIONS")  # which conftest.py sets
    if own is not None:
        monkeypatch.setenv("RES_OPTIONS", own)
    script = "import os; print(os.environ['RES_OPTIONS'])"
    with Command(tmp_path, script, "--workers", "1") as command:
        assert command.wait() == 0
    assert command.out.read_text().strip() == f"[0] {own or 'timeout:1 attempts:5'}"


@pytest.mark.sample("instead0-output is lost (Broken pipe)", "instead2-None", "instead4-None")
@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ({1: "head"}, "output is lost (Broken pipe)"),
        ({1: "/dev/full"}, "output is lost (No space left on device)"),
        ({2: "/dev/full"}, None),
        ({1: "head", 2: "/dev/full"}, None),
        ({1: "/dev/full", 2: "head"}, None),
    ],
)
def test_workers_go_on_if_what_they_print_cannot_be_written(tmp_path, instead, said):
    """As in `manyhands run ... | head -1`: the launcher prints it, for all of them."""
    script = """
        import os, signal, sys, time
        for line in range(30):
            print("line", line)
            print("error", line, file=sys.stderr)
            time.sleep(0.01)
        if not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        open("done", "w").close()
        sys.exit(7)
    """
    os.mkfifo(tmp_path / "head")
    places = {number: tmp_path / name for number, name in instead.items()}
    head = subprocess.Popen(["head", "-n", "1", tmp_path / "head"], stdout=subprocess.DEVNULL)
    try:
        with Command(tmp_path, script, "--workers", "1", instead=places) as command:
            assert command.wait() == 7
    finally:
        head.kill()  # if it had nothing to read
        head.wait()
    assert (tmp_path / "done").exists()
    if 1 not in instead:
        assert command.out.read_text().count("[0] line 29\n") == 2
    if 2 not in instead:
        errors = command.err.read_text()
        assert errors.count("is lost") == errors.count(said) == 1
        assert "worker 0 ended (SIGKILL) and is started again." in errors


def test_an_error_at_the_start_ends_the_run_with_it(tmp_path):
    script = """
        import os, sys, time
        if os.environ["MANYHANDS_WORKER"] == "1":
            sys.exit("no such data")
        time.sleep(100)
    """
    with Command(tmp_path, script, "--workers", "3") as command:
        began = time.monotonic()
        assert command.wait() == 1
        assert time.monotonic() - began < 30
    assert "[1] no such data" in command.err.read_text()
    assert "worker 1 ended (exit code 1) before the first sync round." in command.err.read_text()


def test_a_killed_worker_is_started_again(tmp_path):
    script = """
        import os, signal
        run = "run" + os.environ["MANYHANDS_WORKER"]
        with open(run, "a") as file:
            file.write("x")
        print("start", os.path.getsize(run))
        if run == "run1" and os.path.getsize(run) < 3:
            os.kill(os.getpid(), signal.SIGKILL)
    """
    with Command(tmp_path, script, "--workers", "2", "--restarts", "0") as command:
        assert command.wait() == 0
    assert command.err.read_text().count("worker 1 ended (SIGKILL) and is started again.") == 2
    assert "[1] start 3" in command.out.read_text()
    assert "[0] start 2" not in command.out.read_text()


def test_the_pause_before_a_restart_grows_to_a_limit_and_never_overflows():
    pauses = [_launcher._restart_pause(short) for short in (0, 1, 2, 3, 4, 20, 5000)]
    assert pauses == [0, 0, 1, 2, 4, 30, 30]


class Others:
    """The rest of a run, played by the test: a member that is alive on another host."""

    def __init__(self, port):
        monitor = HeartbeatMonitor(1.0)
        self.shared = SharedRoster(StoreClient(f"127.0.0.1:{port}", 0.2, Signer(SECRET)), monitor)

    def hold_round(self, *ids):
        for id in ids:
            self.shared.client.put(f"manyhands/heartbeat/{id}", "1 0")
            self.shared.change(lambda roster, id=id: roster.ask_to_join(Member(id, Version(0))))
        self.shared.change(lambda roster: roster.next(frozenset()))
        self.shared.change(lambda roster: roster.keep(roster.generation, 0))

    def leave(self, id):
        self.shared.refresh()
        self.shared.change(lambda roster: roster.without(id, left=True))
        self.shared.client.close()


ERROR_IN_A_STEP = """
    import os, time, torch
    import manyhands as mh
    if os.path.exists("broken"):
        open("back", "w").close()
    crew = mh.Crew()
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = mh.LocalSGD(torch.optim.SGD([param], lr=1.0), every=4, crew=crew)
    print("came", crew.size, flush=True)
    while optimizer.steps < 12:
        if optimizer.steps == int(os.environ["BREAKS_AT"]) and crew.number == 1:
            if not os.path.exists("broken"):
                open("broken", "w").close()
                raise SystemExit("no such data")
        while crew.number == 0 and optimizer.steps == 10 and not os.path.exists("back"):
            time.sleep(0.01)
        param.grad = torch.ones(3)
        optimizer.step()
    optimizer.finish()
"""


@pytest.mark.long
def test_an_error_before_the_first_sync_round_ends_the_run(tmp_path, monkeypatch):
    """The workers have joined, and joiners have received the parameters: there is no round yet."""
    monkeypatch.setenv("BREAKS_AT", "3")
    with Command(tmp_path, ERROR_IN_A_STEP, "--workers", "2") as command:
        assert command.wait(60) == 1
    assert command.out.read_text().count("came 2") == 2
    assert "ended (exit code 1) before the first sync round." in command.err.read_text()
    assert "no worker has joined" not in command.err.read_text()
    assert "[1] no such data" in command.err.read_text()


REFUSED = """
    import os, signal, time, torch
    import manyhands as mh
    crew = mh.Crew()
    again = crew.number == 1 and os.path.exists("killed")
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([param], lr=1.0)
    optimizer = mh.LocalSGD(optimizer, every=5 if again else 4, crew=crew)
    while optimizer.steps < 40:
        if crew.number == 1 and optimizer.steps == 8:
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if crew.number == 0 and optimizer.steps == 24:
            while not os.path.exists("enough"):
                time.sleep(0.01)
        param.grad = torch.ones(3)
        optimizer.step()
    optimizer.finish()
    print("done", param.tolist(), flush=True)
"""


@pytest.mark.long
def test_a_worker_that_is_refused_is_not_started_again_and_the_run_has_not_ended_well(tmp_path):
    with Command(tmp_path, REFUSED, "--workers", "2") as command:
        command.until("worker 1 was not let in .*: it is not started again", 60)
        (tmp_path / "enough").touch()
        assert command.wait(60) == 1
    assert "every: 5 here, 4 in the run" in command.err.read_text()
    assert "[0] done [-40.0, -40.0, -40.0]" in command.out.read_text()
    assert command.err.read_text().count("worker 1 was not let in (") == 1


LISTENERS = """
    import os, torch
    import torch.distributed as dist
    from manyhands._ranks.groups import internet_sockets
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    found = set()
    for end in internet_sockets():
        if end.getsockopt(1, 30):  # SOL_SOCKET, SO_ACCEPTCONN
            found.add(end.getsockname()[0])
        end.close()
    print("sum", int(total), "listens", sorted(found), flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.long
def test_processes_of_a_worker_listen_on_no_interface_but_one(tmp_path):
    options = ("--workers", "1", "--processes", "2")
    with Command(tmp_path, LISTENERS, *options) as command:
        assert command.wait(60) == 0
    said = command.out.read_text()
    assert said.count("sum 2") == 2
    assert "0.0.0.0" not in said and "'::'" not in said


def test_hosts_need_a_secret_that_both_know(tmp_path, monkeypatch):
    monkeypatch.delenv("MANYHANDS_SECRET")
    script = "import os; print(len(os.environ['MANYHANDS_SECRET']))"
    with Command(tmp_path, script, "--workers", "1") as command:
        assert command.wait() == 0
    assert command.out.read_text() == "[0] 64\n"
    for options in (("--listen", "127.0.0.1:0"), ("--store", "127.0.0.1:1", "--numbers", "1")):
        with Command(tmp_path, script, "--workers", "1", *options, name="hosts") as command:
            assert command.wait() == 2
        assert "Set MANYHANDS_SECRET on each host" in command.err.read_text()


def test_a_second_store_at_the_same_address_is_an_error_with_the_remedy(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with Command(tmp_path, "pass", "--workers", "1", "--listen", address) as command:
            assert command.wait(30) == 2
    assert f"another program listens at {address}" in command.said()
    assert "--listen another port" in command.said()


def test_errors_after_the_first_round_are_tried_again_so_many_times(tmp_path):
    script = """
        import os, sys, time
        while not os.path.exists("round"):
            time.sleep(0.01)
        print("again")
        sys.exit(7 if os.environ["MANYHANDS_WORKER"] == "1" else 0)
    """
    port = free_port()
    options = ("--workers", "2", "--listen", f"127.0.0.1:{port}", "--restarts", "1")
    with Command(tmp_path, script, *options) as command:
        others = Others(port)
        others.hold_round("9.1")
        (tmp_path / "round").touch()
        command.until("it is not started again")
        time.sleep(0.3)
        assert alive(command.pid)  # it serves the store to the others
        others.leave("9.1")
        assert command.wait() == 7
    assert command.out.read_text().count("[1] again") == 2
    assert command.out.read_text().count("[0] again") == 1


def test_what_ends_badly_after_the_others_have_finished_does_not_count(tmp_path):
    script = """
        import os, sys, time
        while not os.path.exists("finished"):
            time.sleep(0.01)
        sys.exit(7)
    """
    port = free_port()
    with Command(tmp_path, script, "--workers", "1", "--listen", f"127.0.0.1:{port}") as command:
        others = Others(port)
        others.hold_round("9.1")
        others.leave("9.1")
        (tmp_path / "finished").touch()
        assert command.wait() == 0
    assert "when the others had finished" in command.err.read_text()


def test_a_stopped_worker_is_killed_and_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(_link, "STOPPED_LIMIT", 0.5)
    script = """
        import os, signal, time
        if not os.path.exists("stopped"):
            open("stopped", "w").close()
            os.kill(os.getpid(), signal.SIGSTOP)
    """
    port = free_port()
    with Command(tmp_path, script, "--workers", "1", "--listen", f"127.0.0.1:{port}") as command:
        others = Others(port)
        others.hold_round("0.1")
        others.shared.client.close()
        assert command.wait() == 0
    assert "worker 0 had no heartbeat for 0.5 s and is killed" in command.err.read_text()
    assert "worker 0 ended (SIGKILL) and is started again" in command.err.read_text()


@pytest.mark.parametrize(
    ("number", "processes"),
    [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGKILL, 1), (signal.SIGKILL, 2)],
)
def test_no_worker_outlives_the_command(tmp_path, number, processes):
    options = ("--workers", "2", "--processes", str(processes))
    with Command(tmp_path, SLEEPERS, *options) as command:
        command.until(rf"(?s)(pids.*){{{2 * processes}}}")
        found = re.findall(r"pids (\d+) (\d+)", command.said())
        pids = [int(pid) for pair in found for pid in pair]
        os.kill(command.pid, number)
        assert command.wait() == (-number if number == signal.SIGKILL else 128 + number)
    assert gone(pids)


TWO_HOSTS = """
    import time, torch
    import manyhands as mh
    crew = mh.Crew()
    torch.manual_seed(crew.number)
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = mh.LocalSGD(torch.optim.SGD([param], lr=1.0), every=4, crew=crew)
    while optimizer.steps < 8:
        param.grad = torch.randn(3)
        optimizer.step()
    optimizer.finish()
    time.sleep(0.5 * crew.number)  # evaluates, or saves
"""


@pytest.mark.long
def test_the_store_stays_until_the_launcher_of_another_host_has_ended(tmp_path):
    store = f"127.0.0.1:{free_port()}"
    first = ("--workers", "1", "--listen", store, "--expected", "2")
    with (
        Command(tmp_path, TWO_HOSTS, *first, name="first") as one,
        Command(tmp_path, TWO_HOSTS, "--store", store, "--numbers", "1", name="further") as two,
    ):
        assert one.wait(60) == 0
        assert two.wait(10) == 0
    assert one.err.read_text() == two.err.read_text() == ""
    forks = [(tmp_path / f"{name}.fork").read_text() for name in ("first", "further")]
    assert forks == ["", ""]


@pytest.mark.long
def test_a_host_that_vanished_is_not_waited_for_longer_than_that(tmp_path, monkeypatch):
    monkeypatch.setattr(_store, "STORE_TIMEOUT", 8.0)
    script = """
        import os, time
        while not os.path.exists("enough"):
            time.sleep(0.01)
    """
    port = free_port()
    with Command(tmp_path, script, "--workers", "1", "--listen", f"127.0.0.1:{port}") as command:
        others = Others(port)
        others.shared.change(lambda roster: roster.with_launcher("host-gone"))
        others.shared.client.put("manyhands/heartbeat/host-gone", "1 0")
        others.shared.client.close()
        (tmp_path / "enough").touch()
        time.sleep(2.0)
        assert alive(command.pid)  # it may still need the store
        assert command.wait(30) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give the number of workers"),
        (("--store", "a:1"), "--store needs --numbers"),
        (("--worker", "2"), "there is no option --worker. Did you mean --workers?"),
        (("--module", "train"), "there is no option --module. Write options before the script."),
        (("--numbers", "7-4"), "--numbers takes FIRST-LAST"),
        (("--numbers", "4-7", "--workers", "2"), "contradict"),
        (("--workers", "1", "--listen", "nowhere"), 'store is "host:port"'),
        (("--workers", "1", "--patience", "1"), "--patience must be at least --stall"),
    ],
)
def test_options_that_do_not_fit_are_an_error_at_once(tmp_path, words, message):
    with Command(tmp_path, "", *words) as command:
        assert command.wait() == 2
    assert message in command.err.read_text()


def test_a_further_host_waits_for_the_number_of_expected_workers(monkeypatch):
    with Store() as store:
        client = StoreClient(store.address, 1.0, Signer(SECRET))

        def expected():
            launcher = _launcher.Launcher(["true"], range(3), store.address, serving=False)
            launcher.link.shared.client.close()
            return launcher.environment["MANYHANDS_WORKERS"]

        monkeypatch.setattr(_link, "EXPECTED_WAIT", 0.0)
        assert expected() == "3"  # not published in time: as many as are here
        client.call("delete_key", "manyhands/expected")
        monkeypatch.setattr(_link, "EXPECTED_WAIT", 20.0)
        publish = threading.Timer(0.3, client.put, ("manyhands/expected", "7"))
        publish.start()
        assert expected() == "7"
        publish.join()
        client.close()

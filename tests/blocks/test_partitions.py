"""A crew that is cut in two by real routes: network namespaces, and a router between them.

Of five workers three are in one network and two in another one, and the store is in a third. The
half with the quorum goes on, the other one waits and comes back, in the same processes. Each
sample is committed once, and no two workers ever differ.
"""

import os
import signal
import socket
import time

import pytest

import manyhands as mh
from helpers.crew_workers import SECRET, Store
from helpers.data_workers import DataWorkers
from helpers.networks import Networks, NoNetworks
from helpers.run_command import Command
from manyhands.blocks.crew import _crew, _roster, _shared_roster, _store
from manyhands.blocks.crew._store import TCP_RTO_MAX_MS

pytestmark = pytest.mark.long

NEAR, FAR = (0, 1, 2), (3, 4)
STORE_TIMEOUT = 5.0
OPTIONS = {"expected": 5, "quorum": 3, "stall": 1.5, "patience": "auto"}
OWN = mh.Seconds(0.2, first=3, own_steps=True)

CUTS = {  # what happens to the line of the far workers, and how it is mended
    "unplugged": (lambda n: n.unplug("far"), lambda n: n.plug_in("far")),
    "all dropped": (lambda n: n.drop("far"), lambda n: n.mend("far")),
}


@pytest.fixture
def networks(monkeypatch):
    monkeypatch.setattr(_store, "STORE_TIMEOUT", STORE_TIMEOUT)
    try:
        networks = Networks().__enter__()
    except NoNetworks as error:
        pytest.skip(f"network namespaces are not allowed here: {error}")
    yield networks
    networks.__exit__()


@pytest.mark.parametrize(
    ("make", "watched"), [(mh.LocalSGD, 64), (mh.DiLoCo, 64), (mh.LocalSGD, 1)]
)
@pytest.mark.parametrize(("cut", "mend"), CUTS.values(), ids=CUTS)
def test_the_half_with_the_quorum_goes_on_and_the_other_comes_back(
    networks, tmp_path, monkeypatch, cut, mend, make, watched
):
    for module in (_crew, _roster, _shared_roster):  # 1: as a crew of hundreds
        monkeypatch.setattr(module, "WATCHED", watched)
    options = {"make": make, "every": OWN, "pause": 0.005}
    with (
        Store(networks.address("store")) as store,
        DataWorkers(store, tmp_path, **OPTIONS) as workers,
    ):
        with networks.inside("near"):
            workers.start(NEAR, **options)
        with networks.inside("far"):
            workers.start(FAR, **options)
        for _ in range(2):
            workers.wait_for_members({*NEAR, *FAR}, rounds=4)  # by then the grace window is known
            cut(networks)
            workers.wait_for_members({*NEAR})
            alone = len(workers.members())
            workers.until(lambda n=alone: len(workers.members()) >= n + 5, timeout=60)
            before = [len(workers.events(number, "commit")) for number in FAR]
            time.sleep(STORE_TIMEOUT + 1.0)  # those who lost the store have noticed
            assert [len(workers.events(number, "commit")) for number in FAR] == before
            mend(networks)
        workers.wait_for_members({*NEAR, *FAR})
        workers.stop_soon()
        workers.finish(timeout=90)
        workers.each_sample_once()
        assert set(workers.incarnations.values()) == {1}
        assert workers.last(3, "done", "dropped") > 0 == workers.last(0, "done", "dropped")


def test_a_call_to_the_store_ends_soon_after_the_line_is_mended(networks, monkeypatch):
    """By itself TCP sends again about 6.5 and 13 s after the cut."""
    with socket.socket() as end:
        try:
            end.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
        except OSError:
            pytest.skip("this Linux has no TCP_RTO_MAX_MS: 6.15 or later has")
    monkeypatch.setattr(_store, "STORE_TIMEOUT", 30.0)
    with Store(networks.address("store")) as store:
        with networks.inside("far"):
            client = _store.StoreClient(store.address, 0.2, _store.Signer(SECRET))
        client.start_heartbeat("heartbeat")
        networks.drop("far")
        time.sleep(8.0)
        networks.mend("far")
        began = time.monotonic()
        client.fetch("key")
        assert time.monotonic() - began < 2.0
        client.close()


@pytest.mark.parametrize("linux", ["of today", "before 6.15"])
@pytest.mark.parametrize("lost", ["both ways", "answers only"])
def test_tcp_gives_up_after_the_store_client_does(networks, monkeypatch, linux, lost):
    """By itself TCP gives up after 15 retries (here 3), which take 15 s with TCP_RTO_MAX_MS."""
    monkeypatch.setattr(_store, "STORE_TIMEOUT", 30.0)
    if linux == "before 6.15":
        monkeypatch.setattr(_store, "TCP_RTO_MAX_MS", 0x7FFF)  # an option that no Linux has
    for host in ("store", "far"):
        networks.set(host, "ipv4/tcp_retries2", 3)
    with Store(networks.address("store")) as store:
        with networks.inside("far"):
            client = _store.StoreClient(store.address, 0.2, _store.Signer(SECRET))
        client.start_heartbeat("heartbeat")
        networks.drop("far", one_way=lost == "answers only")
        time.sleep(6.0)
        networks.mend("far", one_way=lost == "answers only")
        assert client.fetch("key") is None
        client.close()


def test_one_that_is_cut_off_as_it_finishes_waits_and_leaves_with_the_others(networks, tmp_path):
    options = {"every": OWN, "pause": 0.005}
    with (
        Store(networks.address("store")) as store,
        DataWorkers(store, tmp_path, **OPTIONS) as workers,
    ):
        with networks.inside("near"):
            workers.start(NEAR, **options)
        with networks.inside("far"):
            workers.start(FAR, **options)
        workers.wait_for_members({*NEAR, *FAR})
        workers.stop_soon()
        networks.drop("far")
        workers.until(lambda: bool(workers.events(0, "done")), timeout=60)
        networks.mend("far")
        workers.finish(timeout=90)
        workers.each_sample_once()
        for number in FAR:  # the run may have ended without it
            assert workers.events(number, "done") or workers.events(number, "late")


COMMAND = """
    import os, time, torch
    import manyhands as mh
    from manyhands.blocks.crew import _store
    _store.STORE_TIMEOUT = 5.0
    crew = mh.Crew()
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = mh.LocalSGD(torch.optim.SGD([param], lr=1.0), every=4, crew=crew)
    generation = 0
    while not os.path.exists("enough"):
        if crew.generation != generation:
            generation = crew.generation
            print("in", crew.number, os.getpid(), crew.members, flush=True)
        param.grad = torch.ones(3)
        optimizer.step()
        time.sleep(0.05)
    crew.leave()
"""


def test_a_command_whose_host_returns_restarts_its_workers(networks, tmp_path):
    options = ("--expected", "3", "--quorum", "2")
    with Store(networks.address("store")) as store:
        with networks.inside("near"):
            places = ("--store", store.address, "--numbers", "0-1")
            near = Command(tmp_path, COMMAND, *places, *options, name="near")
        with networks.inside("far"):
            places = ("--store", store.address, "--numbers", "2")
            far = Command(tmp_path, COMMAND, *places, *options, name="far")
        with near, far:
            far.until(r"in 2 \d+ \(0, 1, 2\)", 90)
            networks.drop("far")
            far.until("is lost: no answer for 5 s", 30)
            near.until(r"in 0 \d+ \(0, 1\)", 30)
            networks.mend("far")
            far.until("answers again", 30)
            pid = far.until(r"(?s)in 2 (\d+) \(0, 1, 2\).*in 2 \1 \(0, 1, 2\)", 60)[1]
            os.kill(int(pid), signal.SIGKILL)
            far.until(r"worker 2 ended \(SIGKILL\) and is started again", 30)
            far.until(rf"in 2 (?!{pid})\d+ \(0, 1, 2\)", 60)
            (tmp_path / "enough").touch()
            assert near.wait(60) == far.wait(60) == 0

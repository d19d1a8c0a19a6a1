"""Process groups of our own: how many there are, and when they end."""

import fcntl
import gc
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.pages import ROOT
from helpers.ranks import on_ranks, run_ranks
from manyhands._ranks import groups
from manyhands._ranks.groups import (
    TCP_CLOSE,
    TCP_ESTABLISHED,
    GroupCloser,
    HeldGroup,
    WatchedSocket,
    forget_sockets,
    group_closer,
    internet_sockets,
    shut_connections,
    watched_sockets,
)
from manyhands._ranks.ranks import RankGroup

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc, which is Linux's"
)


def adascale():
    model = torch.nn.Linear(4, 4)
    return DistributedDataParallel(model), mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))


def noise_scale():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.noise = mh.NoiseScale(optimizer)
    return DistributedDataParallel(model), optimizer


def sharded():
    model = torch.nn.Linear(4, 4)
    optimizer = mh.OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1)
    return mh.ShardedDataParallel(model, optimizer), optimizer


def sharded_in_shared_memory():
    model = torch.nn.Linear(4, 4)
    optimizer = mh.OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1, shared_memory=True)
    return mh.ShardedDataParallel(model, optimizer), optimizer


def overlapped_blocks():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, mh.DiLoCo(optimizer, every=2, overlap=1)


KINDS = [adascale, noise_scale, sharded, sharded_in_shared_memory, overlapped_blocks]


def train(make, steps=3):
    model, optimizer = make()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def threads():
    return len(os.listdir("/proc/self/task"))


def settled(count, most, seconds=5.0):
    """The count, once it is no more than that: groups end in threads of their own."""
    until = time.monotonic() + seconds
    while count() > most and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    return count()


@pytest.mark.sample("adascale", "sharded", "overlapped_blocks")
@pytest.mark.filterwarnings("ignore:in the first block all")  # the ranks train on equal data
@pytest.mark.parametrize("make", KINDS)
def test_what_is_dropped_leaves_no_descriptors_and_no_threads(make):
    def work():
        train(adascale, 1)  # what torch opens once and keeps
        before = settled(descriptors, 0, 0.2), threads()
        for _ in range(3):
            train(make)
        return [before, (settled(descriptors, before[0]), settled(threads, before[1]))]

    for before, after in run_ranks(2, work):
        assert after <= before


@on_ranks(2)
def test_sixty_constructions_fit_into_the_descriptors_of_a_few():
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    for _ in range(60):
        train(adascale, 1)
        settled(descriptors, 96)  # groups end in threads, which wait for a busy processor


@on_ranks(4)
def test_a_group_that_one_rank_drops_at_once_is_whole_on_the_others():
    for _ in range(20):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        mh.AdaScale(optimizer)  # and drop it


@on_ranks(2)
def test_a_rank_that_drops_its_rule_later_than_the_others_finds_them_again():
    kept = [train(adascale)]
    if dist.get_rank() == 1:
        kept.clear()
        gc.collect()
    _, second = train(adascale)
    kept.clear()
    _, third = train(adascale)
    assert [round(second.gain(), 6), round(third.gain(), 6)] == [1.0, 1.0]


def test_a_drop_does_not_wait_for_what_others_have_not_sent():
    def work():
        model, optimizer = train(adascale)
        took = 0.0
        if dist.get_rank() == 0:
            workers = optimizer._core.measurement.ranks
            under_way = workers.sum_and_gather(torch.zeros(4), 0)  # the other rank never answers
            begin = time.monotonic()
            del model, optimizer, workers, under_way
            gc.collect()
            took = time.monotonic() - begin
        dist.barrier()
        return took

    assert max(run_ranks(2, work)) < 10.0  # a wait would last as long as gloo's timeout


def test_a_forked_child_lets_go_of_no_group():
    """Its threads stayed in the process that made it, and the child would wait for them."""

    class Group:
        pass

    group = Group()
    seen = weakref.ref(group)
    held = HeldGroup(group, process=os.getpid() + 1)  # as in a forked child
    del group
    group_closer.close_when_unused(held)
    held.group = None
    assert seen() is not None
    assert not any(thread.name == "manyhands end" for thread in threading.enumerate())


def test_the_end_waits_a_second_for_all_threads_and_for_none_that_was_not_started():
    closer, end = GroupCloser(), threading.Event()
    threads = [threading.Thread(target=end.wait, daemon=True) for _ in range(4)]
    for number, thread in enumerate(threads):
        closer.await_at_end(thread)
        if number > 0:
            thread.start()
    begin = time.monotonic()
    closer.close()
    took = time.monotonic() - begin
    end.set()
    assert 0.9 < took < 2.5


@pytest.mark.long
def test_python_does_not_end_while_a_sync_round_is_in_cpp(tmp_path):
    """A thread that returns from C++ while Python ends aborts the process: exit code 134."""
    script = """
        import time
        import torch
        from manyhands._ranks.ranks import RankGroup
        from manyhands.blocks.averaging._round import BackgroundSync

        def sync_round(_):
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                torch.mm(torch.ones(200, 200), torch.ones(200, 200))

        BackgroundSync(sync_round, RankGroup(), None).start()
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    ended = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@on_ranks(2)
def test_a_new_world_after_the_old_one_gets_new_groups():
    kept = train(adascale)
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=size
    )
    _, optimizer = train(adascale)
    assert [round(optimizer.gain(), 6), len(kept)] == [1.0, 2]


@pytest.fixture
def scale(monkeypatch):
    """The benchmark that counts what groups ask of the store."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return __import__("scale")


def test_what_a_group_asks_of_the_store_does_not_grow_with_its_ranks(scale):
    (few, bytes_of_few, _), (many, bytes_of_many, _) = (
        scale.count(scale.ring, size) for size in (4, 16)
    )
    assert few == many == 5  # its address, and two neighbours'
    assert bytes_of_many <= bytes_of_few + few  # a rank of two digits


def test_a_group_for_slices_asks_once_for_each_rank(scale):
    for size in (4, 16):
        assert scale.count(scale.pairs, size)[0] == 1 + 2 * (size - 1)  # gloo waits, then gets


def test_a_group_has_connected_when_it_is_made(scale):
    def one(store, rank, size, gather):
        with torch.device("meta"):  # whatever the default device is
            lease = scale.ring(store, rank, size, gather)
        gather([0.0])
        asked = store.counted.requests.total()
        scale.use(lease[0].group, size)
        assert store.counted.requests.total() == asked
        return lease

    assert scale.count(one, 3)[0] == 5


def test_where_gloo_cannot_connect_lazily_it_connects_at_once(monkeypatch):
    create = dist.ProcessGroupGloo.create_device

    def refuse(lazy_init, **where):
        if lazy_init:
            raise RuntimeError("lazy_init is not supported")
        return create(**where)

    def work():
        _, optimizer = train(adascale)
        return round(optimizer.gain(), 6)

    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", refuse)
    assert run_ranks(2, work) == [1.0] * 2


def test_only_sockets_that_were_never_connected_are_taken_off_an_epoll():
    with (
        select.epoll() as epoll,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connected,
        socket.socket() as closed,
        socket.socket(type=socket.SOCK_DGRAM) as datagrams,
    ):
        for end in (server, connected, closed, datagrams):
            epoll.register(end)
        watched = watched_sockets([epoll.fileno()])
        assert {each.descriptor for each in watched} == {
            server.fileno(),
            connected.fileno(),
            closed.fileno(),
        }
        never_connected = {each for each in watched if each.state == TCP_CLOSE}
        assert [each.descriptor for each in never_connected] == [closed.fileno()]
        assert (closed.fileno(), select.EPOLLHUP | select.EPOLLOUT) in epoll.poll(0)
        forget_sockets(never_connected)
        forget_sockets(never_connected)  # twice changes nothing
        assert closed.fileno() not in dict(epoll.poll(0))
        assert not never_connected & watched_sockets([epoll.fileno()])


def test_a_socket_that_only_has_the_number_of_one_on_the_list_is_not_watched():
    """As in a forked process, which has its parent's epolls and opens other sockets."""
    with (
        select.epoll() as epoll,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        epoll.register(server)
        assert {each.descriptor for each in watched_sockets([epoll.fileno()])} == {server.fileno()}
        with server.dup():  # which keeps it on the list
            os.dup2(other.fileno(), server.fileno())
            assert watched_sockets([epoll.fileno()]) == set()


def test_a_socket_that_gets_the_number_of_a_closed_one_is_not_shut(monkeypatch):
    """It may listen for the connections of a new group, and gloo aborts if it cannot accept."""
    with socket.create_server(("127.0.0.1", 0)) as listening, select.epoll() as epoll:
        closed = WatchedSocket(epoll.fileno(), listening.fileno(), "1", TCP_ESTABLISHED)
        monkeypatch.setattr(groups, "watched_sockets", lambda _: {closed})
        assert shut_connections([epoll.fileno()]) == {closed}
        with socket.create_connection(listening.getsockname()):
            listening.settimeout(5.0)
            listening.accept()[0].close()


def test_connections_that_are_shut_deliver_what_was_sent_before():
    with (
        select.epoll() as epoll,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connected,
    ):
        accepted, _ = server.accept()
        with accepted:
            epoll.register(server)
            epoll.register(connected)
            connected.sendall(b"sent before")
            shut = shut_connections([epoll.fileno()])
            assert [each.descriptor for each in shut] == [connected.fileno()]
            assert accepted.recv(100) == b"sent before"
            assert accepted.recv(100) == b""
        assert shut_connections([]) == set()


def test_a_connection_that_the_other_side_has_reset_does_not_keep_the_next_one_open():
    with (
        select.epoll() as epoll,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as first,
        socket.create_connection(server.getsockname()) as second,
    ):
        peers = [server.accept()[0] for _ in range(2)]
        peers[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peers[0].close()
        epoll.register(first)
        epoll.register(second)
        with peers[1]:
            shut_connections([epoll.fileno()])
            assert peers[1].recv(1) == b""


@on_ranks(4)
def test_groups_end_while_forked_processes_have_copies_of_their_sockets():
    """As the workers of a DataLoader: gloo aborted the process that closed such a group."""
    children = []
    for _ in range(15):
        ranks = RankGroup.of().with_cpu_group(pairs=True)
        if dist.get_rank() > 0:  # rank 0's connections really end when it closes them
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            children.append(child)
        dist.barrier()  # all ranks drop the group together
        del ranks
    left = settled(lambda: sum(t.name == "manyhands end" for t in threading.enumerate()), 0)
    dist.barrier()
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert left == 0


def test_looking_for_sockets_keeps_the_locks_of_files(tmp_path):
    """A process loses its POSIX locks on a file when it closes any descriptor of the file."""
    with (tmp_path / "locked").open("w") as file, socket.socket() as end:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen = []
        for found in internet_sockets():
            with found:
                seen.append(os.fstat(found.fileno()).st_ino)
        assert os.fstat(end.fileno()).st_ino in seen
        child = os.fork()
        if child == 0:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os._exit(0)
            except OSError:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3, "the lock was lost"

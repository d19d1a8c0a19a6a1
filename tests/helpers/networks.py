"""Hosts with a router between them, of which every route can be cut: network namespaces.

    with Networks() as networks:               this process is on the host "store" now
        with Store(networks.address("store")) as store:
            with networks.inside("far"):
                workers.start([3, 4])          forks inherit the network
            networks.drop("far")               packets vanish: no answer, nothing is closed
            networks.mend("far")
        networks.command("near", "torchrun")   a command that runs on the host "near"

    near, far    where workers are
    store        where the test and the store are

Files and processes are those of this machine; only the network differs. Nothing is registered
anywhere: the namespaces end with the process and its forks.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations

NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h
HERE = "/proc/thread-self/ns/net"
NETS = {"store": "10.77.0", "near": "10.77.1", "far": "10.77.2"}  # the router is .1, the host .2
INTERFACE = "line"  # of each host
TOOLS = ("ip", "nsenter")

_libc = ctypes.CDLL(None, use_errno=True)


class NoNetworks(RuntimeError):
    """This machine does not let us make networks."""


class Networks:
    """Three hosts, and a router that passes on their packets."""

    def __enter__(self) -> Networks:
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            raise NoNetworks(f"{' and '.join(missing)} missing: apt install iproute2 util-linux")
        self._home = os.open(HERE, os.O_RDONLY)
        self._networks: dict[str, int] = {}
        try:
            self._networks["router"] = _new_network()
            _write("/proc/sys/net/ipv4/ip_forward", "1")
            _ip("link", "set", "lo", "up")
            for host in NETS:
                self._add(host)
            self._enter("store")
        except (OSError, NoNetworks) as error:
            self.__exit__()
            raise NoNetworks(f"{error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        _move_to(self._home)
        for descriptor in (self._home, *self._networks.values()):
            os.close(descriptor)

    def _add(self, host: str) -> None:
        """Make a host, and a line from it to the router."""
        self._networks[host] = _new_network()
        self._enter("router")
        network = f"/proc/{os.getpid()}/fd/{self._networks[host]}"
        _ip("link", "add", host, "type", "veth", "peer", "name", INTERFACE, "netns", network)
        _ip("address", "add", f"{NETS[host]}.1/24", "dev", host)
        _ip("link", "set", host, "up")
        with self.inside(host):
            _ip("link", "set", "lo", "up")
            _ip("address", "add", f"{NETS[host]}.2/24", "dev", INTERFACE)
            self._plug_in(host)

    def _plug_in(self, host: str) -> None:
        _ip("link", "set", INTERFACE, "up")
        # No default route: torch looks up names, and must hear at once that there is nobody to ask.
        _ip("route", "add", "10.77.0.0/16", "via", f"{NETS[host]}.1")

    def _enter(self, host: str) -> None:
        _move_to(self._networks[host])

    @staticmethod
    def address(host: str) -> str:
        """Return the address at which the others reach a host."""
        return f"{NETS[host]}.2"

    def command(self, host: str, *words: object) -> list[str]:
        """Return a command that runs on a host."""
        network = f"/proc/{os.getpid()}/fd/{self._networks[host]}"
        return ["nsenter", f"--net={network}", *map(str, words)]

    @contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """Let this thread, and what it forks, be on a host."""
        before = os.open(HERE, os.O_RDONLY)
        self._enter(host)
        try:
            yield
        finally:
            _move_to(before)
            os.close(before)

    # -- faults --------------------------------------------------------------------------------

    def unplug(self, host: str) -> None:
        """Take down the host's line: it has no route to anywhere, and is told so at once."""
        with self.inside(host):
            _ip("link", "set", INTERFACE, "down")

    def plug_in(self, host: str) -> None:
        with self.inside(host):
            self._plug_in(host)

    def drop(self, *hosts: str, one_way: bool = False) -> None:
        """Drop what goes from one host to another, without a word to either.

        Of two hosts: between these. Of one: between it and all others. One way: only what goes to
        the last host.
        """
        with self.inside("router"):
            for one, other in self._lines(hosts, one_way):
                _ip("rule", "add", *_from_to(one, other), "blackhole")

    def mend(self, *hosts: str, one_way: bool = False) -> None:
        with self.inside("router"):
            for one, other in self._lines(hosts, one_way):
                _ip("rule", "del", *_from_to(one, other), "blackhole")

    def set(self, host: str, name: str, value: int) -> None:
        """Set a variable of /proc/sys/net on a host."""
        with self.inside(host):
            _write(f"/proc/sys/net/{name}", str(value))

    @staticmethod
    def _lines(hosts: tuple[str, ...], one_way: bool) -> list[tuple[str, str]]:
        found = []
        for one, other in permutations(NETS, 2):
            if {*hosts} <= {one, other} and (other == hosts[-1] or not one_way):
                found.append((one, other))
        assert found, f"no line between {hosts}"
        return found


def _from_to(one: str, other: str) -> tuple[str, ...]:
    return "from", f"{NETS[one]}.0/24", "to", f"{NETS[other]}.0/24"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNetworks(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _new_network() -> int:
    """Move this thread to a network of its own; return its descriptor."""
    if _libc.unshare(NEW_NETWORK):
        raise NoNetworks(f"no network namespace can be made: {os.strerror(ctypes.get_errno())}")
    return os.open(HERE, os.O_RDONLY)


def _move_to(network: int) -> None:
    if _libc.setns(network, NEW_NETWORK):
        raise NoNetworks(f"setns: {os.strerror(ctypes.get_errno())}")

"""Hosts on one network: namespaces without names, joined by a bridge in a namespace of its own.

    with Networks(2) as hosts:
        hosts[0].address                      10.78.0.1
        hosts[0].command("torchrun", ...)     the command, to be run on that host

Files and processes are those of this machine; only the network differs. Each namespace lives as
long as its keeper, a process that sleeps and dies with us; nothing of ours is left in the machine's
own network.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

INTERFACE = "eth0"
TOOLS = ("ip", "nsenter", "unshare")


class NoNetworks(RuntimeError):
    """This machine does not let us make hosts."""


@dataclass(frozen=True)
class Host:
    """A network of its own."""

    address: str
    keeper: int  # the process whose network it is

    def command(self, *words: object) -> list[str]:
        """Return a command that runs on this host."""
        return [*_in_network_of(self.keeper), *map(str, words)]


class Networks:
    """So many hosts that reach each other."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._keepers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> list[Host]:
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            raise NoNetworks(f"{' and '.join(missing)} missing: apt install iproute2 util-linux")
        try:
            return self._make()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for keeper in self._keepers:
            keeper.kill()
            keeper.communicate()  # which closes its pipes

    def _make(self) -> list[Host]:
        switch, *hosts = (self._keep() for _ in range(1 + self._number))
        _run(switch, "ip link add switch type bridge")
        _run(switch, "ip link set switch up")
        made = []
        for number, host in enumerate(hosts, 1):
            address, port = f"10.78.0.{number}", f"port{number}"
            _run(host, f"ip link add {INTERFACE} type veth peer name {port} netns {switch}")
            _run(host, f"ip address add {address}/24 dev {INTERFACE}")
            _run(host, f"ip link set {INTERFACE} up")
            _run(host, "ip link set lo up")
            _run(switch, f"ip link set {port} master switch up")
            made.append(Host(address, host))
        return made

    def _keep(self) -> int:
        """Begin a process in a network of its own, and return its number."""
        # It says so when it is there, and ends when our end of its pipe closes, however we end.
        keeper = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo there; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._keepers.append(keeper)
        assert keeper.stdout is not None and keeper.stderr is not None
        if keeper.stdout.readline() != b"there\n":
            raise NoNetworks(keeper.stderr.read().decode().strip())
        return keeper.pid


def _in_network_of(keeper: int) -> list[str]:
    return ["nsenter", f"--net=/proc/{keeper}/ns/net"]


def _run(keeper: int, command: str) -> None:
    words = [*_in_network_of(keeper), *command.split()]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NoNetworks(f"{' '.join(words)}: {done.stderr.strip()}")

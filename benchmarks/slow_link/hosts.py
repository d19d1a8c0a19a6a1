"""Hosts: network namespaces without names, each with a TUN interface.

A process that enters a host sees one network, that of the host, and on it the others' addresses.
What it sends there comes out of a file descriptor of ours (`packets`), and what is written to that
arrives: a program stands where the cable would be.

Namespaces and interfaces live as long as a process holds their descriptors. Nothing is registered
anywhere, so nothing is left behind, however the benchmark ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

INTERFACE = "tun0"
DEVICE = "/dev/net/tun"
NETWORK = "10.77.0."
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl.h
# Of if_tun.h and sockios.h: name the interface; set its address, netmask, MTU and flags.
TUNSETIFF, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFMTU, SIOCSIFFLAGS = (
    0x400454CA,
    0x8916,
    0x891C,
    0x8922,
    0x8914,
)
TUN_WITHOUT_HEADER, UP_AND_RUNNING = 0x1001, 0x41

_libc = ctypes.CDLL(None, use_errno=True)


class NoSlowLink(RuntimeError):
    """This machine does not let us make hosts."""


@dataclass(frozen=True)
class Host:
    """A network of its own; both are file descriptors of this process and of those it forks."""

    address: str
    network: int
    packets: int

    def enter(self) -> None:
        """Move this process (of one thread) into the host, for good; it ends with its parent."""
        _libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
        _move_to(self.network)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


@contextmanager
def make_hosts(count: int, mtu: int) -> Iterator[list[Host]]:
    """Make some hosts; to be called where this process has a single thread that matters."""
    with ExitStack() as stack:
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        stack.callback(os.close, home)
        yield [_host(f"{NETWORK}{1 + number}", mtu, home, stack) for number in range(count)]


def _host(address: str, mtu: int, home: int, stack: ExitStack) -> Host:
    if _libc.unshare(NEW_NETWORK) != 0:
        raise NoSlowLink(
            f"a network namespace cannot be made here ({os.strerror(ctypes.get_errno())}). The "
            "slow link needs Linux and the rights of root: run it with sudo, or as a user with\n"
            f"    unshare --user --map-root-user --net python {sys.argv[0]}"
        )
    try:
        network = os.open("/proc/self/ns/net", os.O_RDONLY)
        stack.callback(os.close, network)
        packets = _interface(address, mtu)
        stack.callback(os.close, packets)
    finally:
        _move_to(home)
    return Host(address, network, packets)


def _interface(address: str, mtu: int) -> int:
    """A TUN interface in the namespace that we are in; the descriptor of its packets."""
    try:
        packets = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        raise NoSlowLink(
            f"{DEVICE} cannot be opened ({error.strerror}). The slow link stands behind TUN "
            "interfaces: load the module (modprobe tun), or give the container the device "
            f"(docker run --cap-add NET_ADMIN --device {DEVICE})."
        ) from error
    fcntl.ioctl(packets, TUNSETIFF, _request("H22x", TUN_WITHOUT_HEADER))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for what, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.255.0")):
            given = _request("HH4s16x", socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(any_socket, what, given)
        fcntl.ioctl(any_socket, SIOCSIFMTU, _request("i20x", mtu))
        for name in (INTERFACE, "lo"):
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, _request("H22x", UP_AND_RUNNING, name=name))
    return packets


def _request(fields: str, *values: object, name: str = INTERFACE) -> bytes:
    """A struct ifreq."""
    return struct.pack("=16s" + fields, name.encode(), *values)


def _move_to(network: int) -> None:
    if _libc.setns(network, NEW_NETWORK) != 0:
        raise NoSlowLink(f"setns failed: {os.strerror(ctypes.get_errno())}.")

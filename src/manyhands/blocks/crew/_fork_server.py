"""Fork server: start workers without importing torch again. Linux only.

    server = ForkServer(command, environment, preload=["transformers"], output=output)
    worker = server.fork({"MANYHANDS_WORKER": "3"})    None: start a fresh process instead

The fork server is a process that has imported torch and runs a single thread, which is checked
before each fork because a fork copies only the calling thread. The server forks twice and does not
wait for workers, so their parent becomes the launcher (a subreaper, prctl(2)). The launcher reaps
forked workers like fresh processes, with exit codes and signals, and workers survive the death of
the server. A new worker waits until the launcher knows the worker, and ends if the launcher has
given up.

A forked worker runs the script like `python SCRIPT.py`: in `__main__`, with separate arguments,
environment, output, session and random numbers.

Libraries read environment variables during import, and the server has already imported libraries.
Workers therefore report in the store which variables their script has changed before joining. A
worker is forked only if these variables have equal values in the server: because the server's
imports set them as well, or because the script sets the existing value. Variables that identify a
process (`IDENTITY`) are not compared.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.machinery
import json
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from select import select
from typing import IO

from manyhands.blocks.crew._processes import (
    OutputForwarder,
    die_with_parent,
    how_it_ended,
    killed_from_outside,
    say,
    tie_group_to,
)
from manyhands.blocks.crew._store import PREFIX, Signer

ANSWER = 1.0  # seconds within which the server must fork
REPLACE = 10.0  # seconds from the start of a server until it may be replaced
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
MESSAGE = 1 << 17  # bytes, maximum size of a message
ENVIRONMENT = f"{PREFIX}environment/"  # key in the store, before a process number
IDENTITY = re.compile(
    r"MANYHANDS_\w+|TORCHELASTIC_\w+|MASTER_(ADDR|PORT)|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)"
)


class ForkedProcess:
    """A forked worker, with the methods of `Popen`."""

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid = pid
        self.stdout = stdout
        self.stderr = stderr
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def changed_variables() -> dict[str, str | None]:
    """Return the variables that changed since the start of this process; None: removed."""
    try:
        pairs = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:  # not Linux: nothing is forked
        return {}
    before = dict(os.fsdecode(pair).partition("=")[::2] for pair in pairs if pair)
    changed = {}
    for name in sorted({*before, *os.environ}):
        value = os.environ.get(name)
        if value != before.get(name) and not IDENTITY.fullmatch(name):
            changed[name] = value
    return changed


def describe_changes(signer: Signer) -> str:
    """Return the names of the changed variables, each with a signature of its value."""
    changed = changed_variables()
    return json.dumps({name: _sign_value(signer, name, changed[name]) for name in changed})


def _sign_value(signer: Signer, name: str, value: str | None) -> str:
    # The value may be a password, so do not store the value.
    return "" if value is None else signer.signature(ENVIRONMENT + name, os.fsencode(value))


def pipes_of(process: subprocess.Popen[bytes] | ForkedProcess) -> tuple[IO[bytes], IO[bytes]]:
    """Return the pipes of a process's output and errors."""
    assert process.stdout is not None and process.stderr is not None
    return process.stdout, process.stderr


class ForkServer:
    """The launcher's side of the fork server. A dead server process is replaced."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        preload: Iterable[str],
        output: OutputForwarder,
    ) -> None:
        self._command = list(command)
        self._environment = environment
        self._preload = list(preload)
        self._output = output
        self._began = -REPLACE
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.ready = False
        self._changed: dict[str, str | None] = {}  # variables changed by imports in the server
        # Without a subreaper, the parent of forked workers would be init.
        linux = sys.platform.startswith("linux")
        self._works = linux and ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0) == 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def watch(self) -> None:
        """Start or replace the server process, and check whether it is ready."""
        if self._process is None:
            if self._works and time.monotonic() - self._began > REPLACE:
                try:
                    self._start()
                except OSError as error:  # such as too many processes
                    self.give_up(f"the fork server cannot be started: {error}")
        elif (code := self._process.poll()) is not None:
            if not self.ready and not killed_from_outside(code):
                self.give_up(f"the fork server ended with {how_it_ended(code)}")
            self.close()  # replaced later
        elif self._socket and not self.ready and select([self._socket], [], [], 0.0)[0]:
            changed = self._socket.recv(MESSAGE)
            self.ready = bool(changed)  # empty if the server has just ended
            self._changed = json.loads(changed or "{}")

    def differences(self, described: str, signer: Signer) -> list[str]:
        """Return the variables changed by a worker that have a different value in the server."""
        found = []
        for name, signature in json.loads(described).items():
            value = self._changed.get(name, self._environment.get(name))
            if signature != _sign_value(signer, name, value):
                found.append(name)
        return found

    def fork(self, environment: Mapping[str, str]) -> ForkedProcess | None:
        """Fork a worker with these additional variables; None if impossible."""
        if not self.ready or self._socket is None:
            return None
        (out, out_end), (err, err_end), (go, begin) = (os.pipe() for _ in range(3))
        theirs = [out_end, err_end, go]
        answer = b""
        try:
            socket.send_fds(self._socket, [json.dumps(dict(environment)).encode()], theirs)
            answer = self._socket.recv(1024)
            pid = int(answer)
            os.write(begin, b".")
            return ForkedProcess(pid, os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0))
        except (OSError, ValueError) as error:
            os.close(out)
            os.close(err)
            if isinstance(error, ValueError) and answer:
                self.give_up(answer.decode())
            self.close()
            return None
        finally:
            for end in (*theirs, begin):  # a worker that starts too late reads the end and exits
                os.close(end)

    def close(self) -> None:
        """End the server. Its workers continue."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._output.finish(pipes_of(self._process))
        if self._socket is not None:
            self._socket.close()
        self._process = None
        self._socket = None
        self.ready = False

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER)
        tie = die_with_parent()
        (lifeline,) = tie["pass_fds"]
        # A file, because Linux limits the length of an argument to 128 KiB.
        with theirs, os.fdopen(os.memfd_create("manyhands"), "w+") as told:
            json.dump([theirs.fileno(), lifeline, self._command, self._preload], told)
            told.flush()
            program = f"from {__name__} import serve; serve()"
            process = subprocess.Popen(
                [sys.executable, "-c", program, str(told.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment,
                start_new_session=True,
                preexec_fn=tie["preexec_fn"],
                pass_fds=(lifeline, theirs.fileno(), told.fileno()),
            )
            self._process = process
        self._began = time.monotonic()
        for pipe, target in zip(pipes_of(process), (sys.stdout, sys.stderr), strict=True):
            self._output.add(pipe, "kept", target)

    def give_up(self, why: str) -> None:
        """End the server permanently, with a message."""
        if self._works:
            say(f"no worker is forked from now on ({why}). Workers start as fresh processes.")
        self._works = False
        self.close()


# -- in the server process and in forked workers ---------------------------------------------------


def serve() -> None:
    """Import modules, and fork a worker per request. Return only in workers, after the script.

    The launcher ends the server.
    """
    with os.fdopen(int(sys.argv[1])) as told:
        told.seek(0)
        number, lifeline, command, preload = json.load(told)
    requests = socket.socket(fileno=number)
    launcher = os.getppid()
    sys.path[0] = os.getcwd() if command[1] == "-m" else str(Path(command[1]).resolve().parent)
    # Creating the first optimizer imports torch._dynamo, which takes as long as importing torch.
    for module in ("torch", "torch._dynamo", "manyhands", *preload):
        importlib.import_module(module)
    gc.freeze()  # prevents garbage collections of workers from copying the pages of all objects
    requests.send(json.dumps(changed_variables()).encode())  # ready
    while True:
        request, ends, _, _ = socket.recv_fds(requests, MESSAGE, 3)
        if not request:
            sys.exit()  # the launcher has ended
        if problem := _find_problem():
            requests.send(problem.encode())
        elif (between := os.fork()) != 0:
            os.waitpid(between, 0)
        elif os.fork() != 0:
            os._exit(0)
        else:
            while os.getppid() != launcher:
                time.sleep(0.001)
            os.setsid()
            tie_group_to(lifeline)
            requests.send(str(os.getpid()).encode())
            requests.close()
            _take_over(json.loads(request), *ends)
            return run_as_main(command)
        for end in ends:
            os.close(end)


def _find_problem() -> str | None:
    """Return the reason why this process must not be forked."""
    import torch

    if torch.cuda.is_initialized():
        return "CUDA is in use in the fork server"
    threads = len(os.listdir("/proc/self/task"))
    return f"the fork server has {threads} threads" if threads > 1 else None


def _take_over(environment: Mapping[str, str], out: int, err: int, begin: int) -> None:
    """Redirect output, set the environment, and seed random generators of a new worker."""
    import torch

    for number, end in enumerate((out, err), 1):
        os.dup2(end, number)
        os.close(end)
    if not os.read(begin, 1):
        os._exit(1)  # the launcher has given up
    os.close(begin)
    os.environ.update(environment)
    random.seed()
    torch.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def run_as_main(command: Sequence[str]) -> None:
    """Run `python SCRIPT.py ...` or `python -m MODULE ...` in this process's `__main__`."""
    main = sys.modules["__main__"]
    variables = vars(main)
    for name in variables.keys() - {"__name__", "__builtins__"}:
        del variables[name]
    main.__annotations__ = {}
    sys.orig_argv = [*command]
    sys.argv = [*command[1:]]
    try:
        if command[1] == "-m":
            sys.argv = ["-m", *command[3:]]
            runpy._run_module_as_main(command[2])  # type: ignore[attr-defined]
            return
        path = os.path.abspath(command[1])
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        variables.update(
            __file__=path,
            __loader__=loader,
            __spec__=None,
            __package__=None,
            __cached__=None,
            __doc__=None,
        )
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        exec(code, variables)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # hide this file in the traceback
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)

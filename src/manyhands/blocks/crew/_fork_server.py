"""Fork server: start workers without importing torch again. Linux only.

    server = ForkServer(command, environment, preload=["transformers"], output=output)
    worker = server.fork({"MANYHANDS_WORKER": "3"})    None: start a fresh process instead

The fork server has imported torch and runs a single thread, which is checked before each fork
because a fork copies only the calling thread. The server forks twice, so the parent of workers
becomes the launcher (a subreaper, prctl(2)), and workers survive the death of the server. A new
worker waits until the launcher knows the worker, and ends if the launcher has given up.

A forked worker runs the script like `python SCRIPT.py`: in `__main__`, with separate arguments,
environment, output, session and random numbers.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.machinery
import json
import os
import random
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

ANSWER = 1.0  # seconds within which the server must fork
REPLACE = 10.0  # seconds from the start of a server until it may be replaced
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
MESSAGE = 1 << 17  # bytes, maximum size of a message


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


def pipes_of(process: subprocess.Popen[bytes] | ForkedProcess) -> tuple[IO[bytes], IO[bytes]]:
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
        # Otherwise the parent of forked workers would be init.
        linux = sys.platform.startswith("linux")
        self._works = linux and ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0) == 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def watch(self) -> None:
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
            self.ready = bool(self._socket.recv(1))  # empty if the server has just ended

    def fork(self, environment: Mapping[str, str]) -> ForkedProcess | None:
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
            self._output.add(pipe, "fork server", target)

    def give_up(self, why: str) -> None:
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
    requests.send(b".")  # ready
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
    import torch

    if torch.cuda.is_initialized():
        return "CUDA is in use in the fork server"
    threads = len(os.listdir("/proc/self/task"))
    return f"the fork server has {threads} threads" if threads > 1 else None


def _take_over(environment: Mapping[str, str], out: int, err: int, begin: int) -> None:
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

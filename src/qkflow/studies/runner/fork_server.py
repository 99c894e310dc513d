"""Start workers by fork from a process that has already imported the worker module.

Importing torch takes longer than a short run can afford. The server imports the module once, then forks a
child per run, which executes the module as `python -m MODULE FOLDER` would.

`multiprocessing` has a fork server too. This one differs in what runs need: the user's `__main__` is not
imported, OpenMP is loaded with the environment of a worker, the child inherits log and lock of its run, and
the server exits at once when the study is killed, while its workers continue.

Per worker the study sends its arguments as JSON with three file descriptors (log, lock, status). The server
writes the process id to `status`, then the exit code.

On a node of a cluster the server owns its workers: it kills them, and all they have started, when the process
that started it is gone. As a subreaper it becomes the parent of orphaned descendants, so it finds them all.
Ray kills the children of an actor whose node is lost, also the server: then the kernel ends the workers.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, NoReturn

from qkflow.system import end_with_parent
from qkflow.training.run_dir import EXIT_FAILED

# Modules that a run imports late; importing them starts no threads and does not touch CUDA.
PRELOADED_MODULES = (
    "numpy.random",
    "safetensors.torch",
    "tokenizers",
    "qkflow.measures.slow_path",
)
PRELOADED_PACKAGES = ("qkflow.attention.couplings", "qkflow.attention.scorings")
# not `-m`: the server's __main__ is then empty, and a worker's own
_SERVER_CODE = f"import sys; from {__name__} import main; main(sys.argv[1:])"
_LENGTH = struct.Struct("I")  # of a request; 0: kill all workers and exit
_STATUS = struct.Struct("q")  # process id or exit code
_N_DESCRIPTORS = 3
_OWN_WORKERS = "own-workers"
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


def is_supported() -> bool:
    """Return whether to fork here: it needs Unix, and the frameworks of macOS do not survive a fork."""
    return hasattr(os, "fork") and hasattr(socket, "send_fds") and sys.platform != "darwin"


class ForkServer:
    """The study's end: starts the server with the first worker, and again if it has died.

    Workers execute `module`, or `command` with the folder as last argument. With `owns_workers` they do not
    outlive the process that has started the server.
    """

    def __init__(
        self,
        module: str,
        env: Mapping[str, str],
        *,
        command: Sequence[str] | None = None,
        owns_workers: bool = False,
    ) -> None:
        self.module, self.env = module, {**os.environ, **env}
        self.command, self.owns_workers = list(command or ()), owns_workers
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start_worker(self, folder: Path, env: Mapping[str, str], log: IO[bytes], lock: int) -> ForkedWorker:
        """Start the worker of `folder`. It inherits `lock`; stdout and stderr go to `log`."""
        connection = self._connect(log)
        arguments = {"folder": str(folder), "env": dict(env), "command": self.command}
        request = json.dumps(arguments).encode()
        status, status_writer = os.pipe()
        worker = ForkedWorker(status)
        try:
            # A dead server is reported by `status`, whose other end is then closed.
            with suppress(BrokenPipeError, ConnectionResetError):
                descriptors = [log.fileno(), lock, status_writer]
                socket.send_fds(connection, [_LENGTH.pack(len(request))], descriptors)
                connection.sendall(request)
        finally:
            os.close(status_writer)
        return worker

    def _connect(self, log: IO[bytes]) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._socket is None:
            self._socket, server_end = socket.socketpair()
            options = [_OWN_WORKERS] if self.owns_workers else []
            module = "" if self.command else self.module
            with server_end:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _SERVER_CODE, str(server_end.fileno()), module, *options],
                    stdin=subprocess.DEVNULL,
                    stdout=log,  # a server that fails explains it in the log of its first run
                    stderr=subprocess.STDOUT,
                    env=self.env,
                    start_new_session=True,  # Ctrl-C on the terminal must not reach it
                    pass_fds=(server_end.fileno(),),
                )
        return self._socket

    def close(self) -> None:
        """Kill the workers that still run, and end the server."""
        if self._socket is None or self._process is None:
            return
        with self._socket, suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(_LENGTH.pack(0))
        self._process.wait()
        self._socket = self._process = None


class ForkedWorker:
    """One child of the server. `sentinel` becomes readable when it has exited, or the server has died."""

    def __init__(self, status: int) -> None:
        self._status = open(status, "rb", buffering=0)  # noqa: SIM115 - open as long as the handle
        self.sentinel = status
        self._pid: int | None = None
        self._exit_code: int | None = None

    def _read_status(self) -> int | None:
        data = self._status.read(_STATUS.size)
        return int(_STATUS.unpack(data)[0]) if data else None

    def _wait_for_pid(self) -> int | None:
        """Return the process id; None if the server died before the fork."""
        if self._pid is None and self._exit_code is None:
            self._pid = self._read_status()
            if self._pid is None:
                self._exit_code = EXIT_FAILED
        return self._pid

    def poll(self) -> int | None:
        while self._exit_code is None and wait([self.sentinel], 0):
            if self._pid is None:
                self._wait_for_pid()
            else:
                code = self._read_status()
                if code is None:  # the server died: nothing will tell how this worker ends
                    self._send(signal.SIGKILL)
                    code = -signal.SIGKILL
                self._exit_code = code
        return self._exit_code

    def stop(self) -> None:
        if self.poll() is None and self._wait_for_pid() is not None:
            self._send(signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None and self._wait_for_pid() is not None:
            self._send(signal.SIGKILL)
            wait([self.sentinel])
            self.poll()

    def _send(self, number: signal.Signals) -> None:
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork a child per request. Return the request in the child, and None in the server at its end."""
    signal_reader, signal_writer = os.pipe()
    for descriptor in (signal_reader, signal_writer):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a handler is needed for the wakeup
    signal.set_wakeup_fd(signal_writer)
    children: dict[int, int] = {}  # status descriptor by process id
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(signal_reader, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if signal_reader in ready:
                os.read(signal_reader, 4096)
                _report_exits(children)
            if connection not in ready:
                continue
            message = _receive(connection)
            if message is None:
                return None
            request, (log, lock, status) = message
            if not request:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                    kill_group(pid)
                return None
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (signal_reader, signal_writer, status, *children.values()):
                    os.close(descriptor)
                connection.close()
                _become_worker(log)
                return request  # `lock` stays open: the run is locked until this process exits
            os.close(log)
            os.close(lock)
            children[pid] = status
            _write_status(status, pid)


def _become_worker(log: int) -> None:
    """Give a child its own session, an empty stdin, and `log` as stdout and stderr."""
    os.setsid()
    for target in (1, 2):
        os.dup2(log, target)
    os.close(log)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a request with its descriptors; None if the study is gone. An empty request means: exit."""
    header, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, _N_DESCRIPTORS)
    if not header:
        return None
    header += _receive_exactly(connection, _LENGTH.size - len(header))
    (length,) = _LENGTH.unpack(header)
    if length == 0:
        return {}, [-1] * _N_DESCRIPTORS
    body = _receive_exactly(connection, length)
    return (json.loads(body), descriptors) if len(body) == length else None


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := connection.recv(size - len(data))):
        data += part
    return data


def _report_exits(children: dict[int, int]) -> None:
    """Write the exit codes of all children that have exited."""
    for pid, status in list(children.items()):
        exited, code = os.waitpid(pid, os.WNOHANG)
        if exited:
            kill_group(pid)
            _write_status(status, os.waitstatus_to_exitcode(code))
            os.close(children.pop(pid))


def kill_group(pid: int) -> None:
    """Kill what the worker `pid`, the leader of its process group, has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _write_status(status: int, value: int) -> None:
    with suppress(BrokenPipeError):  # the study is gone
        os.write(status, _STATUS.pack(value))


def _preload(module: str) -> None:
    for name in (module, *PRELOADED_MODULES):
        importlib.import_module(name)
    for package in PRELOADED_PACKAGES:
        for part in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(part.name)


def main(arguments: Sequence[str]) -> None:
    descriptor, module, *options = arguments
    owns_workers = _OWN_WORKERS in options
    if owns_workers and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if module:
        with suppress(Exception):  # the worker fails with the same error, in the log of its run
            _preload(module)
        sys.modules.pop(module, None)  # a child executes it as __main__
    gc.collect()
    gc.freeze()  # a collection in a child must not traverse, and so copy, what was imported
    server = os.getpid()
    with socket.socket(fileno=int(descriptor)) as connection:
        request = serve(connection)
    if request is None:
        if owns_workers:
            _kill_descendants()
        return
    if owns_workers:
        end_with_parent(server)
    os.environ.update(request["env"])
    if command := request["command"]:
        os.execvp(command[0], [*command, request["folder"]])
    sys.argv = [module, request["folder"]]
    _exit_fast(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


def _kill_descendants() -> None:
    """Kill all children; their own children become ours, if this process is a subreaper, and follow."""
    while True:
        for pid in _child_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _child_pids() -> list[int]:
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # PID (NAME) STATE PARENT …, and a name may contain anything
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                pids.append(int(stat.parent.name))
    return pids


def _exit_fast(run: Callable[[], object]) -> NoReturn:
    """Run, then exit as the interpreter would, but without tearing down all modules, which takes 0.2 s."""
    code: object = None
    try:
        run()
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = EXIT_FAILED
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = EXIT_FAILED
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads, as `multiprocessing` does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)

"""Hermes workers that start warm: forked, as a zygote forks them, by a process that has imported Hermes.

A start of the real Hermes takes seconds, nearly all of them for imports, and many tests start several. What it keeps of
its home at import is the path alone. That is a link, which leads to the home of the test that runs.
"""

import contextlib
import gc
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

WORKER = Path(__file__).parents[2] / "worker"


class Warm:
    """The process that forks workers. One for all tests of a run."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "link"
        """What leads to the home of the test that runs."""
        folder.joinpath("empty").mkdir()
        self.home.symlink_to("empty")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=folder,
                env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "HERMES_HOME": str(self.home)},
                start_new_session=True,
            )

    def lead_to(self, home: Path) -> None:
        """Have the workers that are started from now on find this home."""
        self.home.unlink()
        self.home.symlink_to(home)

    def start(self, arguments: list[str], *, cwd: Path, env: dict[str, str], stderr: Path) -> "Program":
        """Run a program of Python, as ``python ARGUMENTS`` would."""
        in_read, in_write = os.pipe()
        out_read, out_write = os.pipe()
        request = {"arguments": arguments, "cwd": str(cwd), "env": {**env, "HERMES_HOME": str(self.home)}}
        with stderr.open("wb") as errors:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [in_read, out_write, errors.fileno()])
        os.close(in_read)
        os.close(out_write)
        return Program(self, int(self._socket.recv(64)), os.fdopen(in_write, "wb"), os.fdopen(out_read, "rb"))

    def status_of(self, pid: int, timeout_s: float) -> int:
        """Wait for the end of a program and return its exit status: minus the signal's number if it was killed."""
        self._socket.send(json.dumps({"pid": pid, "timeout_s": timeout_s}).encode())
        status: int | None = json.loads(self._socket.recv(64))
        if status is None:
            raise TimeoutError(f"process {pid} has not ended within {timeout_s} s")
        return status

    def close(self) -> None:
        """End it. What it has forked goes on."""
        self._socket.close()
        self._process.wait(10)


class Program:
    """A program that was forked, with the few methods of ``subprocess.Popen`` that tests need."""

    def __init__(self, warm: Warm, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._warm = warm
        self._status: int | None = None

    def kill(self) -> None:
        if self._status is None:  # nobody has waited for it, so the pid is still its own
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float = 30) -> int:
        if self._status is None:
            self._status = self._warm.status_of(self.pid, timeout_s)
        return self._status


def serve(requests: socket.socket) -> None:
    """Import Hermes, then fork and wait as asked, until nobody can ask any more."""
    sys.path.insert(0, str(WORKER))
    from hermes_pool_worker.hermes import preload

    sys.path.remove(str(WORKER))
    preload({})
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not message:
            return
        request = json.loads(message)
        if "pid" in request:
            requests.send(json.dumps(wait_for(**request)).encode())
        elif pid := os.fork():
            requests.send(str(pid).encode())
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            requests.close()
            become(request, descriptors)


def wait_for(pid: int, timeout_s: float) -> int | None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Turn this fork into the program."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    random.seed()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for as long as the program runs
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.argv = request["arguments"]
    with contextlib.suppress(KeyboardInterrupt):
        runpy.run_path(sys.argv[0], run_name="__main__")
    os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))

"""Linux: a child started by ``subprocess``, watched and signalled through its pidfd."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from typing import Any, cast

import psutil

from hermes_pool.process.launcher import Command, Exit, Listener, WorkerProcess
from hermes_pool.process.pipes import ChildPipes
from hermes_pool_worker.contract import LIFELINE_VARIABLE


class PidfdProcess:
    """A process that is written to through ``ChildPipes`` and watched, and signalled, through its pidfd.

    Whoever makes it says in ``take_status`` how its exit status is learnt: the pidfd only tells that it is over.
    """

    def __init__(self, pid: int, pidfd: int, pipes: ChildPipes, take_status: Callable[[int], None]) -> None:
        self.pid = pid
        self._pidfd: int | None = pidfd
        self._pipes = pipes
        self._take_status = take_status
        self._loop = asyncio.get_running_loop()
        try:
            self.create_time = psutil.Process(pid).create_time()
        except psutil.Error as error:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            raise OSError(f"the worker, once started, could not be watched: {error}") from error
        self._loop.add_reader(pidfd, self._over)

    def _over(self) -> None:
        pidfd = cast("int", self._pidfd)
        self._loop.remove_reader(pidfd)
        self._pidfd = None
        try:
            self._take_status(pidfd)
        finally:
            os.close(pidfd)

    def write(self, data: bytes | bytearray) -> None:
        """Send bytes."""
        if self._pipes.writer is not None:
            self._pipes.writer.write(data)

    def pause_reading(self) -> None:
        """Read no more for now."""
        if self._pipes.reader is not None:
            self._pipes.reader.pause()

    def resume_reading(self) -> None:
        """Read on."""
        if self._pipes.reader is not None:
            self._pipes.reader.resume()

    def send_signal(self, number: int) -> None:
        """Signal it."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        """Let go of the pipes."""
        self._pipes.close()


def with_lifeline(environment: Mapping[str, str], descriptor: int | None) -> dict[str, Any]:
    """Return the arguments of ``subprocess`` that give a process its environment and, if there is one, the lifeline."""
    if descriptor is None:
        return {"env": environment}
    return {"env": {**environment, LIFELINE_VARIABLE: str(descriptor)}, "pass_fds": (descriptor,)}


class SpawnLauncher:
    """Pipes of our own, ``subprocess`` (vfork and exec, so threads of the host do no harm), and a pidfd."""

    def __init__(self, lifeline: Callable[[], int | None] = lambda: None) -> None:
        """Prepare. ``lifeline`` returns the descriptor that a worker has to inherit, to die with the supervisor."""
        self._lifeline = lifeline

    async def launch(self, command: Command, listener: Listener) -> WorkerProcess:
        """Start a process in a session of its own. It inherits its three standard descriptors and the lifeline."""
        pipes = ChildPipes()
        process: PidfdProcess | None = None
        try:
            stdin, stdout, stderr = pipes.child_ends()
            popen = subprocess.Popen(  # noqa: ASYNC220 - 0.3 ms; a thread would cost as much
                command.argv,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=command.cwd,
                start_new_session=True,
                **with_lifeline(command.env, self._lifeline()),
            )
            process = self._watched(popen, pipes, listener)
            pipes.connect(listener)
        except BaseException:
            if process is not None:
                process.send_signal(signal.SIGKILL)
            pipes.close()
            raise
        return process

    async def close(self) -> None:
        """Nothing is kept between launches."""

    def _watched(self, popen: "subprocess.Popen[bytes]", pipes: ChildPipes, listener: Listener) -> PidfdProcess:
        def take_status(pidfd: int) -> None:
            try:
                found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
            except ChildProcessError:  # the host ignores SIGCHLD, or waits for any child
                found = None
            status = None
            if found is not None:
                status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            # subprocess must not wait again: the pid may soon be somebody else's.
            popen.returncode = status if status is not None else 0
            listener.exited(Exit(status))

        try:
            return PidfdProcess(popen.pid, os.pidfd_open(popen.pid), pipes, take_status)
        except OSError:
            popen.kill()
            popen.wait()
            raise


HAS_PIDFD = hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal")
"""Whether this platform has what ``SpawnLauncher`` needs."""

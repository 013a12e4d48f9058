"""Starts each worker as a fresh process (Linux)."""

import os
import signal
import subprocess
from collections.abc import Callable

from hermes_pool.process.launcher import Command, Exit, ProcessListener, WorkerProcess
from hermes_pool.process.lifeline import with_lifeline
from hermes_pool.process.pidfd import PidfdProcess
from hermes_pool.process.pipes import ChildPipes


class SpawnLauncher:
    """Starts workers with ``subprocess``, which uses vfork and exec and so is safe in a host with threads."""

    def __init__(self, lifeline: Callable[[], int | None] = lambda: None) -> None:
        """``lifeline`` returns the descriptor that each worker inherits, so that it dies with the supervisor."""
        self._lifeline = lifeline

    async def launch(self, command: Command, listener: ProcessListener) -> WorkerProcess:
        """Start a process in a session of its own. It inherits only its three standard descriptors and the lifeline."""
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
            process = self._watch(popen, pipes, listener)
            pipes.connect(listener)
        except BaseException:
            if process is not None:
                process.send_signal(signal.SIGKILL)
            pipes.close()
            raise
        return process

    async def close(self) -> None:
        """Do nothing: no process is kept between launches."""

    def _watch(self, popen: "subprocess.Popen[bytes]", pipes: ChildPipes, listener: ProcessListener) -> PidfdProcess:
        def on_exit(pidfd: int) -> None:
            try:
                found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
            except ChildProcessError:  # the host ignores SIGCHLD, or waits for any child
                found = None
            status = None
            if found is not None:
                status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            # subprocess must not wait again: the pid may soon belong to another process.
            popen.returncode = status if status is not None else 0
            listener.exited(Exit(status))

        try:
            return PidfdProcess(popen.pid, os.pidfd_open(popen.pid), pipes, on_exit)
        except OSError:
            popen.kill()
            popen.wait()
            raise

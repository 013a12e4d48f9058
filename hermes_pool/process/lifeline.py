"""Ends all processes of a pool when the supervisor is gone, whatever they are doing. Linux only.

The *lifeline* is a pipe that nothing is ever written to. The supervisor holds its writing end, and each worker asks the
kernel for SIGKILL when that end is closed (see ``lifeline`` in the worker package). A *guardian*, one small process per
pool, holds the writing end as well. It thereby keeps the workers alive for the moment that it takes to find and end
their descendants (see ``guardian`` in the worker package). The guardian also notices when the pool is closed, and when
the event loop ends without closing it.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import weakref
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

from hermes_pool_worker.contract import LIFELINE_VARIABLE

LEAVE_S = 3.0
"""How long the guardian may take, once the pool is closed, to end what is left and then itself."""
RETRY_AFTER_S = 10.0
"""How long to wait before a new attempt, after a lifeline could not be made or a guardian died or could not start."""

_held: "weakref.WeakSet[_Ends]" = weakref.WeakSet()


def with_lifeline(environment: Mapping[str, str], descriptor: int | None) -> dict[str, Any]:
    """Return the ``subprocess`` arguments that give a process its environment and, if there is one, the lifeline."""
    if descriptor is None:
        return {"env": environment}
    return {"env": {**environment, LIFELINE_VARIABLE: str(descriptor)}, "pass_fds": (descriptor,)}


class _Ends:
    """Pipe ends that are closed once: by a call of ``close``, with the event loop that holds them, or in a fork."""

    def __init__(self, *descriptors: int) -> None:
        self.close = weakref.finalize(self, _close, descriptors)
        self.close.atexit = False  # the kernel does it
        _held.add(self)

    def __call__(self) -> None:
        """Do nothing. It is callable so that the loop can hold it as a callback, for an event that never comes."""


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        os.close(each)


def _close_in_fork() -> None:
    """Close what a fork of the host must not hold: an executor's process, for one, may outlive the host."""
    for ends in list(_held):
        ends.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_fork)


class Lifeline:
    """The lifeline of one pool, and its guardian.

    If the system refuses to make one, workers run without it and still leave at the end of their input.
    """

    def __init__(self, guardian: Sequence[str], environment: Mapping[str, str], log: Any) -> None:
        """Make nothing yet. ``guardian`` is the guardian's command line, ``environment`` its entire environment."""
        self._command = tuple(guardian)
        self._environment = environment
        self._log = log
        self._loop: asyncio.AbstractEventLoop | None = None
        self._write_end: int | None = None
        self._read_end: int | None = None
        self._guardian: subprocess.Popen[bytes] | None = None
        self._guardian_pidfd: int | None = None
        self._release_guardian: Callable[[], object] = lambda: None
        self._guardian_gone = asyncio.Event()
        self._retry_at = 0.0
        self._closed = False

    @property
    def guardian_pid(self) -> int | None:
        """Pid of the guardian; ``None`` if there is none at present."""
        return None if self._guardian is None else self._guardian.pid

    def inherit(self) -> int | None:
        """Return the descriptor that a new process of the pool must inherit, or ``None`` if there is no lifeline.

        The first call makes the lifeline; each call starts a guardian if none is running.
        """
        if self._closed:
            return None
        if self._read_end is None and monotonic() >= self._retry_at:
            try:
                self._open()
            except OSError as error:
                self._retry_at = monotonic() + RETRY_AFTER_S
                self._log.warning("lifeline_failed", error=str(error))
        if self._read_end is not None and self._guardian is None and monotonic() >= self._retry_at:
            try:
                self._start_guardian()
            except OSError as error:
                self._retry_at = monotonic() + RETRY_AFTER_S
                self._log.warning("guardian_failed", error=str(error))
        return self._read_end

    def _open(self) -> None:
        self._read_end, self._write_end = os.pipe()
        self._loop = asyncio.get_running_loop()
        # Only the loop holds the ends, so they are closed with it even if the pool is not. Nothing is ever read.
        self._loop.add_reader(self._read_end, _Ends(self._read_end, self._write_end))

    def _start_guardian(self) -> None:
        assert self._loop is not None  # noqa: S101 - for the type checker
        assert self._write_end is not None  # noqa: S101
        its_end, our_end = os.pipe()
        try:
            self._guardian = subprocess.Popen(
                self._command,
                stdin=its_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
                **with_lifeline(self._environment, self._write_end),
            )
            pidfd = os.pidfd_open(self._guardian.pid)
        except OSError:
            os.close(our_end)
            if self._guardian is not None:
                self._guardian.kill()
                self._guardian.wait()
                self._guardian = None
            raise
        finally:
            os.close(its_end)
        ends = _Ends(our_end)
        self._release_guardian = ends.close
        self._guardian_pidfd = pidfd
        self._guardian_gone.clear()
        self._loop.add_reader(pidfd, self._guardian_ended, ends)

    def _guardian_ended(self, ends: _Ends) -> None:
        assert self._loop is not None  # noqa: S101 - for the type checker
        assert self._guardian is not None  # noqa: S101
        assert self._guardian_pidfd is not None  # noqa: S101
        self._loop.remove_reader(self._guardian_pidfd)
        os.close(self._guardian_pidfd)
        self._guardian_pidfd = None
        ends.close()
        status = self._guardian.wait()
        self._guardian = None
        self._guardian_gone.set()
        if not self._closed:
            self._retry_at = monotonic() + RETRY_AFTER_S
            self._log.warning("guardian_died", status=status)

    async def close(self) -> None:
        """Close the lifeline, which ends what is left of the pool's processes; return when the guardian has left."""
        self._closed = True
        self._release_guardian()
        if self._loop is not None and self._read_end is not None:
            self._loop.remove_reader(self._read_end)  # which held the ends
            self._read_end = self._write_end = None
        if self._guardian is None or self._guardian_pidfd is None:
            return
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._guardian_gone.wait()
        except TimeoutError:
            self._log.warning("guardian_killed", pid=self._guardian.pid, reason="it did not leave in time")
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._guardian_pidfd, signal.SIGKILL)
            await self._guardian_gone.wait()

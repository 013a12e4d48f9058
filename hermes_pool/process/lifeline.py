"""Ties all processes of a pool to this one: when it is gone, they go, whatever they are doing. Linux only.

The lifeline is a pipe that nothing is written into. This process holds its writing end; each worker asks the kernel to
be killed when that is closed (see the worker's ``lifeline``). A *guardian*, one small process for each pool, holds the
writing end as well, and so keeps the workers for the moment that it takes to find and end what is below them (see the
worker's ``guardian``). It also learns of the end of a pool that is closed, and of an event loop that ends without that.
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

from hermes_pool.process.spawn import with_lifeline

LEAVE_S = 3.0
"""How long the guardian of a pool that is closed may take to end what is left, and itself."""
RETRY_AFTER_S = 10.0
"""How long no other guardian is started after one has died or could not be started."""

_held: "weakref.WeakSet[_Ends]" = weakref.WeakSet()


class _Ends:
    """Descriptors that are closed once: by hand, with the event loop that holds this, or in a fork of this process."""

    def __init__(self, *descriptors: int) -> None:
        self.close = weakref.finalize(self, _close, descriptors)
        self.close.atexit = False  # the kernel does it
        _held.add(self)

    def __call__(self) -> None:
        """Be a loop's callback for what never happens."""


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        os.close(each)


def _let_go_in_fork() -> None:
    """Close what a fork of the host must not hold: an executor's process, say, may outlive the host."""
    for ends in list(_held):
        ends.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_fork)


class Lifeline:
    """The lifeline of one pool. Where the system refuses it, workers go without; the end of their wire remains."""

    def __init__(self, guardian: Sequence[str], environment: Mapping[str, str], log: Any) -> None:
        """Prepare. ``guardian`` is the command of the guardian, ``environment`` all that it gets."""
        self._command = tuple(guardian)
        self._environment = environment
        self._log = log
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ours: int | None = None
        self._theirs: int | None = None
        self._guardian: subprocess.Popen[bytes] | None = None
        self._guardian_pidfd: int | None = None
        self._guardian_ends: Callable[[], object] = lambda: None
        self._guardian_gone = asyncio.Event()
        self._retry_at = 0.0
        self._closed = False

    @property
    def guardian_pid(self) -> int | None:
        """Pid of the guardian."""
        return None if self._guardian is None else self._guardian.pid

    def inherit(self) -> int | None:
        """Return the descriptor that a new process of the pool has to inherit; ``None`` where there is none.

        The first call makes the lifeline, and each sees to it that there is a guardian.
        """
        if self._closed:
            return None
        if self._theirs is None and monotonic() >= self._retry_at:
            try:
                self._open()
            except OSError as error:
                self._retry_at = monotonic() + RETRY_AFTER_S
                self._log.warning("lifeline_failed", error=str(error))
        if self._theirs is not None and self._guardian is None and monotonic() >= self._retry_at:
            try:
                self._start_guardian()
            except OSError as error:
                self._retry_at = monotonic() + RETRY_AFTER_S
                self._log.warning("guardian_failed", error=str(error))
        return self._theirs

    def _open(self) -> None:
        theirs, ours = os.pipe()
        self._theirs, self._ours = theirs, ours
        self._loop = asyncio.get_running_loop()
        # The loop holds the ends and nobody else: when it is closed without the pool, they are. Nothing is ever read.
        self._loop.add_reader(theirs, _Ends(theirs, ours))

    def _start_guardian(self) -> None:
        assert self._loop is not None  # noqa: S101 - for the type checker
        assert self._ours is not None  # noqa: S101
        its_end, our_end = os.pipe()
        try:
            self._guardian = subprocess.Popen(
                self._command,
                stdin=its_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
                **with_lifeline(self._environment, self._ours),
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
        self._guardian_ends = ends.close
        self._guardian_pidfd = pidfd
        self._guardian_gone.clear()
        self._loop.add_reader(pidfd, self._guardian_has_ended, ends)

    def _guardian_has_ended(self, ends: _Ends) -> None:
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
        """Let go: what is left of the pool's processes ends now; return when the guardian has seen to it."""
        self._closed = True
        self._guardian_ends()
        if self._loop is not None and self._theirs is not None:
            self._loop.remove_reader(self._theirs)  # which held the ends
            self._theirs = self._ours = None
        if self._guardian is None or self._guardian_pidfd is None:
            return
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._guardian_gone.wait()
        except TimeoutError:
            self._log.warning("guardian_held_up", pid=self._guardian.pid)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._guardian_pidfd, signal.SIGKILL)
            await self._guardian_gone.wait()

"""Ties this process to its supervisor: once that is gone, the kernel kills it, whatever it is doing. Linux only.

The lifeline is a pipe. Nothing is ever written to it, and the supervisor holds its write end. A process that holds the
read end can ask the kernel for a signal when the state of the pipe changes, and that signal may be SIGKILL: it needs no
running thread and no interpreter lock, and no signal mask holds it back. The request belongs to an open file
description, so each process opens one of its own; an inherited one is shared by all.
"""

import contextlib
import fcntl
import os
import select
import signal

from hermes_pool_worker.contract import LIFELINE_VARIABLE


def inherited() -> int | None:
    """Return the lifeline that this process was started with, if any, and keep its children from inheriting it."""
    number = os.environ.pop(LIFELINE_VARIABLE, "")
    if not number.isdecimal():
        return None
    descriptor = int(number)
    try:
        os.set_inheritable(descriptor, False)
    except OSError:
        return None
    return descriptor


def arm(descriptor: int) -> int | None:
    """Die with the supervisor from now on; return a close-on-exec descriptor that must stay open for that.

    Return ``None`` if the kernel refuses; this process then notices the end of the wire instead. If the supervisor is
    gone already, the process ends here.
    """
    try:
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    except OSError:
        os.close(own)
        return None
    # The supervisor may have gone before this, and the kernel reports changes only.
    now = select.poll()
    now.register(own, 0)
    if now.poll(0):
        signal.raise_signal(signal.SIGKILL)
    return own


def disarm(own: int | None) -> None:
    """Stay alive without the supervisor from now on. ``own`` is what ``arm`` returned."""
    if own is not None:
        with contextlib.suppress(OSError):
            os.close(own)

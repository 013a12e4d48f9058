"""Ties this process to its supervisor: when that is gone, the kernel kills it, whatever it is doing. Linux only.

The lifeline is a pipe in which nothing is ever written, and whose writing end the supervisor holds. Who holds the
reading end can ask the kernel for a signal when the pipe changes, and that signal may be SIGKILL: no thread has to run
for it, no lock of the interpreter to be free, and no mask holds it back. What is asked for belongs to an open file
description, so each process opens one of its own; what was inherited is shared by all.
"""

import contextlib
import fcntl
import os
import select
import signal

from hermes_pool_worker.contract import LIFELINE_VARIABLE


def inherited() -> int | None:
    """Return the lifeline that came with the start of this process, closed to its children from now on."""
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
    """Die with the supervisor from now on; return the descriptor that must stay open for that, close-on-exec.

    ``None`` where the kernel refuses: then the end of the wire is what this process notices. When the supervisor is
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
    # It may have gone in the meantime, and the kernel tells of changes only.
    now = select.poll()
    now.register(own, 0)
    if now.poll(0):
        signal.raise_signal(signal.SIGKILL)
    return own


def disarm(own: int | None) -> None:
    """Live on without it."""
    if own is not None:
        with contextlib.suppress(OSError):
            os.close(own)

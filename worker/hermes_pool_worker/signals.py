"""Signal handling of a worker and a zygote.

A service manager that ends a service signals all its processes at once, and a terminal all those of a group. The host
may then want to finish what runs, so its workers must not be gone before it. They outlive such a signal: they end when
the host closes them, and with the host in any case (see ``lifeline``). What the pool itself does to end a worker
counts, of course. It says so on the wire first, and the worker looks there: a ``Close`` was read, or something waits
unread.
"""

import os
import signal
import sys
import time
from typing import Final

if sys.platform != "win32":
    import fcntl
    import termios

OUTLIVED: Final = ("SIGTERM", "SIGHUP")
"""Names of the signals that end a process by default, and a worker only if the pool wants that."""

DEAF_AFTER_S: Final = 0.2
"""A worker that has not read for this long what waits on its wire does not hear the pool, in seconds."""

at_rest = False
"""Whether the main thread itself reads the wire: then the worker hears the pool. The worker's loop sets it."""
_wire_in: int | None = None
_is_closing = False


def reset() -> None:
    """Undo what a host may have passed on to its children, such as an ignored SIGCHLD or the SIGHUP of ``nohup``.

    SIGINT does nothing: a stray one must not cut a turn short. What is handled here has a function instead of SIG_IGN,
    because the agent's tools would inherit SIG_IGN.
    """
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in (signal.SIGQUIT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for name in OUTLIVED:
            signal.signal(getattr(signal, name), _outlive)
    signal.signal(signal.SIGINT, lambda *_: None)


def serve(wire_in: int) -> None:
    """Look for the pool's wish to end this worker on this wire."""
    global _wire_in  # noqa: PLW0603 - a process has one wire, and a signal handler has no other way to it
    _wire_in = wire_in


def closing() -> None:
    """Note that the pool has asked this worker to close."""
    global _is_closing  # noqa: PLW0603 - as above
    _is_closing = True


def _outlive(number: int, _frame: object) -> None:
    """End this process as the signal would by default, but only if the pool wants that."""
    if _is_closing or (not at_rest and _is_deaf()):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _is_deaf() -> bool:
    """Whether the pool has sent what no thread of this worker reads: it does not hear that it should close."""
    end = time.monotonic() + DEAF_AFTER_S
    while _something_waits():
        if time.monotonic() > end:
            return True
        time.sleep(0.01)
    return _is_closing


def _something_waits() -> bool:
    if _wire_in is None or sys.platform == "win32":
        return False
    try:
        waiting = fcntl.ioctl(_wire_in, termios.FIONREAD, b"\0\0\0\0")
    except OSError:
        return True  # the wire is gone
    return int.from_bytes(waiting, sys.byteorder) > 0

"""A lock that says that a worker of a conversation lives. The kernel drops it with the worker, however that ends.

It keeps two workers of one conversation apart where several supervisors of one machine take turns with it: the worker
of a supervisor that was killed lives on for a moment, and its successor must not begin before it has ended.
"""

import contextlib
import os
import sys
import time

if sys.platform != "win32":
    import fcntl

WAIT_S = 10.0
"""How long to wait for the worker before, at most: its guardian ends it half a second after its supervisor."""
_LOOK_S = 0.002

_held: tuple[str, int] | None = None


def take(path: str) -> None:
    """Take the lock for as long as this process lives, or until ``drop``. Raises ``TimeoutError`` after ``WAIT_S``."""
    global _held  # noqa: PLW0603 - one for each process
    if sys.platform == "win32" or _held is not None:
        return
    end = time.monotonic() + WAIT_S
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == os.stat(path).st_ino:  # noqa: PTH116 - pathlib is slow to import
                _held = path, descriptor
                return
        except OSError:  # somebody holds it, or has just removed it
            if time.monotonic() > end:
                os.close(descriptor)
                raise TimeoutError(
                    f"another worker of this conversation has not ended within {WAIT_S:g} s (it holds {path})"
                ) from None
        os.close(descriptor)
        time.sleep(_LOOK_S)


def drop() -> None:
    """Give the lock up, and remove its file. The worker does nothing more for the conversation."""
    global _held
    held, _held = _held, None
    if held is not None:
        with contextlib.suppress(OSError):
            os.unlink(held[0])  # noqa: PTH108 - while it is held, so nobody else has this file
        os.close(held[1])

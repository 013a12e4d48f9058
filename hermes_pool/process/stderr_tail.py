"""Keeps the last lines of a worker's stderr."""

from collections import deque
from collections.abc import Callable

LINES_KEPT = 50
"""How many are kept for error reports: a traceback of Python and what was said before it."""
STDERR_LINES_AT_ONCE_MAX = 1000
"""Most lines logged from one read, the last ones: each costs 20 us, and the event loop waits for it."""
STDERR_LINE_CHARS = 2000
"""Longer lines are cut: a line of a gigabyte must not end up in the host's memory."""


class StderrTail:
    """The last lines of a worker's stderr, in bounded memory whatever the worker writes."""

    def __init__(self, lines_max: int, on_line: Callable[[str], None]) -> None:
        self._lines: deque[str] = deque(maxlen=lines_max)
        self._unfinished = bytearray()
        self._on_line = on_line

    def feed(self, data: bytes | memoryview) -> None:
        """Add bytes, in any encoding and cut anywhere. Each finished line is kept and passed to ``on_line``."""
        *whole, rest = bytes(data).split(b"\n")
        if len(whole) > STDERR_LINES_AT_ONCE_MAX:
            left_out = len(whole) - STDERR_LINES_AT_ONCE_MAX
            del whole[:left_out]
            self._finish(b"")
            self._finish(f"({left_out:,} lines left out)".encode())
        for line in whole:
            self._finish(line)
        self._unfinished += rest[: STDERR_LINE_CHARS - len(self._unfinished)]

    def _finish(self, end: bytes) -> None:
        text = (self._unfinished + end)[:STDERR_LINE_CHARS].decode("utf-8", "replace").rstrip("\r")
        self._unfinished.clear()
        self._lines.append(text)
        self._on_line(text)

    def lines(self) -> tuple[str, ...]:
        """Return the lines that are kept, including the unfinished one."""
        if self._unfinished:
            return (*self._lines, self._unfinished.decode("utf-8", "replace"))
        return tuple(self._lines)

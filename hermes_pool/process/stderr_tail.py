"""The last lines of a worker's stderr."""

from collections import deque
from collections.abc import Callable

LINES_KEPT = 50
"""How many are kept for error reports: a traceback of Python and what was said before it."""
STDERR_LINES_AT_ONCE_MAX = 1000
"""Of one read, only so many lines are logged, the last: each costs the host 20 us, and the loop waits meanwhile."""
STDERR_LINE_CHARS = 2000
"""Longer lines are cut: one line of a gigabyte must not live in the host."""


class StderrTail:
    """The last lines of a worker's stderr, in bounded memory whatever it writes."""

    def __init__(self, lines_max: int, on_line: Callable[[str], None]) -> None:
        self._lines: deque[str] = deque(maxlen=lines_max)
        self._open = bytearray()
        self._on_line = on_line

    def feed(self, data: bytes | memoryview) -> None:
        """Take bytes, of whatever encoding, cut anywhere."""
        *whole, rest = bytes(data).split(b"\n")
        if len(whole) > STDERR_LINES_AT_ONCE_MAX:
            left_out = len(whole) - STDERR_LINES_AT_ONCE_MAX
            del whole[:left_out]
            self._finish(b"")
            self._finish(f"({left_out:,} lines left out)".encode())
        for line in whole:
            self._finish(line)
        self._open += rest[: STDERR_LINE_CHARS - len(self._open)]

    def _finish(self, end: bytes) -> None:
        text = (self._open + end)[:STDERR_LINE_CHARS].decode("utf-8", "replace").rstrip("\r")
        self._open.clear()
        self._lines.append(text)
        self._on_line(text)

    def lines(self) -> tuple[str, ...]:
        """Return what is kept, the unfinished line included."""
        if self._open:
            return (*self._lines, self._open.decode("utf-8", "replace"))
        return tuple(self._lines)

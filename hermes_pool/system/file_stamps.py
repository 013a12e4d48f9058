"""Detects changes of files, by the time of their last change and their size."""

import os
from collections.abc import Sequence

FileStamps = tuple[tuple[int, int] | None, ...]
"""For each file the time of its last change in nanoseconds and its size in bytes; ``None`` if it does not exist."""


def stamps_of(paths: Sequence[str]) -> FileStamps:
    """Return the present stamps of files, in order. Two that are equal mean that nothing has changed."""
    found: list[tuple[int, int] | None] = []
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116 - called several times in each start, where pathlib is slow
        except OSError:
            found.append(None)
        else:
            found.append((status.st_mtime_ns, status.st_size))
    return tuple(found)

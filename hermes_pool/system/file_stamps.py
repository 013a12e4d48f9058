"""Tells whether files have changed: by the time of their last change and their size."""

import os
from collections.abc import Sequence

Stamps = tuple[tuple[int, int] | None, ...]


def stamps_of(paths: Sequence[str]) -> Stamps:
    """Return what identifies the present content of each file; ``None`` for one that is not there."""
    found: list[tuple[int, int] | None] = []
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116 - a few of these on the way of each start
        except OSError:
            found.append(None)
        else:
            found.append((status.st_mtime_ns, status.st_size))
    return tuple(found)

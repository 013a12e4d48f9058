"""Remembers which modules a zygote should import in advance.

The list is learnt: each worker reports after its first turn what it still had to import. It is kept in a file, for the
next zygote and the next supervisor.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

CHARS_MAX = 100_000
"""Limit for all names together, since they go to a zygote in one datagram. Hermes has 30,000."""


class PreloadList:
    """The names of the modules that workers of one command had to import themselves."""

    def __init__(self, folder: Path, argv: Sequence[str]) -> None:
        """Keep the list in ``folder``, in a file for the worker command ``argv``."""
        key = hashlib.blake2b("\0".join(argv).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        self._file = folder / f"preload-{key}.json"
        self._names: set[str] = set()

    def load(self) -> None:
        """Add the names in the file, if it can be read."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            self._names |= set(msgspec.json.decode(self._file.read_bytes(), type=list[str]))

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self._names)

    def add(self, modules: Iterable[str]) -> int:
        """Add names and save the list; return how many are new. Adds none if the list would become too long."""
        new = set(modules) - self._names
        if not new or sum(map(len, self._names | new)) > CHARS_MAX:
            return 0
        self._names |= new
        with contextlib.suppress(OSError):  # without the file, the next supervisor learns the names anew
            self._file.parent.mkdir(parents=True, exist_ok=True)
            scratch = self._file.with_suffix(f".{os.getpid()}")
            scratch.write_bytes(msgspec.json.encode(self.names()))
            scratch.replace(self._file)
        return len(new)

"""Owns the standard descriptors of the worker, so that nobody else's output can ever touch the wire.

The protocol moves to private descriptors that no child inherits. What was 0 becomes the null device (a tool that reads
its input sees the end at once), and what was 1 becomes standard error, on the level of descriptors: prints of C
libraries and of child processes land in the log as well.
"""

import contextlib
import os
import sys
from typing import NoReturn


def claim() -> tuple[int, int]:
    """Take the wire away from descriptors 0 and 1; return the private ones, for reading and for writing."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            # A print must not raise, whatever the locale; and a line must be there when the process dies.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    wire_in, wire_out = os.dup(0), os.dup(1)  # close-on-exec, as all descriptors that Python makes
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    if sys.platform == "win32":
        import msvcrt  # noqa: PLC0415 - exists there only

        # dup and dup2 leave a descriptor in text mode, which turns every 0x0A into two bytes.
        for descriptor in (wire_in, wire_out):
            msvcrt.setmode(descriptor, os.O_BINARY)
    sys.stdout = sys.stderr
    return wire_in, wire_out


def leave(status: int, last_words: str = "") -> NoReturn:
    """End the process now, without exit handlers: those of Hermes take a second, and threads of tools hold it up."""
    with contextlib.suppress(OSError, ValueError):
        if last_words:
            sys.stderr.write(last_words.rstrip() + "\n")
        sys.stderr.flush()
    os._exit(status)

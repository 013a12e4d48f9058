"""Takes over the worker's standard descriptors, so that no other output can ever touch the wire.

The protocol moves to private descriptors that no child inherits. Descriptor 0 becomes the null device, so a tool that
reads standard input sees its end at once. Descriptor 1 becomes standard error. Because this happens at the level of
descriptors, the prints of C libraries and of child processes reach the log as well.
"""

import contextlib
import os
import sys
from typing import NoReturn


def claim() -> tuple[int, int]:
    """Move the wire away from descriptors 0 and 1; return the private descriptors for reading and for writing."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            # A print must not fail, whatever the locale, and a line must be written before the process dies.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    wire_in, wire_out = os.dup(0), os.dup(1)  # close-on-exec, like every descriptor that Python makes
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    if sys.platform == "win32":
        import msvcrt  # noqa: PLC0415 - exists on Windows only

        # dup and dup2 leave a descriptor in text mode, which turns every 0x0A into two bytes.
        for descriptor in (wire_in, wire_out):
            msvcrt.setmode(descriptor, os.O_BINARY)
    sys.stdout = sys.stderr
    return wire_in, wire_out


def leave(status: int, last_words: str = "") -> NoReturn:
    """End the process now, without exit handlers: those of Hermes take a second, and tools may block them."""
    with contextlib.suppress(OSError, ValueError):
        if last_words:
            sys.stderr.write(last_words.rstrip() + "\n")
        sys.stderr.flush()
    os._exit(status)

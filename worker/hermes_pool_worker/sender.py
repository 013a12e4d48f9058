"""Sends frames to the supervisor, from any thread."""

import os
import threading
import time

from hermes_pool_worker import wire

BURST_PIECES = 32
"""How many small pieces go out one by one, however fast they come. Those that follow are gathered."""
FLUSH_AFTER_S = 0.001
"""How long a small piece may be held back so that more can go with it, in seconds."""
HELD_BYTES_MAX = 32 * 1024
"""How much is held back at most: half of what a pipe holds that could not be enlarged."""


class FrameSender:
    """Writes whole frames in order, whichever threads send them.

    Once nobody reads the wire any more, frames are dropped silently: the reading side notices the same, and ends the
    process.
    """

    def __init__(self, descriptor: int, frame_bytes_max: int) -> None:
        self._descriptor = descriptor
        self._encoder = wire.FrameEncoder(frame_bytes_max)
        self._lock = threading.Lock()
        self._held = bytearray()
        self._last_at = 0.0
        self._burst = 0
        self._flush_wanted: threading.Event | None = None

    def send(self, message: wire.FromWorker) -> None:
        """Send a message.

        Raise ``FrameTooLargeError`` if it is over the limit; then nothing was sent, and the wire is intact.
        """
        with self._lock:
            frame = self._encoder.encode(message)
            if self._held:
                self._flush()
            self._write(frame)

    def send_piece(self, message: wire.TextDelta | wire.ReasoningDelta) -> None:
        """Send one of many small messages: at once, or together with its neighbours while they come thick and fast.

        Nothing is held back for longer than ``FLUSH_AFTER_S``. Raises what ``send`` raises.
        """
        with self._lock:
            frame = self._encoder.encode(message)
            now = time.monotonic()
            if now - self._last_at >= FLUSH_AFTER_S and not self._held:
                self._burst = 0
            self._burst += 1
            if self._burst <= BURST_PIECES:
                self._last_at = now
                self._write(frame)
                return
            self._held += frame
            if len(self._held) >= HELD_BYTES_MAX or now - self._last_at >= FLUSH_AFTER_S:
                self._last_at = now
                self._flush()
            elif self._flush_wanted is None:
                self._flush_wanted = threading.Event()
                self._flush_wanted.set()
                threading.Thread(
                    target=self._flush_later, args=(self._flush_wanted,), name="hermes-pool-flush", daemon=True
                ).start()
            elif not self._flush_wanted.is_set():
                self._flush_wanted.set()

    def _flush_later(self, wanted: threading.Event) -> None:
        """Flush soon after each wish: the body of a thread that starts with the first burst of pieces."""
        while True:
            wanted.wait()
            time.sleep(FLUSH_AFTER_S)
            wanted.clear()
            with self._lock:
                self._flush()

    def _flush(self) -> None:
        if self._held:
            self._write(self._held)
            self._held.clear()

    def _write(self, data: bytearray) -> None:
        try:
            sent = os.write(self._descriptor, data)
            while sent < len(data):
                with memoryview(data) as view:
                    sent += os.write(self._descriptor, view[sent:])
        except BrokenPipeError:
            pass

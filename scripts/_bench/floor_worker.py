"""The worker of the floors: blocking reads and writes of this project's frames, and nothing else."""

import os
import signal
import sys
from typing import Any

import msgspec

from hermes_pool_worker import wire

WAIT, DELTAS, STARTED = "/wait", "/deltas", "."


def main() -> None:
    """Echo until the input ends."""
    # The decoder of everything that the pool may send, although only turns are sent here.
    decode: Any = msgspec.msgpack.Decoder(wire.ToWorker).decode
    read = sys.stdin.buffer.read
    while len(header := read(wire.HEADER_BYTES)) == wire.HEADER_BYTES:
        turn = decode(read(int.from_bytes(header, "big")))
        text = turn.text
        if text == WAIT:
            send(wire.TextDelta(turn.turn_id, turn.attempt, STARTED))
            signal.pause()
        if text.startswith(DELTAS):
            _, count, size = text.split()
            piece = "x" * int(size)
            for _ in range(int(count)):
                send(wire.TextDelta(turn.turn_id, turn.attempt, piece))
            text = ""
        send(wire.TurnDone(turn.turn_id, turn.attempt, text, "floor"))


def send(message: wire.Message) -> None:
    """Write one frame."""
    frame = memoryview(wire.encode(message))
    while frame:
        frame = frame[os.write(1, frame) :]


if __name__ == "__main__":
    main()

import os
import signal
import sys

from hermes_pool_worker import wire

decoder: wire.FrameDecoder[wire.ToWorker] = wire.FrameDecoder(wire.ToWorker)
os.write(1, wire.encode(wire.Hello(wire.PROTOCOL, os.getpid(), "raw", {})))
while data := os.read(0, 65536):
    for message in decoder.feed(data):
        if isinstance(message, wire.Open):
            os.write(1, wire.encode(wire.Opened(message.session_id or "raw-1")))
        elif isinstance(message, wire.Turn) and message.text == "close" and message.attempt == 1:
            print("lives on without a voice", file=sys.stderr, flush=True)
            os.close(1)
            signal.pause()
        elif isinstance(message, wire.Turn):
            os.write(1, wire.encode(wire.TurnDone(message.turn_id, message.attempt, message.text, "raw-1")))
        else:
            raise SystemExit

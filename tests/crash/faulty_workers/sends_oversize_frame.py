import os

from hermes_pool_worker import wire


def send(message: wire.FromWorker) -> None:
    frame = memoryview(wire.encode(message, 2**32 - 1))
    while frame:
        frame = frame[os.write(1, frame) :]


decoder: wire.FrameDecoder[wire.ToWorker] = wire.FrameDecoder(wire.ToWorker)
send(wire.Hello(wire.PROTOCOL, os.getpid(), "raw", {}))
while data := os.read(0, 65536):
    for message in decoder.feed(data):
        if isinstance(message, wire.Open):
            send(wire.Opened(message.session_id or "raw-1"))
        elif isinstance(message, wire.Turn):
            send(wire.TurnDone(message.turn_id, message.attempt, "x" * int(message.text), "raw-1"))
        elif isinstance(message, wire.Close):
            raise SystemExit

import os

from hermes_pool_worker import wire


def send(message: wire.FromWorker) -> None:
    os.write(1, wire.encode(message))


decoder: wire.FrameDecoder[wire.ToWorker] = wire.FrameDecoder(wire.ToWorker)
send(wire.Hello(wire.PROTOCOL, os.getpid(), "raw", {}))
while data := os.read(0, 65536):
    for message in decoder.feed(data):
        if isinstance(message, wire.Open):
            send(wire.Opened(message.session_id or "raw-1"))
        elif isinstance(message, wire.Turn):
            word, _, bogus = message.text.partition(":")
            if word != "instead":
                send(wire.TurnDone(message.turn_id, message.attempt, word, "raw-1"))
            os.write(1, bytes.fromhex(bogus))
        elif isinstance(message, wire.Close):
            raise SystemExit

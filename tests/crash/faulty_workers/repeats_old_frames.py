import os

from hermes_pool_worker import wire

decoder: wire.FrameDecoder[wire.ToWorker] = wire.FrameDecoder(wire.ToWorker)
hello = wire.encode(wire.Hello(wire.PROTOCOL, os.getpid(), "raw", {}))
os.write(1, hello + hello)
old = bytearray()
while data := os.read(0, 65536):
    for message in decoder.feed(data):
        if isinstance(message, wire.Open):
            opened = wire.encode(wire.Opened(message.session_id or "raw-1"))
            os.write(1, opened + opened)
        elif isinstance(message, wire.Turn):
            of = message.turn_id, message.attempt
            foreign = wire.encode(wire.TurnDone(message.turn_id, message.attempt + 1, "of another attempt", "raw-2"))
            good = wire.encode(wire.TextDelta(*of, message.text)) + wire.encode(
                wire.TurnDone(*of, message.text, "raw-1")
            )
            os.write(1, old + foreign + good + good)
            old += good
        else:
            raise SystemExit

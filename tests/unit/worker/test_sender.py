import os
import threading
from collections.abc import Iterator

import pytest

from hermes_pool_worker import sender as sender_module
from hermes_pool_worker import wire
from hermes_pool_worker.sender import FrameSender

pytestmark = pytest.mark.timeout(30)


class Pipe:
    """A sender, and the other end of its wire."""

    def __init__(self, frame_bytes_max: int = 10**6) -> None:
        self.read_end, self.write_end = os.pipe()
        self.sender = FrameSender(self.write_end, frame_bytes_max)
        self.decoder: wire.FrameDecoder[wire.FromWorker] = wire.FrameDecoder(wire.FromWorker)
        self.reads = 0

    def receive(self, count: int) -> list[wire.FromWorker]:
        messages: list[wire.FromWorker] = []
        while len(messages) < count:
            messages += self.decoder.feed(os.read(self.read_end, 65536))
            self.reads += 1
        return messages

    def stop_reading(self) -> None:
        os.close(self.read_end)
        self.read_end = -1

    def close(self) -> None:
        if self.read_end >= 0:
            self.stop_reading()
        # The thread that flushes outlives the test: it must find nothing to write into a descriptor that is another's.
        self.sender.send(wire.Pong(0))
        os.close(self.write_end)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def piece(number: int, text: str = "x") -> wire.TextDelta:
    return wire.TextDelta("t", number, text)


def test_a_frame_goes_out_at_once(pipe: Pipe) -> None:
    pipe.sender.send(wire.Pong(7))
    assert pipe.receive(1) == [wire.Pong(7)]


def test_a_frame_larger_than_the_pipe_arrives_whole(pipe: Pipe) -> None:
    large = piece(1, "x" * 500_000)
    writer = threading.Thread(target=pipe.sender.send, args=(large,))
    writer.start()
    assert pipe.receive(1) == [large]
    writer.join()


def test_frames_of_several_threads_are_never_mixed(pipe: Pipe) -> None:
    def write(thread: int) -> None:
        for number in range(20):
            pipe.sender.send(wire.TextDelta(str(thread), number, f"{thread}" * 20_000))

    writers = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
    for writer in writers:
        writer.start()
    got = pipe.receive(80)
    for writer in writers:
        writer.join()
    assert pipe.decoder.failed is None
    for thread in range(4):
        own = [each for each in got if isinstance(each, wire.TextDelta) and each.turn_id == str(thread)]
        assert [each.attempt for each in own] == list(range(20))


def test_a_frame_over_the_limit_raises_and_leaves_the_wire_intact() -> None:
    pipe = Pipe(frame_bytes_max=100)
    try:
        with pytest.raises(wire.FrameTooLargeError):
            pipe.sender.send(piece(1, "x" * 100))
        with pytest.raises(wire.FrameTooLargeError):
            pipe.sender.send_piece(piece(2, "x" * 100))
        pipe.sender.send(wire.Pong(1))
        assert pipe.receive(1) == [wire.Pong(1)]
    finally:
        pipe.close()


def test_without_a_reader_frames_are_dropped(pipe: Pipe) -> None:
    pipe.stop_reading()
    pipe.sender.send(wire.Pong(1))
    pipe.sender.send_piece(piece(1))


def test_the_first_pieces_of_a_burst_go_out_one_by_one_and_the_rest_together(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "FLUSH_AFTER_S", 60)  # so that nothing but the next frame flushes
    count = 4 * sender_module.BURST_PIECES
    for number in range(count):
        pipe.sender.send_piece(piece(number))
    got = pipe.receive(sender_module.BURST_PIECES)
    assert got == [piece(number) for number in range(sender_module.BURST_PIECES)]
    pipe.sender.send(wire.Pong(1))
    got += pipe.receive(count + 1 - len(got))
    assert got == [*(piece(number) for number in range(count)), wire.Pong(1)]


def test_what_is_held_back_comes_soon_without_another_frame(pipe: Pipe) -> None:
    count = 10 * sender_module.BURST_PIECES
    for _ in range(3):  # also when the thread that flushes has slept
        for number in range(count):
            pipe.sender.send_piece(piece(number))
        assert pipe.receive(count) == [piece(number) for number in range(count)]


def test_no_more_than_the_limit_is_held_back(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "FLUSH_AFTER_S", 60)
    size = sender_module.HELD_BYTES_MAX // 8
    count = sender_module.BURST_PIECES + 9
    reader: list[wire.FromWorker] = []
    thread = threading.Thread(target=lambda: reader.extend(pipe.receive(sender_module.BURST_PIECES + 8)))
    thread.start()
    for number in range(count):
        pipe.sender.send_piece(piece(number, "x" * size))
    thread.join(20)
    assert [each.attempt for each in reader if isinstance(each, wire.TextDelta)] == list(range(len(reader)))
    assert len(reader) >= sender_module.BURST_PIECES + 8

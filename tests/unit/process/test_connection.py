import signal
from typing import Any

from hermes_pool.process.connection import UNSOLICITED_MAX, WorkerConnection
from hermes_pool_worker import wire

# --- what nobody has asked for ---


class Process:
    """A worker that keeps what it is told, and what it was signalled."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.signals: list[int] = []
        self._decoder: wire.FrameDecoder[Any] = wire.FrameDecoder(wire.ToWorker)

    def write(self, data: bytes | bytearray) -> None:
        self.told += self._decoder.feed(bytes(data))

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


class Listener:
    """The worker's owner: no turn runs, so nobody has asked for a frame of one."""

    def connection_heard(self, frame: wire.TurnFrame) -> bool:
        return False

    def connection_heard_texts(self, frames: list[wire.FromWorker]) -> int:
        return 0


def connected() -> tuple[WorkerConnection, Any]:
    listener: Any = Listener()
    connection = WorkerConnection("m", listener, frame_bytes_max=1 << 20, on_imported=lambda _: None)
    process: Any = Process()
    connection.process = process
    return connection, process


def say(connection: WorkerConnection, message: wire.Message) -> None:
    connection.stdout_received(bytes(wire.encode(message)))


async def test_a_worker_that_answers_every_ping_may_do_so_for_ever() -> None:
    connection, process = connected()
    for _ in range(UNSOLICITED_MAX + 5):
        connection.ping()
        assert connection.pinged_at is not None
        say(connection, wire.Pong(process.told[-1].number))
        assert connection.pinged_at is None
    assert not process.signals


async def test_one_that_answers_the_same_ping_again_and_again_is_ended() -> None:
    connection, process = connected()
    connection.ping()
    for _ in range(UNSOLICITED_MAX):
        say(connection, wire.Pong(1))
    assert not process.signals
    say(connection, wire.Pong(1))
    assert process.signals == [signal.SIGKILL]


async def test_late_frames_of_many_turns_do_not_add_up_and_those_of_one_turn_do() -> None:
    connection, process = connected()
    late = wire.Status("turn-0", 1, "late")
    for number in range(3):
        connection.hand_over(wire.Turn(f"turn-{number}", 1, "hello"))
        for _ in range(UNSOLICITED_MAX // 2):
            say(connection, late)
    assert not process.signals
    assert [message.turn_id for message in process.told] == ["turn-0", "turn-1", "turn-2"]
    for _ in range(UNSOLICITED_MAX // 2):
        say(connection, late)
    assert process.signals == [signal.SIGKILL]
    connection.hand_over(wire.Turn("turn-3", 1, "hello"))
    say(connection, late)
    assert process.signals == [signal.SIGKILL]  # once condemned, it stays so

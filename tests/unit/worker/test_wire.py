import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_pool_worker import wire

TEXT = st.text(max_size=50)
MESSAGES = st.one_of(
    st.builds(wire.TextDelta, TEXT, st.integers(1, 9), TEXT),
    st.builds(wire.ToolStarted, TEXT, st.integers(1, 9), TEXT, TEXT, TEXT),
    st.builds(wire.TurnDone, TEXT, st.integers(1, 9), TEXT, TEXT, st.just("partial"), st.none() | TEXT),
    st.builds(
        wire.Question, TEXT, st.just(1), TEXT, st.just("clarify"), TEXT, st.lists(TEXT, max_size=3), st.just(1.5)
    ),
    st.builds(wire.Pong, st.integers(0, 2**40)),
    st.just(wire.Closed()),
)


def host(frame_bytes_max: int = wire.FRAME_BYTES_MAX) -> wire.FrameDecoder[wire.FromWorker]:
    """The decoder of what a worker sends."""
    return wire.FrameDecoder(wire.FromWorker, frame_bytes_max)


def worker() -> wire.FrameDecoder[wire.ToWorker]:
    """The decoder of what a worker takes."""
    return wire.FrameDecoder(wire.ToWorker)


# The bytes of each message, so that a change of the wire is never an accident.
GOLDEN = [
    (wire.Open("c"), "00000018dc0010a44f70656ea163c0c0c080c0c0c2c2a0a09090c0c0"),
    (wire.Prepare({"a": 1}), "0000000e93a75072657061726581a16101c0"),
    (wire.Prepared(["f"]), "0000000d92a8507265706172656491a166"),
    (wire.Turn("t", 1, "hi"), "0000000d95a45475726ea17401a26869c3"),
    (wire.Cancel("t", 2), "0000000d95a643616e63656ca17402c2a0"),
    (wire.Answer("t", 1, "q1", "no"), "0000001296a6416e73776572a17401a27131a26e6fc2"),
    (wire.Ping(7), "0000000792a450696e6707"),
    (wire.Close(), "0000000791a5436c6f7365"),
    (wire.Hello(1, 42, "echo", {"python": "3"}), "0000001895a548656c6c6f012aa46563686f81a6707974686f6ea133"),
    (wire.Opened("s", True, "4"), "0000001198a64f70656e6564a173c3a134c0c0c290"),
    (wire.TextDelta("t", 1, "\N{GRINNING FACE}"), "0000001394a95465787444656c7461a17401a4f09f9880"),
    (wire.ReasoningDelta("t", 1, "m"), "0000001594ae526561736f6e696e6744656c7461a17401a16d"),
    (wire.ToolStarted("t", 1, "c", "sh", "ls"), "0000001896ab546f6f6c53746172746564a17401a163a27368a26c73"),
    (
        wire.ToolFinished("t", 1, "c", "sh", True, "x", 0.5),
        "0000002298ac546f6f6c46696e6973686564a17401a163a27368c3a178cb3fe0000000000000",
    ),
    (wire.Status("t", 1, "s"), "0000000d94a6537461747573a17401a173"),
    (
        wire.Question("t", 1, "q", "approval", "rm", ["no"], 60.0),
        "0000002898a85175657374696f6ea17401a171a8617070726f76616ca2726d91a26e6fcb404e000000000000",
    ),
    (wire.SessionMoved("t", 1, "s"), "0000001394ac53657373696f6e4d6f766564a17401a173"),
    (
        wire.TurnDone("t", 1, "r", "s", committed="9"),
        "000000229ca85475726e446f6e65a17401a172a173a9636f6d706c65746564a13980c0c3c0c0",
    ),
    (wire.TurnFailed("t", 1, "w", "x"), "0000001b9daa5475726e4661696c6564a17401a177a178c0c0c2a080c0c0c0"),
    (wire.Steer("t", 1, "on"), "0000000d94a55374656572a17401a26f6e"),
    (wire.Flush(), "0000000791a5466c757368"),
    (wire.ReadTurns("9", 5), "0000000e93a9526561645475726e73a13905"),
    (wire.Flushed("9"), "0000000c93a7466c7573686564a139c0"),
    (
        wire.TurnsRead([wire.PastTurn("9", "hi", "ho")]),
        "0000001993a95475726e73526561649196a139a26869a2686f90c0c0c0",
    ),
    (wire.Pong(7), "0000000792a4506f6e6707"),
    (wire.Closed(), "0000000891a6436c6f736564"),
    (wire.Imported(["a.b"]), "0000000f92a8496d706f7274656491a3612e62"),
    (wire.BackgroundStarted("j", "tests"), "0000001b93b14261636b67726f756e6453746172746564a16aa57465737473"),
    (wire.BackgroundFinished("j", "ok"), "0000001993b24261636b67726f756e6446696e6973686564a16aa26f6b"),
]


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=lambda value: type(value).__name__)
def test_golden_bytes(message: wire.Message, golden: str) -> None:
    assert bytes(wire.encode(message)).hex() == golden
    decoder: wire.FrameDecoder[wire.ToWorker | wire.FromWorker] = wire.FrameDecoder(wire.ToWorker | wire.FromWorker)
    assert decoder.feed(bytes.fromhex(golden)) == [message]


def test_every_message_has_golden_bytes() -> None:
    declared = {kind for union in (wire.ToWorker, wire.FromWorker) for kind in union.__args__}
    assert {type(message) for message, _ in GOLDEN} == declared


@settings(max_examples=200, deadline=None)
@given(st.lists(MESSAGES, max_size=8), st.data())
def test_the_stream_may_be_cut_anywhere(messages: list[wire.Message], data: st.DataObject) -> None:
    stream = b"".join(bytes(wire.encode(message)) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    decoder = host()
    got = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += decoder.feed(stream[start:end])
    assert got == messages
    assert decoder.failed is None
    assert not decoder.mid_frame


@settings(max_examples=100, deadline=None)
@given(st.lists(MESSAGES, min_size=1, max_size=4), st.data())
def test_an_end_inside_a_frame_is_seen(messages: list[wire.Message], data: st.DataObject) -> None:
    stream = b"".join(bytes(wire.encode(message)) for message in messages)
    whole = {0}
    for message in messages:
        whole.add(max(whole) + len(wire.encode(message)))
    cut = data.draw(st.integers(0, len(stream)))
    decoder = host()
    decoder.feed(stream[:cut])
    assert decoder.mid_frame is (cut not in whole)


def test_the_size_is_checked_before_anything_is_read_for_it() -> None:
    decoder = host(1000)
    assert decoder.feed((2**31 - 1).to_bytes(4, "big")) == []
    assert isinstance(decoder.failed, wire.FrameTooLargeError)
    assert "2,147,483,647" in str(decoder.failed)
    assert "1,000" in str(decoder.failed)


def test_a_frame_of_exactly_the_limit_passes_and_one_byte_more_does_not() -> None:
    size = len(wire.encode(wire.TextDelta("t", 1, "x" * 100))) - wire.HEADER_BYTES
    frame = wire.encode(wire.TextDelta("t", 1, "x" * 100), size)
    assert host(size).feed(frame)
    with pytest.raises(wire.FrameTooLargeError) as caught:
        wire.encode(wire.TextDelta("t", 1, "x" * 101), size)
    assert (caught.value.size, caught.value.limit) == (size + 1, size)
    small = host(size - 1)
    assert small.feed(frame) == []
    assert small.failed is not None


GARBAGE = {
    "no MessagePack": b"\xc1\xc1\xc1",
    "trailing bytes": msgspec.msgpack.encode(wire.Closed()) + b"\x01",
    "a bare integer": b"\x07",
    "an unknown type": msgspec.msgpack.encode(["Nonsense", 1]),
    "a wrong field": msgspec.msgpack.encode(["Pong", "seven"]),
    "a missing field": msgspec.msgpack.encode(["TextDelta", "t"]),
    "a huge array": b"\xdd\xff\xff\xff\xff",
    "a huge text": b"\x92\xa4Pong\xdb\xff\xff\xff\xffabc",
    "bytes for text": msgspec.msgpack.encode(["TextDelta", b"t", 1, b"x"]),
    "text that is no UTF-8": b"\x94\xa9TextDelta\xa1t\x01\xa3\xed\xa0\xbd",
    "deep nesting": b"\x91" * 5000 + b"\xc0",
    "nothing": b"",
}


@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE)
def test_garbage_ends_the_stream_after_what_was_good(body: bytes) -> None:
    good = bytes(wire.encode(wire.Pong(1)))
    decoder = host()
    assert decoder.feed(good + len(body).to_bytes(4, "big") + body + good) == [wire.Pong(1)]
    assert isinstance(decoder.failed, wire.WireError)
    assert decoder.feed(good) == []


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=6))
def test_no_bytes_can_raise(chunks: list[bytes]) -> None:
    decoder = host(10_000)
    for chunk in chunks:
        decoder.feed(chunk)


@pytest.mark.parametrize(
    ("text", "wired"),
    [
        ("a\ud83db", "a\N{REPLACEMENT CHARACTER}b"),
        ("\udc97", "\N{REPLACEMENT CHARACTER}"),
        ("\ud83d\ude00", "\N{GRINNING FACE}"),
        ("\x00 \\u0000", "\x00 \\u0000"),
    ],
)
def test_half_a_surrogate_pair_becomes_a_replacement_character(text: str, wired: str) -> None:
    frame = wire.encode(wire.Turn("t", 1, text))
    assert worker().feed(frame) == [wire.Turn("t", 1, wired)]
    opened = wire.encode(wire.Open("c", options={text: [text, {"x": (text,)}]}))
    (message,) = worker().feed(opened)
    assert isinstance(message, wire.Open)
    assert message.options == {wired: [wired, {"x": [wired]}]}


def test_a_later_field_is_ignored_and_an_earlier_wire_gets_the_default() -> None:
    longer = msgspec.msgpack.encode(["Pong", 1, "added by a later version"])
    shorter = msgspec.msgpack.encode(["Opened", "s"])
    decoder = host()
    for body, message in ((longer, wire.Pong(1)), (shorter, wire.Opened("s"))):
        assert decoder.feed(len(body).to_bytes(4, "big") + body) == [message]

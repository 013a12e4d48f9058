from hypothesis import given
from hypothesis import strategies as st

from hermes_pool.process.stderr_tail import STDERR_LINE_CHARS, StderrTail


@given(st.lists(st.binary(max_size=30)), st.data())
def test_the_tail_is_the_last_lines_however_the_bytes_were_cut(pieces: list[bytes], data: st.DataObject) -> None:
    stream = b"\n".join(pieces)
    whole, cut = StderrTail(5, lambda _: None), StderrTail(5, lambda _: None)
    whole.feed(stream)
    at = data.draw(st.integers(0, len(stream)))
    cut.feed(stream[:at])
    cut.feed(stream[at:])
    assert whole.lines() == cut.lines()
    assert len(cut.lines()) <= 6


def test_the_tail_is_bounded_and_every_line_is_told_once() -> None:
    told: list[str] = []
    tail = StderrTail(3, told.append)
    tail.feed(b"x" * 5_000_000)
    tail.feed(b"x" * 5_000_000 + b"\n\xff\xfe\r\nlast")
    assert [len(line) for line in tail.lines()] == [STDERR_LINE_CHARS, 2, 4]
    assert tail.lines()[1:] == ("\N{REPLACEMENT CHARACTER}" * 2, "last")
    assert len(told) == 2

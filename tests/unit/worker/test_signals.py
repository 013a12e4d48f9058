import os
import signal
import sys
from collections.abc import Iterator

import pytest

from hermes_pool_worker import signals

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it has no signals")


@pytest.fixture
def restored() -> Iterator[None]:
    """Signal handling of this process, put back afterwards."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.mark.usefixtures("restored")
def test_what_a_host_passes_on_is_undone() -> None:
    inherited = (signal.SIGQUIT, signal.SIGCHLD)
    for number in (signal.SIGTERM, signal.SIGHUP, *inherited):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    signals.reset()
    assert {signal.getsignal(number) for number in inherited} == {signal.SIG_DFL}
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    for name in signals.OUTLIVED:
        assert callable(signal.getsignal(getattr(signal, name))), "a function is reset at exec"


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("waits", [False, True])
def test_a_signal_to_end_counts_only_if_the_pool_wants_it(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    signals.reset()
    read_end, write_end = os.pipe()
    ended = []
    monkeypatch.setattr(os, "kill", lambda _pid, number: ended.append(number))
    monkeypatch.setattr(signals, "_wire_in", read_end)
    monkeypatch.setattr(signals, "_is_closing", False)
    if waits:
        os.write(write_end, b"unread")
    signal.raise_signal(signal.SIGTERM)
    assert ended == ([signal.SIGTERM] if waits else [])
    os.close(read_end)
    os.close(write_end)


@pytest.mark.usefixtures("restored")
def test_an_interrupt_does_nothing_and_tools_do_not_inherit_that() -> None:
    signals.reset()
    signal.raise_signal(signal.SIGINT)
    assert callable(signal.getsignal(signal.SIGINT)), "a function is reset at exec; SIG_IGN would be inherited"

"""The documentation of the interface for agents: its example is a real one."""

import inspect
import os
import textwrap
from collections.abc import Callable

from hermes_pool_worker import agent, wire
from hermes_pool_worker.agent import Agent, AgentError, Open, Opened, Outcome, RunningTurn
from hermes_pool_worker.running_turn import WireTurn
from hermes_pool_worker.sender import FrameSender


def example() -> Callable[[], Agent]:
    """The agent of the module's docstring, run as it stands there."""
    text = inspect.getdoc(agent) or ""
    source = text[text.index("    from hermes_pool_worker") : text.index("And the settings")]
    space: dict[str, Callable[[], Agent]] = {}
    exec(textwrap.dedent(source), space)
    return space["Parrot"]


def test_the_example_is_a_whole_agent() -> None:
    parrot = example()()
    assert parrot.open(Open("c")) == Opened("parrot-1")
    assert parrot.open(Open("c", "stored")) == Opened("stored")
    read_end, write_end = os.pipe()
    try:
        turn: RunningTurn = WireTurn(wire.Turn("t", 1, "hello"), FrameSender(write_end, 10**6))
        assert parrot.turn("hello", turn) == Outcome("hello")
        decoder: wire.FrameDecoder[wire.FromWorker] = wire.FrameDecoder(wire.FromWorker)
        assert decoder.feed(os.read(read_end, 65536)) == [wire.TextDelta("t", 1, "hello")]
    finally:
        os.close(read_end)
        os.close(write_end)
    parrot.interrupt()
    parrot.close()


def test_every_part_of_the_interface_is_documented() -> None:
    for protocol in (Agent, RunningTurn):
        for name, member in vars(protocol).items():
            if not name.startswith("_") and (callable(member) or isinstance(member, property)):
                assert inspect.getdoc(member), f"{protocol.__name__}.{name}"


def test_an_error_carries_a_word_for_programs_and_a_text_for_people() -> None:
    error = AgentError("rate_limit", "try again later")
    assert (error.reason, str(error)) == ("rate_limit", "try again later")

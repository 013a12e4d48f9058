"""What a caller can rely on in every error: the words for programs, and that it survives a copy and a pickle."""

import copy
import importlib
import inspect
import pickle
import pkgutil
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

import hermes_pool
from hermes_pool import errors
from hermes_pool.crash_report import DeathReport
from hermes_pool.errors import (
    AgentFailedError,
    HermesPoolError,
    PoolDrainingError,
    PoolFullError,
    TurnCancelledError,
    TurnError,
    TurnInterruptedError,
    TurnTimeoutError,
    WorkerCrashedError,
    WorkerDiedError,
)

STATUSES = {400, 404, 409, 413, 422, 429, 500, 502, 503, 504}
REPORT = DeathReport(
    report_id="r", conversation_id="c", at="2026-01-02T03:04:05Z", pid=4, incarnation=2, uptime_s=1.5, exit="exited",
    returncode=-9, tools_open=("hammer",), memory=((1.5, 7),), stderr_tail=("last words",),
)  # fmt: skip
SAMPLES: dict[Any, Any] = {
    str: "word",
    int: 7,
    float: 1.5,
    bool: True,
    Sequence[str]: ["one line", "another one"],
    int | None: -9,
    float | None: 2.5,
    str | None: "thing",
    DeathReport | None: REPORT,
}
"""A value of each type that an error is made with. A new error with another one needs a row here."""


def all_errors() -> list[type[HermesPoolError]]:
    """Every class of error of the package, wherever it is defined."""
    for module in pkgutil.walk_packages(hermes_pool.__path__, "hermes_pool."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)

    def below(kind: type[HermesPoolError]) -> Iterator[type[HermesPoolError]]:
        yield kind
        for each in kind.__subclasses__():
            yield from below(each)

    found = {kind for kind in below(HermesPoolError) if kind.__module__.startswith("hermes_pool.")}
    return sorted(found, key=lambda kind: kind.__name__)


ERRORS = all_errors()
each_error = pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)


def made(kind: type[HermesPoolError]) -> HermesPoolError:
    """An error with a value for everything that it can be made with."""
    hints = typing.get_type_hints(kind.__init__)
    names = [name for name in inspect.signature(kind).parameters if name != "message"]
    return kind("it went wrong", **{name: SAMPLES[hints[name]] for name in names})


def state_of(error: HermesPoolError) -> dict[str, Any]:
    public = [name for name in dir(error) if not name.startswith("_") and not callable(getattr(error, name))]
    return {name: getattr(error, name) for name in public if name != "args"}


def pickled(protocol: int, error: HermesPoolError) -> HermesPoolError:
    again: HermesPoolError = pickle.loads(pickle.dumps(error, protocol))
    return again


COPIES: dict[str, Callable[[HermesPoolError], HermesPoolError]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {protocol}": partial(pickled, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)},
}


@each_error
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_has_everything_that_the_error_has(
    kind: type[HermesPoolError], copied: Callable[[HermesPoolError], HermesPoolError]
) -> None:
    error = made(kind)
    # What is learnt after it was made is kept, too.
    error.conversation_id = "c" * 100
    error.sent = not error.sent
    error.retry_after_s = 12.5
    error.add_note("while testing")
    if isinstance(error, TurnTimeoutError):
        error.stacks = ("a stack",)
    again = copied(error)
    assert again is not error
    assert type(again) is kind
    assert (again.args, str(again), repr(again)) == (error.args, str(error), repr(error))
    assert state_of(again) == state_of(error)
    assert vars(again) == vars(error)
    assert str(again).count("another one") <= 1


def test_a_copy_is_independent() -> None:
    error = made(TurnTimeoutError)
    assert isinstance(error, TurnTimeoutError)
    again = copy.copy(error)
    again.stacks, again.sent = ("a stack",), False
    assert (error.stacks, error.sent) == ((), True)


def test_a_copy_of_a_hosts_own_error_works_as_well() -> None:
    class HostsOwnError(AgentFailedError):
        def __init__(self, *, user: str) -> None:
            super().__init__("for the host's reasons", reason="own", conversation_id="c")
            self.user = user

    again = copy.deepcopy(HostsOwnError(user="ada"))
    assert (again.user, again.reason, str(again)) == ("ada", "own", str(HostsOwnError(user="ada")))


@each_error
def test_every_class_has_a_word_of_its_own_and_says_what_a_host_should_do(kind: type[HermesPoolError]) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", vars(kind)["code"])
    error = made(kind)
    assert error.http_status in STATUSES
    assert isinstance(error.retryable, bool)
    assert isinstance(error.sent, bool)
    assert error.retry_after_s is None or error.retry_after_s >= 0
    # A client that is told to correct its request must not be told to send the same one again.
    assert not (error.retryable and error.http_status in (400, 404, 413, 422))
    # What nobody but a person can mend must not be repeated by a proxy.
    if error.http_status == 500:
        assert not error.retryable


def test_no_two_classes_have_the_same_word() -> None:
    words = [kind.code for kind in ERRORS]
    assert len(set(words)) == len(words)


@each_error
def test_only_what_happens_in_a_turn_may_have_been_seen_by_the_agent(kind: type[HermesPoolError]) -> None:
    assert kind.sent is issubclass(kind, TurnError)


def test_who_sends_a_crashed_turn_again_does_not_catch_an_interrupted_one() -> None:
    assert TurnInterruptedError.__base__ is WorkerCrashedError.__base__ is WorkerDiedError
    assert WorkerDiedError.__base__ is TurnError
    assert not issubclass(TurnInterruptedError, WorkerCrashedError)
    crashed, interrupted = made(WorkerCrashedError), made(TurnInterruptedError)
    assert (crashed.retryable, crashed.http_status) == (True, 502)
    assert (interrupted.retryable, interrupted.http_status) == (False, 500)
    for error in (crashed, interrupted):
        assert isinstance(error, WorkerDiedError)
        assert (error.exit, error.returncode, error.report) == ("word", -9, REPORT)
        assert error.stderr_tail == ("one line", "another one")
        assert str(error) == (
            "conversation 'thing': it went wrong; its last lines on stderr:\n    one line\n    another one"
        )


def test_a_cancelled_turn_is_not_to_be_repeated_unless_somebody_says_so() -> None:
    stopped = TurnCancelledError("stopped")
    assert (stopped.sent, stopped.retryable, stopped.http_status) == (True, False, 409)
    closed = TurnCancelledError("closed", sent=False, retryable=True)
    assert (closed.sent, closed.retryable, closed.http_status) == (False, True, 503)


def test_a_full_pool_says_when_to_come_back_as_far_as_it_knows() -> None:
    assert PoolFullError("full", position=1, waiting=0).retry_after_s is None
    assert PoolFullError("full", position=1, waiting=0, expected_wait_s=2.5).retry_after_s == 2.5


def test_a_loop_that_tries_again_waits_for_a_drained_pool_and_ends_with_a_closed_one() -> None:
    assert PoolDrainingError.retryable
    assert not errors.PoolClosedError.retryable
    assert PoolDrainingError.http_status == errors.PoolClosedError.http_status == 503

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_pool import (
    NoCapacityError,
    PoolUnavailableError,
    PoolUnusableError,
    RestartBackoffError,
    RestartPolicy,
    StartPolicy,
    StoreError,
    WorkerStartError,
    WorkerStartTimeoutError,
    WorkerUnusableError,
)
from hermes_pool.policy.breakers import RestartBudget, StartBreaker, backoff_s
from hermes_pool.snapshot import BreakerSnapshot
from tests.support import refused

RESTARTS = RestartPolicy(deaths_in_window_max=3, window_s=100, backoff_s=1, quarantine_after=2)
STARTS = StartPolicy(failures_max=3, probe_s=10)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def whole() -> float:
    """No jitter: the longest delay."""
    return 1.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


# --- the delays ---


@pytest.mark.parametrize(
    ("times_before", "expected"), [(0, 0.5), (1, 1), (2, 2), (6, 32), (7, 60), (8, 60), (5000, 60)]
)
def test_a_back_off_doubles_up_to_its_limit(times_before: int, expected: float) -> None:
    assert backoff_s(0.5, 60, times_before, whole) == expected
    assert backoff_s(0.5, 60, times_before, lambda: 0.0) == expected / 2


@given(
    st.floats(0.001, 1e6), st.floats(1, 1e6), st.integers(0, 10**6), st.floats(0, 1, exclude_max=True)
)  # fmt: skip
def test_a_back_off_is_over_0_and_never_longer_than_its_limit(
    first_s: float, factor: float, times_before: int, jitter: float
) -> None:
    delay_s = backoff_s(first_s, first_s * factor, times_before, lambda: jitter)
    assert first_s / 2 <= delay_s <= first_s * factor
    assert delay_s <= backoff_s(first_s, first_s * factor, times_before + 1, lambda: jitter)


# --- the restart budget ---


def budget(clock: Clock, random: Callable[[], float] = whole) -> RestartBudget:
    return RestartBudget(RESTARTS, clock, random, conversation_id="c")


def test_deaths_within_the_rate_delay_nothing(clock: Clock) -> None:
    restarts = budget(clock)
    for number in range(1, 4):
        restarts.note_death()
        assert refused(restarts.check) is None
        assert restarts.snapshot() == BreakerSnapshot(state="closed", failures=number, failures_max=3)


def test_one_death_too_many_begins_a_back_off_that_says_how_long(clock: Clock) -> None:
    restarts = budget(clock, lambda: 0.5)
    for _ in range(4):
        restarts.note_death()
    error = refused(restarts.check)
    assert type(error) is RestartBackoffError
    assert (error.retry_after_s, error.retryable, error.conversation_id) == (0.75, True, "c")
    assert "4" in str(error)
    assert "0.8 s" in str(error)
    assert restarts.snapshot() == BreakerSnapshot(state="open", failures=4, failures_max=3, retry_after_s=0.75)
    clock.now += 0.7
    assert refused(restarts.check).retry_after_s == pytest.approx(0.05)
    clock.now += 0.05 + 1e-9
    assert refused(restarts.check) is None
    assert restarts.snapshot() == BreakerSnapshot(state="half_open", failures=4, failures_max=3)


def test_deaths_that_are_far_apart_are_no_rate(clock: Clock) -> None:
    restarts = budget(clock)
    for _ in range(50):
        restarts.note_death()
        assert refused(restarts.check) is None
        clock.now += 40
    assert restarts.snapshot().failures == 2
    clock.now += 100
    assert restarts.snapshot().failures == 0


def test_each_try_that_dies_doubles_the_wait_and_a_completed_turn_ends_it(clock: Clock) -> None:
    restarts = budget(clock)
    for _ in range(3):
        restarts.note_death()
    waits = []
    for _ in range(8):
        restarts.note_death()
        waits.append(refused(restarts.check).retry_after_s)
        clock.now += waits[-1]
        assert refused(restarts.check) is None
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    restarts.note_completed()
    assert restarts.snapshot() == BreakerSnapshot(state="closed", failures=0, failures_max=3)
    for _ in range(3):
        restarts.note_death()
        assert refused(restarts.check) is None
    restarts.note_death()
    assert refused(restarts.check).retry_after_s == 1


def test_time_alone_forgets_the_deaths_and_not_how_long_the_last_wait_was(clock: Clock) -> None:
    restarts = budget(clock)
    for _ in range(4):
        restarts.note_death()
    clock.now += 86400
    assert restarts.snapshot() == BreakerSnapshot(state="half_open", failures=0, failures_max=3)
    restarts.note_death()  # half open, a single one is enough
    assert refused(restarts.check).retry_after_s == 2


def test_a_try_that_shows_nothing_leaves_the_way_open(clock: Clock) -> None:
    restarts = budget(clock)
    for _ in range(4):
        restarts.note_death()
    clock.now += 1
    for _ in range(3):  # let in, and cancelled each time
        assert refused(restarts.check) is None


def test_a_death_in_the_back_off_makes_it_no_longer(clock: Clock) -> None:
    restarts = budget(clock)
    for _ in range(4):
        restarts.note_death()
    clock.now += 0.5
    restarts.note_death()
    assert refused(restarts.check).retry_after_s == 0.5
    assert restarts.snapshot().failures == 4  # as many as it takes, and no more, are kept


def test_a_budget_can_be_reset_from_outside(clock: Clock) -> None:
    restarts = budget(clock)
    for _ in range(4):
        restarts.note_death()
    restarts.reset()
    assert refused(restarts.check) is None
    assert restarts.snapshot() == BreakerSnapshot(state="closed", failures=0, failures_max=3)


@given(
    st.lists(st.one_of(st.sampled_from(["death", "completed"]), st.floats(0, 200)), max_size=60),
    st.floats(0, 1, exclude_max=True),
)
def test_a_budget_never_delays_the_first_deaths_and_never_shuts_out_for_good(
    happenings: list[str | float], jitter: float
) -> None:
    clock = Clock()
    restarts = budget(clock, lambda: jitter)
    since_completed = 0
    for happening in happenings:
        if happening == "death":
            restarts.note_death()
            since_completed += 1
        elif happening == "completed":
            restarts.note_completed()
            since_completed = 0
        else:
            clock.now += float(happening)
        seen, error = restarts.snapshot(), refused(restarts.check)
        assert (seen.state == "open") == (error is not None) == (seen.retry_after_s is not None)
        assert seen.failures <= min(since_completed, 4)
        if since_completed <= 3:
            assert seen.state == "closed"
        if error is not None:
            assert 0 < error.retry_after_s <= 60
            later = clock.now + error.retry_after_s + 1e-6
            now, clock.now = clock.now, later
            assert restarts.snapshot().state == "half_open"
            assert refused(restarts.check) is None
            clock.now = now


# --- the start breaker ---


class World:
    """What starts depend on; it changes when somebody mends something."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> object:
        return self.looks


def breaker(clock: Clock, look: Callable[[], object] = lambda: None) -> StartBreaker:
    return StartBreaker(STARTS, clock, whole, look, start_timeout_s=60)


DIED = WorkerStartError("the worker exited with status 3", step="open", stderr_tail=("Ada's secret",))
UNUSABLE = WorkerUnusableError("there is no interpreter: correct worker_python", step="launch")
LATE = WorkerStartTimeoutError("not within timeouts.start_s", step="hello")
FULL = NoCapacityError("no room for another worker", step="launch")


def start(starts: StartBreaker, ending: BaseException | None, conversation_id: str | None = None) -> None:
    """Have a start end like this; what refuses it is raised instead."""
    if ending is None:
        with starts.start(conversation_id):
            return
    with pytest.raises(type(ending)) as caught, starts.start(conversation_id):
        raise ending
    if caught.value is not ending:
        raise caught.value


@contextlib.contextmanager
def while_it_runs(starts: StartBreaker, name: str, ending: BaseException) -> Iterator[None]:
    """Have a start run during the block, and then end like this."""
    with contextlib.suppress(type(ending)), starts.start(name):
        yield
        raise ending


def fail_all(starts: StartBreaker, *names: str, ending: BaseException = DIED) -> None:
    for name in names:
        start(starts, ending, name)


def test_it_opens_after_so_many_failed_starts_in_a_row(clock: Clock) -> None:
    starts = breaker(clock)
    fail_all(starts, "a", "b")
    start(starts, None, "c")
    fail_all(starts, "a", "b")
    assert starts.snapshot() == BreakerSnapshot(state="closed", failures=2, failures_max=3)
    start(starts, LATE, "c")
    error = refused(starts.check, "d")
    assert type(error) is PoolUnavailableError
    assert (error.step, error.retry_after_s, error.retryable, error.conversation_id) == ("hello", 10, True, "d")
    assert "not within timeouts.start_s" in str(error)
    assert starts.snapshot() == BreakerSnapshot(
        state="open", failures=3, failures_max=3, retry_after_s=10, last_error="not within timeouts.start_s"
    )


def test_a_start_that_shows_that_none_can_succeed_opens_it_at_once(clock: Clock) -> None:
    starts = breaker(clock)
    start(starts, UNUSABLE, "a")
    for name in ("a", "b", None):
        error = refused(starts.check, name)
        assert type(error) is PoolUnusableError
        assert isinstance(error, WorkerUnusableError)
        assert isinstance(error, PoolUnavailableError)
        assert (error.step, error.retry_after_s, error.retryable) == ("launch", 10, False)
        assert "correct worker_python" in str(error)
        with pytest.raises(PoolUnusableError), starts.start(name):
            pytest.fail("it was let in")


def test_what_one_worker_wrote_to_its_stderr_is_told_to_no_other_conversation(clock: Clock) -> None:
    starts = breaker(clock)
    assert "Ada's secret" in str(DIED)
    fail_all(starts, "ada", "b", "c")
    error = refused(starts.check, "bob")
    assert "exited with status 3" in str(error)
    assert "Ada" not in str(error) + repr(vars(error)) + repr(starts.snapshot())


@pytest.mark.parametrize(
    "ending",
    [FULL, StoreError("no answer"), asyncio.CancelledError(), GeneratorExit(), KeyError("bug")],
    ids=lambda ending: type(ending).__name__,
)
def test_what_says_nothing_of_workers_neither_opens_nor_closes_it(clock: Clock, ending: BaseException) -> None:
    starts = breaker(clock)
    for _ in range(9):
        start(starts, ending, "a")
    assert starts.snapshot() == BreakerSnapshot(state="closed", failures=0, failures_max=3)
    fail_all(starts, "a", "b")
    start(starts, ending, "c")
    assert starts.snapshot().failures == 2


def test_one_probe_is_let_in_and_the_others_still_fail_fast(clock: Clock) -> None:
    starts = breaker(clock)
    fail_all(starts, *"abc")
    clock.now += 9.999
    assert refused(starts.check, "a") is not None
    clock.now += 0.001
    assert refused(starts.check, "b") is None
    with starts.start("b"):
        assert starts.snapshot().state == "half_open"
        for name in "abcd":
            assert refused(starts.check, name).retry_after_s == 10
            with pytest.raises(PoolUnavailableError), starts.start(name):
                pytest.fail("it was let in")
        assert starts.snapshot().state == "half_open"
    assert starts.snapshot() == BreakerSnapshot(state="closed", failures=0, failures_max=3)
    assert refused(starts.check, "a") is None


def test_each_probe_that_fails_doubles_the_wait_up_to_its_limit(clock: Clock) -> None:
    starts = breaker(clock)
    fail_all(starts, *"abc")
    waits = []
    for name in "abcdef":
        waits.append(refused(starts.check, "z").retry_after_s)
        clock.now += waits[-1]
        assert starts.snapshot().retry_after_s is None
        start(starts, DIED, name)
    assert waits == [10, 20, 40, 80, 120, 120]
    assert starts.snapshot().failures == 9
    starts.reset()
    fail_all(starts, *"abc")
    assert refused(starts.check, "z").retry_after_s == 10


@pytest.mark.parametrize("ending", [asyncio.CancelledError(), FULL, StoreError("no answer")], ids=repr)
def test_a_probe_that_was_cancelled_gives_the_next_one_its_place(clock: Clock, ending: BaseException) -> None:
    starts = breaker(clock)
    fail_all(starts, *"abc")
    clock.now += 10
    start(starts, ending, "a")
    assert starts.snapshot().state == "open"
    assert refused(starts.check, "b") is None
    start(starts, DIED, "b")
    assert refused(starts.check, "b").retry_after_s == 20


def test_any_success_closes_it_also_of_a_start_from_before(clock: Clock) -> None:
    starts = breaker(clock)
    with starts.start("early"):
        fail_all(starts, *"abc")
        assert starts.snapshot().state == "open"
    assert starts.snapshot().state == "closed"


def test_failures_of_starts_from_before_it_opened_do_not_move_the_probe(clock: Clock) -> None:
    starts = breaker(clock)
    with while_it_runs(starts, "early", DIED):
        fail_all(starts, *"abc")
        clock.now += 4
    assert refused(starts.check, "d").retry_after_s == 6
    assert starts.snapshot().failures == 4


def test_a_start_from_before_that_shows_why_none_can_succeed_is_what_is_told(clock: Clock) -> None:
    starts = breaker(clock)
    with while_it_runs(starts, "early", UNUSABLE):
        fail_all(starts, *"abc")
        clock.now += 4
    error = refused(starts.check, "d")
    assert (type(error), error.retry_after_s) == (PoolUnusableError, 6)


def test_a_start_from_before_that_failed_somehow_hides_no_remedy(clock: Clock) -> None:
    starts = breaker(clock)
    with while_it_runs(starts, "early", DIED):
        start(starts, UNUSABLE, "a")
    assert type(refused(starts.check, "d")) is PoolUnusableError
    assert starts.snapshot().last_error == UNUSABLE.what


def test_what_has_been_mended_is_tried_at_once(clock: Clock) -> None:
    world = World()
    starts = breaker(clock, world)
    start(starts, UNUSABLE, "a")
    assert refused(starts.check, "a") is not None
    world.looks += 1
    assert refused(starts.check, "a") is None
    with starts.start("a"):
        assert type(refused(starts.check, "b")) is PoolUnusableError  # one at a time, also then
    assert refused(starts.check, "b") is None


def test_what_was_mended_while_the_start_still_ran_is_tried_at_once(clock: Clock) -> None:
    world = World()
    starts = breaker(clock, world)
    with while_it_runs(starts, "a", UNUSABLE):
        world.looks += 1
    assert refused(starts.check, "a") is None


def test_what_has_been_changed_and_does_not_work_either_is_not_tried_again_at_once(clock: Clock) -> None:
    world = World()
    starts = breaker(clock, world)
    start(starts, UNUSABLE, "a")
    world.looks += 1
    start(starts, UNUSABLE, "a")
    assert refused(starts.check, "a").retry_after_s == 20


def test_the_failures_of_one_conversation_shut_out_that_one_only(clock: Clock) -> None:
    starts = breaker(clock)
    fail_all(starts, "bad", "bad", "bad")
    assert refused(starts.check, "bad").retry_after_s == 10
    with starts.start("good"):  # an ordinary start and no probe
        assert refused(starts.check, "other") is None
        assert starts.snapshot().state == "open"
        fail_all(starts, "other")
        assert refused(starts.check, "third") is not None  # so it is not one conversation's fault
    assert starts.snapshot().state == "closed"


def test_failures_from_before_a_success_make_nobody_else_s_fault_of_one_conversation_s(clock: Clock) -> None:
    starts = breaker(clock)
    fail_all(starts, "a", "b")
    start(starts, None, "a")
    fail_all(starts, "bad", "bad", "bad")
    assert refused(starts.check, "bad") is not None
    assert refused(starts.check, "good") is None


def test_a_probe_of_one_conversation_that_fails_still_shuts_out_that_one_only(clock: Clock) -> None:
    starts = breaker(clock)
    fail_all(starts, "bad", "bad", "bad")
    clock.now += 10
    with while_it_runs(starts, "bad", DIED):
        assert starts.snapshot().state == "half_open"
        assert refused(starts.check, "good") is None
    assert refused(starts.check, "bad").retry_after_s == 20
    start(starts, None, "good")
    assert refused(starts.check, "bad") is None


def test_a_breaker_can_be_reset_from_outside_also_while_a_probe_runs(clock: Clock) -> None:
    starts = breaker(clock)
    start(starts, UNUSABLE, "a")
    clock.now += 10
    with while_it_runs(starts, "a", DIED):
        starts.reset()
        assert starts.snapshot() == BreakerSnapshot(state="closed", failures=0, failures_max=3)
        with starts.start("b"):
            pass
    assert starts.snapshot() == BreakerSnapshot(state="closed", failures=1, failures_max=3)


def test_no_failure_is_kept_with_its_traceback(clock: Clock) -> None:
    starts = breaker(clock)
    start(starts, UNUSABLE, "a")
    assert not any(isinstance(value, BaseException) for value in vars(starts).values())
    assert "Error" not in repr(starts._opened_by)


ENDS = {"died": DIED, "unusable": UNUSABLE, "full": FULL, "cancelled": asyncio.CancelledError(), "fine": None}


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("begin"), st.sampled_from("abc")),
            st.tuples(st.just("end"), st.sampled_from(sorted(ENDS))),
            st.tuples(st.just("time"), st.floats(0, 130)),
            st.tuples(st.just("mend"), st.none()),
        ),
        max_size=50,
    )
)
def test_at_most_one_probe_runs_and_there_is_always_a_way_out(happenings: list[tuple[str, Any]]) -> None:
    clock, world = Clock(), World()
    starts = breaker(clock, world)
    running: list[tuple[Any, bool]] = []
    """Starts that run, and whether each is a probe: let in while nobody else of that kind would be."""
    for what, value in happenings:
        match what:
            case "time":
                clock.now += value
            case "mend":
                world.looks += 1
            case "begin":
                before, error = starts.state, refused(starts.check, value)
                entered = starts.start(value)
                if error is not None:
                    with pytest.raises(type(error)):
                        entered.__enter__()
                else:
                    entered.__enter__()
                    running.append((entered, starts.state == "half_open" != before))
            case "end" if running:
                entered, _ = running.pop(0)
                ending = ENDS[value]
                if ending is None:
                    entered.__exit__(None, None, None)
                    assert starts.state == "closed"
                    running = [(each, False) for each, _ in running]  # the probe, if any, is one start of many now
                else:
                    assert not entered.__exit__(type(ending), ending, None)
        probes = sum(is_probe for _, is_probe in running)
        assert probes == (starts.state == "half_open")
        error = refused(starts.check, "a")
        if error is not None:
            assert 0 < error.retry_after_s <= 120
            if not probes:
                now, clock.now = clock.now, clock.now + error.retry_after_s + 1e-6
                assert refused(starts.check, "a") is None
                clock.now = now
        seen = starts.snapshot()
        assert seen.state == starts.state
        assert (seen.last_error is None) == (seen.state == "closed")

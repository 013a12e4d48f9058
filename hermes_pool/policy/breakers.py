"""Circuit breakers: restarts of one session, and starts of the entire pool.

Both are pure policies. They are told what happened, and answer whether a worker may be started. They take a clock
(monotonic, in seconds) and a ``random`` (from 0 to 1), and belong to one event loop. Neither blocks for good: each
allows another start by itself after a while. A success or ``reset()`` closes it, and ``snapshot()`` shows its state.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hermes_pool.errors import (
    NoCapacityError,
    PoolUnavailableError,
    PoolUnusableError,
    RestartBackoffError,
    WorkerStartError,
    WorkerUnusableError,
)
from hermes_pool.settings import BACKOFF_MAX_S, PROBE_MAX_S, RestartPolicy, StartPolicy
from hermes_pool.snapshot import BreakerSnapshot, BreakerState

_DOUBLINGS_MAX = 60
"""Limits the exponent: the delay has long reached its maximum, and a float overflows after a thousand doublings."""


def backoff_s(initial_s: float, max_s: float, previous: int, random: Callable[[], float]) -> float:
    """Return a delay in seconds: ``initial_s``, doubled for each previous failure, up to ``max_s``.

    ``random`` picks between half the delay and all of it, so that callers that failed together do not retry together.
    """
    full_s = min(max_s, initial_s * 2.0 ** min(previous, _DOUBLINGS_MAX))
    return full_s * (0.5 + 0.5 * random())


# --- per session ------------------------------------------------------------------------------------------------------


class RestartBudget:
    """Limits how often the workers of one session may die: ``deaths_in_window_max`` in ``window_s``.

    One death more starts a back-off, in which no worker is started and a message that needs one is refused. It lasts
    ``backoff_s``, and twice as long each further time, up to ``BACKOFF_MAX_S``. Then the budget is half open: a
    completed turn resets it, and another death starts the next back-off. Time alone shortens no back-off.

    There is no limit on starts while it is half open, because a conversation has one turn at a time. A start that
    shows nothing, because it was cancelled for example, need not be reported.
    """

    def __init__(
        self,
        policy: RestartPolicy,
        clock: Callable[[], float],
        random: Callable[[], float],
        *,
        conversation_id: str | None = None,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._random = random
        self._conversation_id = conversation_id
        self._deaths: deque[float] = deque(maxlen=policy.deaths_in_window_max + 1)
        self._backoffs = 0
        self._retry_at: float | None = None
        """When the back-off ends; stays set until a turn is completed."""

    @property
    def state(self) -> BreakerState:
        """Return the state at this moment."""
        if self._retry_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._retry_at else BreakerState.HALF_OPEN

    def check(self) -> None:
        """Raise ``RestartBackoffError``, with the remaining time, while no worker may be started."""
        retry_after_s = self._retry_after_s()
        if retry_after_s is not None:
            raise RestartBackoffError(
                f"its workers keep dying ({len(self._deaths)} deaths without a completed turn in between), so none "
                f"is started for another {retry_after_s:.1f} s: send the message again after that",
                retry_after_s=retry_after_s,
                conversation_id=self._conversation_id,
            )

    def note_death(self) -> None:
        """Count a worker that died, or failed to get ready, although the pool did not want it to."""
        state, now = self.state, self._clock()
        self._deaths.append(now)
        self._drop_old_deaths()
        too_many = len(self._deaths) > self._policy.deaths_in_window_max
        if state is BreakerState.HALF_OPEN or (state is BreakerState.CLOSED and too_many):
            self._retry_at = now + backoff_s(self._policy.backoff_s, BACKOFF_MAX_S, self._backoffs, self._random)
            self._backoffs += 1

    def note_completed(self) -> None:
        """Reset the budget: a turn has ended with a reply, so the session works."""
        if self._deaths or self._retry_at is not None:
            self.reset()

    def reset(self) -> None:
        """Forget all deaths and allow the next message."""
        self._deaths.clear()
        self._backoffs = 0
        self._retry_at = None

    def snapshot(self) -> BreakerSnapshot:
        """Return what is known at this moment."""
        self._drop_old_deaths()
        return BreakerSnapshot(
            state=self.state.value,
            failures=len(self._deaths),
            failures_max=self._policy.deaths_in_window_max,
            retry_after_s=self._retry_after_s(),
        )

    def _retry_after_s(self) -> float | None:
        if self._retry_at is None:
            return None
        left_s = self._retry_at - self._clock()
        return left_s if left_s > 0 else None

    def _drop_old_deaths(self) -> None:
        oldest = self._clock() - self._policy.window_s
        while self._deaths and self._deaths[0] <= oldest:
            self._deaths.popleft()


# --- for the pool -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class _Start:
    """A start that was admitted."""

    conversation_id: str | None
    dependencies: object
    """The state of its dependencies when it began."""


@dataclass(frozen=True, slots=True)
class _Failure:
    what: str
    step: str
    unusable: bool
    dependencies: object


class StartBreaker:
    """Refuses starts at once while no worker can be started. There is one per pool.

    It opens after ``failures_max`` failed starts in a row, or after a single ``WorkerUnusableError``. After ``probe_s``
    one start is admitted as a probe, while others are still refused. Each failed probe doubles the wait, up to
    ``PROBE_MAX_S``. The success of any start closes the breaker.

    ``dependencies`` returns what starts depend on, as far as that is cheap to see (stamps of files, for example;
    compared with ``==``). If it differs from what the failed start began with, the cause may be fixed, and the probe is
    admitted at once.

    While all failures belong to one conversation, only that one is refused: its stored state may be what no worker can
    open. Errors other than ``WorkerStartError`` (a cancelled start, an unresponsive database) say nothing about
    workers. Neither does ``NoCapacityError``, which fails fast and passes by itself. A probe that ends in such an error
    does not count.
    """

    def __init__(
        self,
        policy: StartPolicy,
        clock: Callable[[], float],
        random: Callable[[], float],
        dependencies: Callable[[], object] = lambda: None,
        *,
        start_timeout_s: float,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._random = random
        self._dependencies = dependencies
        self._start_timeout_s = start_timeout_s
        self._failures = 0
        self._suspects: set[str | None] = set()
        """The conversations of the failures in a row. Two are enough to know that it is not only one."""
        self._opened_by: _Failure | None = None
        self._probe_at = 0.0
        self._probe: _Start | None = None
        self._probes_failed = 0

    @property
    def state(self) -> BreakerState:
        """Return the state at this moment. It is half open while a probe runs."""
        if self._opened_by is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._probe is None else BreakerState.HALF_OPEN

    def check(self, conversation_id: str | None = None) -> None:
        """Raise what ``start`` would raise, for a caller with work to do first. ``None``: for no conversation."""
        if (failure := self._refused_by(conversation_id)) is not None:
            raise self._refusal(failure, conversation_id)

    @contextmanager
    def start(self, conversation_id: str | None = None) -> Iterator[None]:
        """Admit a start, and record its outcome when the ``with`` block ends.

        Raises ``PoolUnavailableError`` if it is refused, or its subclass ``PoolUnusableError`` if something has to be
        fixed first. Both give the reason, and the seconds until the next probe.
        """
        start = self._admit(conversation_id)
        try:
            yield
        except (NoCapacityError, PoolUnavailableError):
            self._withdraw(start)
            raise
        except WorkerStartError as error:
            self._failed(start, error)
            raise
        except BaseException:
            self._withdraw(start)
            raise
        else:
            self.reset()

    def reset(self, conversation_id: str | None = None) -> None:
        """Close the breaker, so that the next start is admitted. A start that is running counts like any other.

        With a ``conversation_id``, do so only if the breaker is open for that conversation alone.
        """
        if conversation_id is not None and self._suspects != {conversation_id}:
            return
        self._failures = 0
        self._suspects.clear()
        self._opened_by = self._probe = None
        self._probes_failed = 0

    def snapshot(self) -> BreakerSnapshot:
        """Return what is known at this moment."""
        failure = self._opened_by
        return BreakerSnapshot(
            state=self.state.value,
            failures=self._failures,
            failures_max=self._policy.failures_max,
            retry_after_s=None if failure is None else self._retry_after_s() or None,
            last_error=None if failure is None else self._scope(failure) + failure.what,
        )

    def _scope(self, failure: _Failure) -> str:
        """Return a prefix that names the conversation, if only one is refused."""
        if failure.unusable or len(self._suspects) != 1:
            return ""
        return f"only of conversation {next(iter(self._suspects))!r}: "

    def _refused_by(self, conversation_id: str | None) -> _Failure | None:
        """Return the failure for which a start is refused, or ``None`` if it is admitted."""
        failure = self._opened_by
        if failure is None or not self._concerns(failure, conversation_id):
            return None
        if self._probe is None and (self._clock() >= self._probe_at or self._dependencies() != failure.dependencies):
            return None
        return failure

    def _concerns(self, failure: _Failure, conversation_id: str | None) -> bool:
        return failure.unusable or len(self._suspects) > 1 or conversation_id in self._suspects

    def _admit(self, conversation_id: str | None) -> _Start:
        self.check(conversation_id)
        start = _Start(conversation_id, self._dependencies())
        if self._opened_by is not None and self._concerns(self._opened_by, conversation_id):
            self._probe = start
        return start

    def _withdraw(self, start: _Start) -> None:
        if start is self._probe:
            self._probe = None  # the next start becomes the probe

    def _failed(self, start: _Start, error: WorkerStartError) -> None:
        failure = _Failure(error.what, error.step, isinstance(error, WorkerUnusableError), start.dependencies)
        self._failures += 1
        if len(self._suspects) < 2:
            self._suspects.add(start.conversation_id)
        if start is self._probe:
            self._probe = None
            self._probes_failed += 1
            self._open(failure)
        elif self._opened_by is None:
            if failure.unusable or self._failures >= self._policy.failures_max:
                self._open(failure)
        elif failure.unusable:  # it began before the breaker opened, and its reason is more precise
            self._opened_by = failure

    def _open(self, failure: _Failure) -> None:
        self._opened_by = failure
        self._probe_at = self._clock() + backoff_s(self._policy.probe_s, PROBE_MAX_S, self._probes_failed, self._random)

    def _retry_after_s(self) -> float:
        if self._probe is not None:  # it may end at any moment, but polling for that helps nobody
            return min(self._policy.probe_s, self._start_timeout_s)
        return max(0.0, self._probe_at - self._clock())

    def _refusal(self, failure: _Failure, conversation_id: str | None) -> PoolUnavailableError:
        retry_after_s = self._retry_after_s()
        kind = PoolUnusableError if failure.unusable else PoolUnavailableError
        why = "the last start showed that none can succeed" if failure.unusable else f"{self._failures} starts failed"
        return kind(
            f"no worker is started at present, because {why}; the next start is tried in about "
            f"{retry_after_s:.1f} s, or once this is fixed: {failure.what}",
            step=failure.step,
            retry_after_s=retry_after_s,
            conversation_id=conversation_id,
        )

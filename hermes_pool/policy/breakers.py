"""What is not tried again for now: restarts of a session, a message that kills, starts of a pool that cannot start.

Three policies that act on nothing. They are told what happened and answer whether the next try is let in; they take a
clock (monotonic, in seconds) and a ``random`` (0 to 1), and belong to one event loop. None shuts anybody out for good:
each lets a try in by itself after a while, is cleared by success, shown by ``snapshot()`` and cleared by ``reset()``.
The one exception is a quarantined message, which stays out until it is released; any other message goes through.
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
"""Beyond, a delay is at its limit anyway, and a float would overflow at some thousand."""


def backoff_s(first_s: float, most_s: float, times_before: int, random: Callable[[], float]) -> float:
    """Return a delay in seconds: ``first_s``, doubled for each time before, at most ``most_s``.

    Between half of it and all of it, as ``random`` says, so that those who failed together do not come back together.
    """
    whole_s = min(most_s, first_s * 2.0 ** min(times_before, _DOUBLINGS_MAX))
    return whole_s * (0.5 + 0.5 * random())


# --- per session ------------------------------------------------------------------------------------------------------


class RestartBudget:
    """How often the workers of one session may die (``deaths_in_window_max`` in ``window_s``).

    The death that is one too many begins a back-off: no worker is started in it, and a message that needs one is
    refused. It lasts ``backoff_s``, and twice as long each further time, up to ``BACKOFF_MAX_S``. Then
    it is half open until a turn is completed, which refills everything, or a worker dies, which begins the next
    back-off. Time alone makes no back-off shorter. Nobody counts who is let in half open: a conversation has one turn
    at a time. So a try that shows nothing (it was cancelled, say) needs no word, and the next one is let in.
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
        """When the back-off ends; set until a turn is completed."""

    @property
    def state(self) -> BreakerState:
        """Return the state at this moment."""
        if self._retry_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._retry_at else BreakerState.HALF_OPEN

    def check(self) -> None:
        """Raise ``RestartBackoffError``, which says for how long, while no worker is to be started."""
        retry_after_s = self._retry_after_s()
        if retry_after_s is not None:
            raise RestartBackoffError(
                f"its workers keep dying ({len(self._deaths)} without a completed turn in between), so none is started "
                f"for another {retry_after_s:.1f} s: send it again then",
                retry_after_s=retry_after_s,
                conversation_id=self._conversation_id,
            )

    def note_death(self) -> None:
        """Count a worker that has died, or did not get ready, without anybody's wish."""
        state, now = self.state, self._clock()
        self._deaths.append(now)
        self._forget_old()
        too_many = len(self._deaths) > self._policy.deaths_in_window_max
        if state is BreakerState.HALF_OPEN or (state is BreakerState.CLOSED and too_many):
            self._retry_at = now + backoff_s(self._policy.backoff_s, BACKOFF_MAX_S, self._backoffs, self._random)
            self._backoffs += 1

    def note_completed(self) -> None:
        """Refill: a turn has ended with a reply, so the session works."""
        if self._deaths or self._retry_at is not None:
            self.reset()

    def reset(self) -> None:
        """Forget all deaths and let the next message in."""
        self._deaths.clear()
        self._backoffs = 0
        self._retry_at = None

    def snapshot(self) -> BreakerSnapshot:
        """Return what is known at this moment."""
        self._forget_old()
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

    def _forget_old(self) -> None:
        oldest = self._clock() - self._policy.window_s
        while self._deaths and self._deaths[0] <= oldest:
            self._deaths.popleft()


# --- for the pool -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class _Attempt:
    """A start that was let in."""

    conversation_id: str | None
    ground: object
    """What it stood on when it began."""


@dataclass(frozen=True, slots=True)
class _Failure:
    what: str
    step: str
    unusable: bool
    ground: object


class StartBreaker:
    """Refuses starts at once while no worker can be started; one for a pool.

    It opens after ``failures_max`` failed starts in a row, and at once for a ``WorkerUnusableError``. After
    ``probe_s`` one start is let in as a probe while the others are still refused; each probe that fails doubles
    the wait, up to ``PROBE_MAX_S``. The success of any start closes it.

    ``look`` returns what starts depend on as far as it can be seen at little cost (files and the like, compared with
    ``==``): when that is not what the failed start began with, somebody has mended something and the probe is let in at
    once.

    As long as all failures are of one conversation, they are its own: only that one is refused, for its state may be
    what no worker can open. What is no ``WorkerStartError`` (a cancelled start, a database that does not answer) says
    nothing of workers, nor does ``NoCapacityError``, which passes by itself and is quick to come: a probe that ends so
    has not happened.
    """

    def __init__(
        self,
        policy: StartPolicy,
        clock: Callable[[], float],
        random: Callable[[], float],
        look: Callable[[], object] = lambda: None,
        *,
        start_timeout_s: float,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._random = random
        self._look = look
        self._start_timeout_s = start_timeout_s
        self._failures = 0
        self._suspects: set[str | None] = set()
        """The conversations that the failures in a row are of. More than two need not be told apart."""
        self._opened_by: _Failure | None = None
        self._probe_at = 0.0
        self._probe: _Attempt | None = None
        self._probes_failed = 0

    @property
    def state(self) -> BreakerState:
        """Return the state at this moment; half open is while a probe runs."""
        if self._opened_by is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._probe is None else BreakerState.HALF_OPEN

    def check(self, conversation_id: str | None = None) -> None:
        """Raise what ``start`` would raise, for one who has much to do before. ``None`` is a start for nobody yet."""
        if (failure := self._refused_by(conversation_id)) is not None:
            raise self._refusal(failure, conversation_id)

    @contextmanager
    def start(self, conversation_id: str | None = None) -> Iterator[None]:
        """Let a start in, and take note of how it ends, by what leaves the ``with`` block.

        ``PoolUnavailableError`` where it is not let in, ``PoolUnusableError`` where somebody has to mend something
        first; both say why, and in how many seconds the next probe is let in.
        """
        attempt = self._let_in(conversation_id)
        try:
            yield
        except (NoCapacityError, PoolUnavailableError):
            self._give_back(attempt)
            raise
        except WorkerStartError as error:
            self._failed(attempt, error)
            raise
        except BaseException:
            self._give_back(attempt)
            raise
        else:
            self.reset()

    def reset(self, conversation_id: str | None = None) -> None:
        """Close it: the next start is let in. One that runs now counts as any other.

        With a conversation only where it is open for that one alone.
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
            last_error=None if failure is None else self._whom(failure) + failure.what,
        )

    def _whom(self, failure: _Failure) -> str:
        """Say whom alone it shuts out, if anybody."""
        if failure.unusable or len(self._suspects) != 1:
            return ""
        return f"only of conversation {next(iter(self._suspects))!r}: "

    def _refused_by(self, conversation_id: str | None) -> _Failure | None:
        """Return the failure because of which a start is not let in."""
        failure = self._opened_by
        if failure is None or not self._concerns(failure, conversation_id):
            return None
        if self._probe is None and (self._clock() >= self._probe_at or self._look() != failure.ground):
            return None
        return failure

    def _concerns(self, failure: _Failure, conversation_id: str | None) -> bool:
        return failure.unusable or len(self._suspects) > 1 or conversation_id in self._suspects

    def _let_in(self, conversation_id: str | None) -> _Attempt:
        self.check(conversation_id)
        attempt = _Attempt(conversation_id, self._look())
        if self._opened_by is not None and self._concerns(self._opened_by, conversation_id):
            self._probe = attempt
        return attempt

    def _give_back(self, attempt: _Attempt) -> None:
        if attempt is self._probe:
            self._probe = None  # and its time has still come: the next one is let in

    def _failed(self, attempt: _Attempt, error: WorkerStartError) -> None:
        failure = _Failure(error.what, error.step, isinstance(error, WorkerUnusableError), attempt.ground)
        self._failures += 1
        if len(self._suspects) < 2:
            self._suspects.add(attempt.conversation_id)
        if attempt is self._probe:
            self._probe = None
            self._probes_failed += 1
            self._open(failure)
        elif self._opened_by is None:
            if failure.unusable or self._failures >= self._policy.failures_max:
                self._open(failure)
        elif failure.unusable:  # it had begun before the breaker opened, and knows better why
            self._opened_by = failure

    def _open(self, failure: _Failure) -> None:
        self._opened_by = failure
        self._probe_at = self._clock() + backoff_s(self._policy.probe_s, PROBE_MAX_S, self._probes_failed, self._random)

    def _retry_after_s(self) -> float:
        if self._probe is not None:  # it may end at any moment; nobody gains by asking all the time
            return min(self._policy.probe_s, self._start_timeout_s)
        return max(0.0, self._probe_at - self._clock())

    def _refusal(self, failure: _Failure, conversation_id: str | None) -> PoolUnavailableError:
        retry_after_s = self._retry_after_s()
        kind = PoolUnusableError if failure.unusable else PoolUnavailableError
        why = "the last start showed that none can succeed" if failure.unusable else f"{self._failures} starts failed"
        return kind(
            f"no worker is started at present, since {why}; the next try is in about {retry_after_s:.1f} s, or once "
            f"this is mended: {failure.what}",
            step=failure.step,
            retry_after_s=retry_after_s,
            conversation_id=conversation_id,
        )

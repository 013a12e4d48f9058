"""The public view of pool and sessions: what ``HermesSessionManager`` returns and ``hermes-pool ps`` shows."""

from dataclasses import dataclass
from enum import StrEnum

from hermes_pool_worker.plain import Plain


class BreakerState(StrEnum):
    """Whether a breaker allows attempts."""

    CLOSED = "closed"
    """Every attempt is allowed."""
    OPEN = "open"
    """No attempt is allowed until a time has passed."""
    HALF_OPEN = "half_open"
    """One attempt is allowed: success closes the breaker, failure opens it again for longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakerSnapshot(Plain):
    """A breaker at one moment."""

    state: str
    """A ``BreakerState``."""
    failures: int
    """The failures that count now: deaths in the window, or consecutive failed starts."""
    failures_max: int
    """For restarts, how many are allowed; for starts, how many open the breaker."""
    retry_after_s: float | None = None
    """In how many seconds the next attempt is allowed; ``None`` if one is allowed now."""
    last_error: str | None = None
    """The error that opened it, if known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KillerSnapshot:
    """A message that has killed workers. Its text is not kept anywhere."""

    fingerprint: str
    """Identifies the text, in this process only."""
    deaths: int
    """How many workers it has killed."""
    quarantined: bool
    """Whether it is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSnapshot(Plain):
    """The pool as a whole at one moment."""

    state: str
    """A ``pool_state.PoolState``: ``open``, ``paused``, ``draining``, ``drained`` or ``closed``."""
    workers: int
    """Workers that count towards the limit: running, starting, or not ended yet."""
    workers_max: int
    waiting: int = 0
    """Messages in the queue for a worker."""
    held: int = 0
    """Messages that are held until the pool is resumed."""
    expected_wait_s: float | None = None
    """How long another message would wait for a worker, in seconds, by the latest turns; ``None``: unknown."""
    starts: BreakerSnapshot | None = None
    """Whether workers may be started, or starts are refused since earlier ones failed; and why. ``None`` for a pool
    that was never opened, or a supervisor older than this field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSnapshot(Plain):
    """One session at one moment. Times are in seconds; ``None`` means "there is none" or "unknown"."""

    conversation_id: str
    """Empty for a spare worker."""
    user_id: str | None = None
    session_id: str | None = None
    """The agent's own id of the session (Hermes' ``session_id``)."""
    state: str
    """A ``lifecycle.WorkerState``, or ``spare``. For a stored row, its ``status``: ``healthy``, ``dormant`` or
    ``failed``."""
    health: str = "none"
    """What the operating system reports about the process: ``alive``, ``frozen`` (stopped by a signal), ``dead`` or
    ``unknown``; ``none`` if there should be no process."""
    agent: str = ""
    pid: int | None = None
    create_time: float | None = None
    """When the process was created, in seconds since the epoch. It identifies the process together with the pid."""
    incarnation: int = 0
    """The number of the worker, counted from 1 in this supervisor."""
    uptime_s: float | None = None
    idle_s: float | None = None
    """The time since the last turn ended, or since the worker was ready; ``None`` unless it is idle."""
    verdict: str | None = None
    """What the worker was doing in its turn, by the last sample: a ``liveness.Verdict``."""
    verdict_reason: str | None = None
    """Why, in words."""
    turn_s: float | None = None
    """How long the current turn has been running."""
    rss_bytes: int | None = None
    """Resident memory of the worker and all its descendants."""
    cpu_s: float | None = None
    """CPU time used by the worker and its living descendants."""
    turns: int = 0
    """How many turns have ended with a reply."""
    waiting: int = 0
    """Messages that wait for this conversation to be free."""
    restart_count: int = 0
    last_used_at: str | None = None
    """End of the last turn, ISO 8601 in UTC."""
    last_error: str | None = None
    restart_breaker: str = BreakerState.CLOSED.value
    """A ``BreakerState``: ``open`` while no worker is started, since too many have died; ``half_open`` once that
    time is over, and the next turn decides."""
    retry_after_s: float | None = None
    """In how many seconds a worker may be started again; ``None`` if it may be now."""
    quarantined: tuple[str, ...] = ()
    """Fingerprints of the messages that are refused because they killed too many workers."""
    last_death: str | None = None
    """The ``DeathReport.report_id`` of the last unexpected death, as long as that report is kept."""
    jobs: tuple[str, ...] = ()
    """Names of the agent's open background jobs. They keep an idle worker for ``timeouts.background_s``."""
    host: str | None = None
    supervisor_pid: int | None = None

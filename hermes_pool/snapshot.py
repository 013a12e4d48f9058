"""Pool and sessions as the outside sees them: what ``HermesSessionManager`` tells and ``hermes-pool ps`` shows."""

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """Whether a breaker lets tries in."""

    CLOSED = "closed"
    """All are let in."""
    OPEN = "open"
    """None is, until its time has come."""
    HALF_OPEN = "half_open"
    """One is, and decides: its success closes, its failure opens again for longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakerSnapshot:
    """A breaker at one moment."""

    state: str
    """A ``BreakerState``."""
    failures: int
    """Those that count now: deaths in the window, or failed starts in a row."""
    failures_max: int
    """For restarts the most that are allowed, for starts the number at which the breaker opens."""
    retry_after_s: float | None = None
    """In how many seconds the next try is let in; ``None`` where nobody has to wait."""
    last_error: str | None = None
    """What opened it, where it knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KillerSnapshot:
    """A message that has ended workers. Its text is nowhere kept."""

    fingerprint: str
    """Of the text; a name for it in this process only."""
    deaths: int
    """How many workers have died of it."""
    quarantined: bool
    """Whether it is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSnapshot:
    """The pool as a whole at one moment."""

    state: str
    """A state of ``admission.PoolState``: ``open``, ``paused``, ``draining``, ``drained`` or ``closed``."""
    workers: int
    """Workers that count against the limit: those that run, are being started, or have not ended yet."""
    workers_max: int
    waiting: int = 0
    """Messages in line for a worker."""
    held: int = 0
    """Messages that wait for the pool to be resumed."""
    expected_wait_s: float | None = None
    """How long a further message would wait for a worker, in seconds, by the latest turns; ``None``: not known yet."""
    starts: BreakerSnapshot | None = None
    """Whether workers are started, or refused since the starts before have failed, and why. ``None``: from a pool that
    was never opened, or a supervisor that is older than this field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSnapshot:
    """One session at one moment. Times are in seconds, ``None`` is "there is none" or "cannot be known"."""

    conversation_id: str
    """Empty for a spare worker."""
    user_id: str | None = None
    session_id: str | None = None
    """The agent's own name of the session (Hermes' ``session_id``)."""
    state: str
    """A state of ``lifecycle.State``, or ``spare``; of a stored row its ``status``: ``healthy``, ``dormant``,
    ``failed``."""
    health: str = "none"
    """What the operating system says of the process: ``alive``, ``frozen`` (stopped by a signal), ``dead`` or
    ``unknown``; ``none`` where there should be no process."""
    agent: str = ""
    pid: int | None = None
    create_time: float | None = None
    """Of the process, in seconds since the epoch; with the pid, its identity."""
    incarnation: int = 0
    """The how-manieth worker of the session in this supervisor."""
    uptime_s: float | None = None
    idle_s: float | None = None
    """Since the end of the last turn; ``None`` while a turn runs."""
    verdict: str | None = None
    """What the worker was judged to be doing at the last look, in a turn: a ``verdict.Verdict``."""
    verdict_reason: str | None = None
    """Why, in words."""
    turn_s: float | None = None
    """Since the begin of the turn that runs."""
    rss_bytes: int | None = None
    """Resident memory of the worker and all its descendants."""
    cpu_s: float | None = None
    """CPU time that the worker and its living descendants have used."""
    turns: int = 0
    """Turns that ended with a reply, in this supervisor."""
    waiting: int = 0
    """Callers in line for this conversation."""
    restart_count: int = 0
    last_used_at: str | None = None
    """End of the last turn, ISO 8601 in UTC."""
    last_error: str | None = None
    restart_breaker: str = BreakerState.CLOSED.value
    """A ``breakers.BreakerState``: ``open`` while no worker is started for it, since they died too often;
    ``half_open`` when that time is over, and the next turn decides."""
    retry_after_s: float | None = None
    """In how many seconds a worker is started again; ``None`` where nobody has to wait."""
    quarantined: tuple[str, ...] = ()
    """Fingerprints of the messages that are not sent any more, since they ended too many workers."""
    last_death: str | None = None
    """The report (``DeathReport.report_id``) of the last worker that died unasked, as long as it is kept."""
    jobs: tuple[str, ...] = ()
    """Names of the agent's open jobs in the background, which keep an idle worker for ``timeouts.background_s``."""
    host: str | None = None
    supervisor_pid: int | None = None

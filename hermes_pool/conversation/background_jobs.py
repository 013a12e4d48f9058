"""The background work of an agent after its turn: its open jobs, and how long they may keep the worker."""

from collections.abc import Callable, Iterable

JOBS_MAX = 100
"""How many open jobs of one session are kept at most."""
JOBS_A_TURN_MAX = 1000
"""How many jobs may start between the ends of two turns: each costs log lines and a call of the host's callback."""
_NAMES_SHOWN_MAX = 5
_NAME_CHARS_SHOWN = 80


class BackgroundJobs:
    """The background work of one session. ``clock`` and ``timeout_s`` are in seconds."""

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._jobs: dict[str, str] = {}
        self.restart_clocks()

    def restart_clocks(self) -> None:
        """Restart both clocks: a turn has ended, or the worker has become ready."""
        self.ready_since = self.idle_since = self._clock()
        self._begun = 0

    def still_working(self) -> None:
        """Restart the idle clock, but not the one that limits background work."""
        self.idle_since = self._clock()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the open jobs."""
        return tuple(self._jobs.values())

    @property
    def in_time(self) -> bool:
        """Whether background work, if any, may still go on."""
        return self._clock() - self.ready_since < self._timeout_s

    @property
    def keep_worker(self) -> bool:
        """Whether a job is open that may still go on."""
        return bool(self._jobs) and self.in_time

    def started(self, job_id: str, name: str) -> bool:
        """Add a job; return ``False`` if there are too many."""
        self._begun += 1
        if self._begun > JOBS_A_TURN_MAX or (len(self._jobs) >= JOBS_MAX and job_id not in self._jobs):
            return False
        self._jobs[job_id] = name
        return True

    def finished(self, job_id: str) -> str | None:
        """Remove a job that has ended; return its name, or ``None`` if it was not open."""
        name = self._jobs.pop(job_id, None)
        if name is not None and self.in_time:
            self.still_working()
        return name

    def lost(self) -> tuple[str, ...]:
        """Remove all jobs, since their worker is gone; return their names."""
        names = self.names
        self._jobs.clear()
        return names


def summary_of(names: Iterable[str]) -> str:
    """Return names as text for people: the first few, each shortened."""
    few = list(names)
    more = len(few) - _NAMES_SHOWN_MAX
    few = [name[:_NAME_CHARS_SHOWN] for name in few[:_NAMES_SHOWN_MAX]]
    return ", ".join(few) + (f" and {more} more" if more > 0 else "")

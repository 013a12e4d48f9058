"""What an agent goes on doing when its turn is over: its open jobs, and for how long they may keep its worker."""

from collections.abc import Callable, Iterable

JOBS_MAX = 100
"""Most open jobs of one session that are kept."""
JOBS_A_TURN_MAX = 1000
"""Most jobs that may begin from one turn's end to the next one's: each costs log lines and a call of the owner's."""
_NAMES_TOLD_MAX = 5
_NAME_CHARS_TOLD = 80


class Background:
    """The background work of one session. ``clock`` and ``timeout_s`` are in seconds."""

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._jobs: dict[str, str] = {}
        self.rest()

    def rest(self) -> None:
        """Take note that a turn has ended, or that the worker is ready."""
        self.resting_since = self._clock()
        self._begun = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the open jobs."""
        return tuple(self._jobs.values())

    @property
    def in_time(self) -> bool:
        """Whether work in the background, if there is any, may still go on."""
        return self._clock() - self.resting_since < self._timeout_s

    @property
    def works_on(self) -> bool:
        """Whether a job is open, and may still go on."""
        return bool(self._jobs) and self.in_time

    def started(self, job_id: str, name: str) -> bool:
        """Take note of a job; return whether it is kept: there may be too many."""
        self._begun += 1
        if self._begun > JOBS_A_TURN_MAX or (len(self._jobs) >= JOBS_MAX and job_id not in self._jobs):
            return False
        self._jobs[job_id] = name
        return True

    def finished(self, job_id: str) -> str | None:
        """Take note of a job's end; return its name, or ``None`` where it is not open."""
        return self._jobs.pop(job_id, None)

    def lost(self) -> tuple[str, ...]:
        """Forget all jobs, for their worker is gone; return their names."""
        names = self.names
        self._jobs.clear()
        return names


def told(names: Iterable[str]) -> str:
    """Return names for people: the first few, each of bounded length."""
    few = list(names)
    more = len(few) - _NAMES_TOLD_MAX
    few = [name[:_NAME_CHARS_TOLD] for name in few[:_NAMES_TOLD_MAX]]
    return ", ".join(few) + (f" and {more} more" if more > 0 else "")

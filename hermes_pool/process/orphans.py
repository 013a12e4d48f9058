"""Finds and ends orphans: processes of a supervisor that died together with everything that should have ended them.

While a pool is open, a record in ``state_dir`` names its supervisor. A pool that opens reads the records of the others.
If a supervisor is gone, every process with the marker of its pool is ended, and the record is removed. If it may be
alive, or belongs to another machine or container, nothing is touched.
"""

import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Self

from hermes_pool.system import processes
from hermes_pool.system.processes import IdentityCheck
from hermes_pool_worker import procfs

SWEEP_S = 5.0
"""How long one sweep may take; it leaves the rest to the next pool that opens."""
ROUNDS_MAX = 10
"""How often a sweep repeats its search, since a process that is being ended may still fork."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The supervisor that owns the processes of a pool.

    ``create_time`` is in seconds since the epoch. ``began`` is the start time in ticks since the boot, which setting
    the clock does not change. ``system`` names the scope of the pid: this boot of this machine, and the container.
    """

    pid: int
    create_time: float
    began: int | None
    system: str
    host: str

    @classmethod
    def here(cls) -> Self:
        """Return the owner that this process is."""
        return cls(
            pid=os.getpid(),
            create_time=processes.create_time(os.getpid()) or 0.0,
            began=_began(os.getpid()),
            system=_system(),
            host=socket.gethostname(),
        )

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """Return the owner that a record names, or ``None`` if the record cannot be read."""
        try:
            values: Any = json.loads(file.read_bytes())
            owner = cls(**values)
            wrong = (
                type(owner.pid) is not int
                or type(owner.create_time) is not float
                or not isinstance(owner.began, int | None)
                or type(owner.system) is not str
                or type(owner.host) is not str
            )
        except (OSError, ValueError, TypeError):
            return None
        return None if wrong else owner

    def identify(self) -> IdentityCheck:
        """Return whether the owner still exists."""
        system = _system()
        if self.system != system:
            # The machine has rebooted since, or the record is from another machine or container.
            rebooted = self.host == socket.gethostname() and self.system.split()[0] != system.split()[0]
            return IdentityCheck.GONE if rebooted else IdentityCheck.UNKNOWN
        found = processes.identify(self.pid, self.create_time)
        began = _began(self.pid)
        if found not in (IdentityCheck.CURRENT, IdentityCheck.REPLACED) or self.began is None or began is None:
            return found
        # Setting the clock changes the create time, but not the ticks.
        return IdentityCheck.CURRENT if began == self.began else IdentityCheck.REPLACED


class Orphans:
    """Writes the record of one pool, and sweeps up after others. All methods block; system errors are logged only."""

    def __init__(self, state_dir: Path, pool: str, log: Any) -> None:
        """``pool`` is the prefix of the markers of this pool's processes; records are in ``state_dir / "owners"``."""
        self._folder = state_dir / "owners"
        self._file = self._folder / f"{pool}.json"
        self._log = log

    def record(self) -> None:
        """Record this process as the owner of the pool. Call it before the first process is started."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            scratch = self._file.with_suffix(".new")
            scratch.write_text(json.dumps(asdict(Owner.here())))
            scratch.replace(self._file)
        except OSError as error:
            self._log.warning("owner_not_recorded", error=str(error))

    def forget(self) -> None:
        """Remove the record. Call it once the pool is closed and nothing of it is left."""
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            self._log.warning("owner_record_not_removed", error=str(error))

    def sweep(self) -> dict[str, list[int]]:
        """End the orphans of dead supervisors; return the pids that were ended, by pool."""
        deadline = monotonic() + SWEEP_S
        ended: dict[str, list[int]] = {}
        for file in sorted(self._others()):
            if monotonic() >= deadline:
                break
            owner = Owner.read(file)
            if owner is None or owner.identify() not in (IdentityCheck.GONE, IdentityCheck.REPLACED):
                continue
            pids, clean = _end(partial(processes.find_by_pool, file.stem), deadline)
            if pids:
                ended[file.stem] = pids
                self._log.warning("orphans_ended", pool=file.stem, supervisor_pid=owner.pid, pids=pids)
            if clean:
                _remove(file)
        return ended

    def _others(self) -> list[Path]:
        try:
            return [file for file in self._folder.glob("*.json") if file != self._file]
        except OSError:
            return []


def end_session(leader: int, create_time: float, pool: str) -> list[int]:
    """End what a dead worker has left in the session that it led; return the pids that were ended. Blocks.

    The kernel does not reuse a pid while a session has that id. If the pid belongs to another process now, the session
    is empty.
    """
    if processes.identify(leader, create_time) is not IdentityCheck.GONE:
        return []

    def found() -> list[Any]:
        return [process for process in processes.find_by_pool(pool) if _session(process.pid) == leader != process.pid]

    return _end(found, monotonic() + SWEEP_S)[0]


def _end(find: Callable[[], list[Any]], deadline: float) -> tuple[list[int], bool]:
    """End what ``find`` returns until it returns nothing; return the pids, and whether nothing is left."""
    ended: list[int] = []
    spared = processes.relatives(os.getpid())
    for _ in range(ROUNDS_MAX):
        found = [process for process in find() if process.pid not in spared]
        if not found:
            return ended, True
        if monotonic() >= deadline:
            break
        ended += processes.kill(found, max(0.0, deadline - monotonic()))
    return ended, False


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError:
        return


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _system() -> str:
    """Return a name for this boot of this machine and the container that this process is in."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _began(pid: int) -> int | None:
    """Return the start time of a process in ticks since the boot, or ``None`` if it is unknown. Linux only."""
    fields = procfs.stat(pid)
    return None if fields is None else int(fields[procfs.BEGAN])

"""Finds and ends what a supervisor left that died together with all that should have swept up after it.

Each pool keeps a record of its supervisor in ``state_dir`` while it is open. A pool that opens reads the others': where
the supervisor is gone, every process that carries that pool's marker is ended and the record removed. A supervisor of
which the system does not tell whether it lives, or that belongs to another machine or container, is left alone.
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
"""How long the orphans of others are looked for at most; what remains is found at the next start."""
ROUNDS_MAX = 10
"""How often it is looked again whether a pool has left anything: what is being ended may still fork."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who owns the processes of a pool. ``began`` is the start time in ticks since the boot: no clock can move it.

    ``system`` names what a pid belongs to: this boot of this machine, and the container.
    """

    pid: int
    create_time: float
    began: int | None
    system: str
    host: str

    @classmethod
    def here(cls) -> Self:
        """Return this process."""
        return cls(
            pid=os.getpid(),
            create_time=processes.create_time(os.getpid()) or 0.0,
            began=_began(os.getpid()),
            system=_system(),
            host=socket.gethostname(),
        )

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """Return the owner that a record names, ``None`` where it cannot be read."""
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
        """Say whether it lives."""
        system = _system()
        if self.system != system:
            # This machine was booted since, or the record is another one's, or another container's.
            rebooted = self.host == socket.gethostname() and self.system.split()[0] != system.split()[0]
            return IdentityCheck.GONE if rebooted else IdentityCheck.UNKNOWN
        found = processes.identify(self.pid, self.create_time)
        began = _began(self.pid)
        if found not in (IdentityCheck.CURRENT, IdentityCheck.REPLACED) or self.began is None or began is None:
            return found
        # The create time moves when somebody sets the clock; the ticks do not.
        return IdentityCheck.CURRENT if began == self.began else IdentityCheck.REPLACED


class Orphans:
    """The record of one pool, and its look at those of others. All methods block, and raise nothing for the system."""

    def __init__(self, state_dir: Path, pool: str, log: Any) -> None:
        """Prepare. ``pool`` is what the markers of the pool's processes begin with."""
        self._folder = state_dir / "owners"
        self._file = self._folder / f"{pool}.json"
        self._log = log

    def record(self) -> None:
        """Write down who owns this pool, before its first process is started."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            scratch = self._file.with_suffix(".new")
            scratch.write_text(json.dumps(asdict(Owner.here())))
            scratch.replace(self._file)
        except OSError as error:
            self._log.warning("owner_not_recorded", error=str(error))

    def forget(self) -> None:
        """Remove the record: the pool is closed, and nothing of it is left."""
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            self._log.warning("owner_not_forgotten", error=str(error))

    def sweep(self) -> dict[str, list[int]]:
        """End what dead supervisors have left; return the pids that were ended, by pool."""
        deadline = monotonic() + SWEEP_S
        ended: dict[str, list[int]] = {}
        for file in sorted(self._others()):
            if monotonic() >= deadline:
                break
            owner = Owner.read(file)
            if owner is None or owner.identify() not in (IdentityCheck.GONE, IdentityCheck.REPLACED):
                continue
            pids, clean = _end(partial(processes.of_pool, file.stem), deadline)
            if pids:
                ended[file.stem] = pids
                self._log.warning("leftovers_ended", pool=file.stem, supervisor_pid=owner.pid, pids=pids)
            if clean:
                _remove(file)
        return ended

    def _others(self) -> list[Path]:
        try:
            return [file for file in self._folder.glob("*.json") if file != self._file]
        except OSError:
            return []


def end_session(leader: int, create_time: float, pool: str) -> list[int]:
    """End what a dead worker has left in the session that it led; return the pids. Blocks.

    A pid is not given out again while a session has it; where it is another process's now, the session was empty.
    """
    if processes.identify(leader, create_time) is not IdentityCheck.GONE:
        return []

    def found() -> list[Any]:
        return [process for process in processes.of_pool(pool) if _session(process.pid) == leader != process.pid]

    return _end(found, monotonic() + SWEEP_S)[0]


def _end(find: Callable[[], list[Any]], deadline: float) -> tuple[list[int], bool]:
    """End what is found until nothing is; return the pids, and whether nothing is left."""
    ended: list[int] = []
    spared = processes.own_tree(os.getpid())
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
    """Name the boot of this machine and the container that this process is in."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _began(pid: int) -> int | None:
    """Return the start time of a process in ticks since the boot (Linux)."""
    fields = procfs.stat(pid)
    return None if fields is None else int(fields[procfs.BEGAN])

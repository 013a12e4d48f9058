"""Processes of this machine: which one is meant, and whether it lives. The kernel is asked, and never a clock."""

import contextlib
import json
import os
import select
import socket
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Self

import psutil

from hermes_pool_worker import procfs


class Condition(StrEnum):
    """What the kernel says about a process."""

    ALIVE = "alive"
    STOPPED = "stopped"
    """Stopped by a signal, a debugger or a freezer: it holds what it holds, and does nothing."""
    DEAD = "dead"
    ELSEWHERE = "elsewhere"
    """On another machine, or in a container that this process cannot look into: nothing is known."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A process for as long as the machine is up. Its pid may belong to another one later; all of this does not."""

    pid: int
    began: str
    """When it began: in clock ticks since boot on Linux, elsewhere in seconds since the epoch."""
    boot: str
    """Changes with each boot of the machine; empty where the system does not say."""
    namespace: str
    """Within what its pid counts; empty where the system does not say."""
    host: str
    machine: str

    @classmethod
    def of_this_process(cls) -> Self:
        """Return the identity of the process that asks."""
        pid = os.getpid()
        return cls(pid, _began(pid) or "", *_surroundings())

    @classmethod
    def from_text(cls, text: str) -> Self | None:
        """Return what ``to_text`` wrote; ``None`` if it cannot be understood."""
        with contextlib.suppress(ValueError, TypeError):
            found = cls(**json.loads(text))
            if type(found.pid) is int and all(type(each) is str for each in list(asdict(found).values())[1:]):
                return found
        return None

    def to_text(self) -> str:
        """Return it as text for a database."""
        return json.dumps(asdict(self))

    def condition(self) -> Condition:
        """Ask the kernel. What it does not say for certain counts as alive, or as elsewhere."""
        boot, namespace, host, machine = _surroundings()
        if machine and boot and (self.host, self.machine) == (host, machine) and self.boot not in ("", boot):
            return Condition.DEAD  # this machine was started anew since; one without a name of its own proves nothing
        if (self.boot, self.namespace) != (boot, namespace) or (not boot and self.host != host):
            return Condition.ELSEWHERE
        began = _began(self.pid)
        if began is None:
            return Condition.ALIVE if _exists(self.pid) else Condition.DEAD
        if began != self.began:
            return Condition.DEAD
        return _state(self.pid)


def _began(pid: int) -> str | None:
    """Return when a process began; ``None`` if there is none, or it is a zombie, or cannot be seen."""
    if sys.platform == "linux":
        fields = procfs.stat(pid)
        return None if fields is None or fields[procfs.STATE] in b"ZX" else fields[procfs.BEGAN].decode()
    try:
        return repr(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def _exists(pid: int) -> bool:
    """Whether there is such a process, and it has not ended. ``/proc`` may hide it (``hidepid``), a pidfd does not."""
    if sys.platform == "linux":
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        except OSError:
            return True  # nothing is known for certain
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            return not poll.poll(0)  # it is readable once the process has ended
        finally:
            os.close(descriptor)
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def _state(pid: int) -> Condition:
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return Condition.DEAD
    except psutil.Error:
        return Condition.ALIVE
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return Condition.DEAD
    return Condition.STOPPED if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else Condition.ALIVE


@cache
def _surroundings() -> tuple[str, str, str, str]:
    """Return the boot, the namespace of pids, the host and the machine of this process."""
    boot = namespace = machine = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    with contextlib.suppress(OSError):
        namespace = Path("/proc/self/ns/pid").readlink().name
    with contextlib.suppress(OSError):
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    return boot, namespace, socket.gethostname(), machine

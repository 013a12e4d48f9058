"""Forks workers from one process that has imported everything, and constructed nothing.

It has one thread, looks for that before each fork, and does three things: it forks when it is told to, reaps its
children and says how they ended, and leaves when the supervisor is gone, with all that is below it: it adopts what a
dead worker leaves, and ends it. A fork takes the descriptors that came with the request as its 0, 1 and 2 and goes on
as any worker does: the rest of the worker cannot tell.

Only imports are shared: a constructed agent has threads, locks and open files, of which a fork gets broken copies.
"""

import array
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from hermes_pool_worker import lifeline, memory, process_tree, signals, stdio
from hermes_pool_worker.agent import MissingDependencyError
from hermes_pool_worker.contract import DATAGRAM_BYTES_MAX, EXIT_OK, EXIT_UNUSABLE
from hermes_pool_worker.imports import import_agent
from hermes_pool_worker.wire import (
    Fork,
    Forked,
    FrameDecoder,
    FromZygote,
    NotForked,
    Preload,
    Preloaded,
    Reaped,
    ToWorker,
    ToZygote,
)

DESCRIPTORS = 3
BURY_AFTER_MS = 20
"""How long a dead worker waits until what it has left is looked for: its successor, if it gets one, comes first."""

_NOT_YET_COLLECTED = os.WEXITED | os.WNOHANG | os.WNOWAIT

_decode = msgspec.msgpack.Decoder(ToZygote).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Heritage:
    """What each worker gets from the zygote, worked out once: what a fork does itself costs it copied pages."""

    environment: dict[str, str]
    """The zygote's own."""
    changed: dict[str, str | None]
    """What the imports did to it (Hermes reads its .env while it is imported): they would do it in any worker."""
    modules: frozenset[str]
    """The modules that a worker is born with."""
    lifeline_end: int | None

    def to_change(self, wanted: dict[str, str]) -> dict[str, str | None]:
        """Return what makes the zygote's environment the wanted one, replaced and not merged; ``None``: take out."""
        wanted_at_last: dict[str, str | None] = {**wanted, **self.changed}
        names = self.environment.keys() | wanted_at_last.keys()
        return {
            name: wanted_at_last.get(name) for name in names if wanted_at_last.get(name) != self.environment.get(name)
        }


def run(wire_in: int, wire_out: int, agent_name: str) -> tuple[int, int, frozenset[str]]:
    """Serve fork requests on the socket ``wire_in``; return only in a forked worker.

    What comes back is the worker's wire, to read and to write, and the modules that it was born with.

    The process ends with the supervisor, and with status 78 when the agent cannot be imported.
    """
    os.close(wire_out)  # the socket has both directions
    _call_it("hermes-zygote")
    signals.reset()
    process_tree.adopt_orphans()
    lifeline_end = lifeline.inherited()
    # Only while it imports, and so could miss the end of its socket: afterwards it outlives the supervisor for as long
    # as it takes to end its workers' tools.
    armed = lifeline.arm(lifeline_end) if lifeline_end is not None else None
    control = socket.socket(fileno=wire_in)
    before = dict(os.environ)
    request, _ = _receive(control)
    if not isinstance(request, Preload):
        stdio.leave(EXIT_OK)
    try:
        watched = _preload(agent_name, request)
    except MissingDependencyError as error:
        stdio.leave(EXIT_UNUSABLE, f"hermes-pool worker: {error}")
    FrameDecoder(ToWorker)  # so that no worker has to make its own
    after = dict(os.environ)
    changed = {name: after.get(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    memory.give_back()
    gc.freeze()  # a collection in a fork then leaves the shared pages alone
    lifeline.disarm(armed)
    _send(control, Preloaded(os.getpid(), len(sys.modules), list(watched)))
    return _serve(control, Heritage(after, changed, frozenset(sys.modules), lifeline_end))


def _preload(agent_name: str, request: Preload) -> Iterable[str]:
    """Import the agent, let it load what it wants to share, and import what workers were seen to need."""
    module, _ = import_agent(agent_name)
    preload = getattr(module, "preload", None)
    watched: Iterable[str] = preload(request.options) if preload is not None else ()
    for name in request.modules:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit):  # noqa: BLE001 - a worker that needs it will say so itself
            print(f"hermes-pool zygote: {name} could not be imported beforehand", file=sys.stderr)
    return watched


def _serve(control: socket.socket, heritage: Heritage) -> tuple[int, int, frozenset[str]]:
    wakes, wake = os.pipe()
    for end in (wakes, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wakes, select.POLLIN)
    if heritage.lifeline_end is not None:
        poll.register(heritage.lifeline_end, 0)  # a fork of the host may hold our socket; this it cannot
    numbers: dict[int, int] = {}  # of the requests, by pid
    dead: deque[int] = deque()
    while True:
        ready = poll.poll(BURY_AFTER_MS if dead else None)
        if not ready:
            _bury(dead.popleft(), numbers)
            _report_dead(control, numbers, dead)
        for descriptor, _ in ready:
            if descriptor == wakes:
                with contextlib.suppress(BlockingIOError):
                    os.read(wakes, 4096)
                _report_dead(control, numbers, dead)
                continue
            if descriptor == heritage.lifeline_end:
                _leave_last()
            request, descriptors = _receive(control)
            if not isinstance(request, Fork):
                continue
            to_change = heritage.to_change(request.environment)
            if (worker := _fork(control, request, descriptors, numbers)) is not None:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for own in (wakes, wake, control.detach()):
                    os.close(own)
                return *_become(request, worker, to_change, heritage.lifeline_end), heritage.modules
            for each in descriptors:
                os.close(each)


def _fork(control: socket.socket, request: Fork, descriptors: list[int], numbers: dict[int, int]) -> list[int] | None:
    """Fork; return the worker's descriptors in the worker, and ``None`` here."""
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - no pathlib on the path of a start
    if threads != 1:
        _send(control, NotForked(request.number, f"the zygote has {threads} threads instead of one", retryable=False))
        return None
    gate, gate_keeper = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(gate)
        os.close(gate_keeper)
        _send(control, NotForked(request.number, f"fork failed: {error}", retryable=True))
        return None
    if pid == 0:
        os.close(gate_keeper)
        os.read(gate, 1)  # until the supervisor has been told of this process
        os.close(gate)
        return descriptors
    os.close(gate)
    numbers[pid] = request.number
    pidfd = os.pidfd_open(pid)  # before it can have been reaped, so it is surely this one's
    _send(control, Forked(request.number, pid), [pidfd])
    os.close(pidfd)
    os.close(gate_keeper)
    return None


def _become(
    request: Fork, descriptors: list[int], to_change: dict[str, str | None], lifeline_end: int | None
) -> tuple[int, int]:
    """Turn this fork into a worker like any other: lifeline, session, descriptors, environment, folder."""
    if lifeline_end is not None:
        lifeline.arm(lifeline_end)
        os.close(lifeline_end)
    process_tree.adopt_orphans()
    os.setsid()
    _call_it("hermes-worker")
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    for name, value in to_change.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    try:
        os.chdir(request.cwd)
    except OSError as error:
        stdio.leave(EXIT_UNUSABLE, f"hermes-pool worker: the working folder {request.cwd} cannot be used: {error}")
    return stdio.claim()


def _call_it(name: str) -> None:
    """Give this process a name of its own for ``top`` and ``ps -o comm``: the arguments are the zygote's in all."""
    with contextlib.suppress(OSError):
        comm = os.open("/proc/self/comm", os.O_WRONLY)
        os.write(comm, name.encode())
        os.close(comm)


def _report_dead(control: socket.socket, numbers: dict[int, int], dead: deque[int]) -> None:
    """Tell how workers have ended, and put them on the list of those to bury; collect what else was left here."""
    for pid in tuple(numbers):
        if (ended := os.waitid(os.P_PID, pid, _NOT_YET_COLLECTED)) is not None:
            _report(control, ended, numbers, dead)
    with contextlib.suppress(ChildProcessError):
        while not dead and (ended := os.waitid(os.P_ALL, 0, _NOT_YET_COLLECTED)) is not None:
            if ended.si_pid in numbers:
                _report(control, ended, numbers, dead)
            else:
                os.waitpid(ended.si_pid, 0)


def _report(control: socket.socket, ended: Any, numbers: dict[int, int], dead: deque[int]) -> None:
    returncode = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    _send(control, Reaped(numbers.pop(ended.si_pid), returncode))
    dead.append(ended.si_pid)


def _bury(pid: int, numbers: dict[int, int]) -> None:
    """End what a dead worker has left, and only then give up its pid."""
    process_tree.end_orphans(pid, numbers)
    os.waitpid(pid, 0)


def _receive(control: socket.socket) -> tuple[Any, list[int]]:
    """Return the next request and its descriptors; at the end of the socket, the supervisor is gone: leave."""
    descriptors = array.array("i")
    try:
        data, ancillary, _, _ = control.recvmsg(
            DATAGRAM_BYTES_MAX, socket.CMSG_SPACE(DESCRIPTORS * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionError:
        data, ancillary = b"", []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    if not data:
        _leave_last()
    try:
        return _decode(data), list(descriptors)
    except msgspec.MsgspecError:
        traceback.print_exc()
        return None, list(descriptors)


def _send(control: socket.socket, message: FromZygote, descriptors: Iterable[int] = ()) -> None:
    rights = array.array("i", descriptors)
    try:
        control.sendmsg([_encode(message)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else [])
    except ConnectionError:
        _leave_last()


def _leave_last() -> NoReturn:
    """Leave, since the supervisor is gone, and take along all that is below."""
    process_tree.end_descendants()
    stdio.leave(EXIT_OK)

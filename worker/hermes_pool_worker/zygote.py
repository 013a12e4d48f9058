"""The zygote: a process that has imported everything and constructed nothing, and forks workers. Linux only.

It has a single thread, and checks that before each fork. It forks on request. It reaps its children and reports how
they ended; what a dead worker has left running, it adopts and ends. When the supervisor is gone, it ends everything
below it, then itself. A fork takes the descriptors that came with the request as its 0, 1 and 2, and continues like any
other worker: the rest of the code cannot tell the difference.

Workers share imports only. A constructed agent has threads, locks and open files, and a fork would get broken copies.
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

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
"""How long to wait after a worker's death before looking for what it left: starting its successor comes first."""

_NOT_YET_COLLECTED = os.WEXITED | os.WNOHANG | os.WNOWAIT

_decode: Callable[[bytes], ToZygote] = msgspec.msgpack.Decoder(ToZygote).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Heritage:
    """What each worker inherits from the zygote. Computed once, because each step in a fork costs it memory pages."""

    environment: dict[str, str]
    """The zygote's environment."""
    changed: dict[str, str | None]
    """What the imports changed in it, as they would in any worker (Hermes reads its .env while it is imported)."""
    modules: frozenset[str]
    """The modules that a worker has from the start."""
    lifeline_end: int | None

    def to_change(self, wanted: dict[str, str]) -> dict[str, str | None]:
        """Return the changes that turn the zygote's environment into the wanted one; ``None`` removes a variable."""
        wanted_at_last: dict[str, str | None] = {**wanted, **self.changed}
        names = self.environment.keys() | wanted_at_last.keys()
        return {
            name: wanted_at_last.get(name) for name in names if wanted_at_last.get(name) != self.environment.get(name)
        }


def run(wire_in: int, wire_out: int, agent_name: str) -> tuple[int, int, frozenset[str]]:
    """Serve fork requests on the socket ``wire_in``; return only in a forked worker.

    Return the worker's wire (the descriptors for reading and for writing) and the modules that it has from the start.

    The zygote itself ends with the supervisor, or with status 78 if the agent cannot be imported.
    """
    os.close(wire_out)  # the socket works in both directions
    _set_name("hermes-zygote")
    signals.reset()
    process_tree.adopt_orphans()
    lifeline_end = lifeline.inherited()
    # Only during the imports, when it would not notice the end of its socket. Afterwards it outlives the supervisor for
    # as long as it takes to end what its workers' tools have left.
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
    FrameDecoder(ToWorker)  # builds the decoder, so that no worker has to build its own
    after = dict(os.environ)
    changed = {name: after.get(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    memory.give_back()
    gc.freeze()  # garbage collection in a fork then leaves the shared pages alone
    lifeline.disarm(armed)
    _send(control, Preloaded(os.getpid(), len(sys.modules), list(watched)))
    return _serve(control, Heritage(after, changed, frozenset(sys.modules), lifeline_end))


def _preload(agent_name: str, request: Preload) -> Iterable[str]:
    """Import the agent, let it load what workers can share, and import what earlier workers had to import."""
    module, _ = import_agent(agent_name)
    preload = getattr(module, "preload", None)
    watched: Iterable[str] = preload(request.options) if preload is not None else ()
    for name in request.modules:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit):  # noqa: BLE001 - a worker that needs the module will report it
            print(f"hermes-pool zygote: the module {name} cannot be imported in advance", file=sys.stderr)
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
        poll.register(heritage.lifeline_end, 0)  # a fork of the host may keep the socket open, but not this
    numbers: dict[int, int] = {}  # from the pid of a worker to the number of its request
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
    """Fork. Return the worker's descriptors in the worker, and ``None`` in the zygote."""
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - pathlib would slow down each start
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
        os.read(gate, 1)  # until the supervisor knows of this process
        os.close(gate)
        return descriptors
    os.close(gate)
    numbers[pid] = request.number
    pidfd = os.pidfd_open(pid)  # nothing has reaped it yet, so the pid is certainly its own
    _send(control, Forked(request.number, pid), [pidfd])
    os.close(pidfd)
    os.close(gate_keeper)
    return None


def _become(
    request: Fork, descriptors: list[int], to_change: dict[str, str | None], lifeline_end: int | None
) -> tuple[int, int]:
    """Turn this fork into a worker like any other: lifeline, session, descriptors, environment, working folder."""
    if lifeline_end is not None:
        lifeline.arm(lifeline_end)
        os.close(lifeline_end)
    process_tree.adopt_orphans()
    os.setsid()
    _set_name("hermes-worker")
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


def _set_name(name: str) -> None:
    """Set the name that ``top`` and ``ps -o comm`` show: all forks have the arguments of the zygote."""
    with contextlib.suppress(OSError):
        comm = os.open("/proc/self/comm", os.O_WRONLY)
        os.write(comm, name.encode())
        os.close(comm)


def _report_dead(control: socket.socket, numbers: dict[int, int], dead: deque[int]) -> None:
    """Report how workers have ended, and queue them for ``_bury``; reap whatever else has ended here."""
    for pid in tuple(numbers):
        if (ended := os.waitid(os.P_PID, pid, _NOT_YET_COLLECTED)) is not None:
            _report(control, ended, numbers, dead)
    with contextlib.suppress(ChildProcessError):
        while not dead and (ended := os.waitid(os.P_ALL, 0, _NOT_YET_COLLECTED)) is not None:
            if ended.si_pid in numbers:
                _report(control, ended, numbers, dead)
            else:
                os.waitpid(ended.si_pid, 0)


def _report(control: socket.socket, ended: os.waitid_result, numbers: dict[int, int], dead: deque[int]) -> None:
    returncode = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    _send(control, Reaped(numbers.pop(ended.si_pid), returncode))
    dead.append(ended.si_pid)


def _bury(pid: int, numbers: dict[int, int]) -> None:
    """End what a dead worker has left running, and only then release its pid."""
    process_tree.end_orphans(pid, numbers)
    os.waitpid(pid, 0)


def _receive(control: socket.socket) -> tuple[ToZygote | None, list[int]]:
    """Return the next request (``None`` if it cannot be read) and its descriptors.

    At the end of the socket the supervisor is gone, and this process ends.
    """
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
    """End everything below this process, and the process itself: the supervisor is gone."""
    process_tree.end_descendants()
    stdio.leave(EXIT_OK)

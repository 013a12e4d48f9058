"""Forks workers from one process that has imported everything, and constructed nothing.

It has one thread, looks for that before each fork, and does three things: it forks when it is told to, reaps its
children and says how they ended, and leaves when the supervisor is gone, with all that is below it: it is the guardian
of what its workers' tools have started, and adopts whatever loses its parent. A fork takes the descriptors that came
with the request as its 0, 1 and 2 and goes on as any worker does: the rest of the worker cannot tell.

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
from collections.abc import Iterable
from typing import Any

import msgspec

from hermes_pool_worker import kin, serve, stdio
from hermes_pool_worker.agent import MissingDependencyError
from hermes_pool_worker.wire import Fork, Forked, FromZygote, NotForked, Preload, Preloaded, Reaped, ToZygote

MESSAGE_BYTES_MAX = 1024 * 1024
DESCRIPTORS = 3

_decode = msgspec.msgpack.Decoder(ToZygote).decode
_encode = msgspec.msgpack.Encoder().encode


def run(wire_in: int, wire_out: int, agent_name: str) -> tuple[int, int, frozenset[str]]:
    """Serve fork requests on the socket ``wire_in``; return only in a forked worker.

    What comes back is the worker's wire, to read and to write, and the modules that it was born with.

    The process ends with the supervisor, and with status 78 when the agent cannot be imported.
    """
    os.close(wire_out)  # the socket has both directions
    _call_it("hermes-zygote")
    kin.adopt_orphans()
    control = socket.socket(fileno=wire_in)
    before = dict(os.environ)
    request, _ = _receive(control)
    if not isinstance(request, Preload):
        stdio.leave(serve.EXIT_OK)
    try:
        watched = _preload(agent_name, request)
    except MissingDependencyError as error:
        stdio.leave(serve.EXIT_UNUSABLE, f"hermes-pool worker: {error}")
    names = before.keys() | os.environ.keys()
    changed = {name: os.environ.get(name) for name in names if before.get(name) != os.environ.get(name)}
    gc.collect()
    gc.freeze()  # a collection in a fork then leaves the shared pages alone
    _send(control, Preloaded(os.getpid(), len(sys.modules), list(watched)))
    return _serve(control, changed)


def _preload(agent_name: str, request: Preload) -> Iterable[str]:
    """Import the agent, let it load what it wants to share, and import what workers were seen to need."""
    module, _ = serve.import_agent(agent_name)
    preload = getattr(module, "preload", None)
    watched: Iterable[str] = preload(request.options) if preload is not None else ()
    for name in request.modules:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - a worker that needs it will say so itself
            print(f"hermes-pool zygote: {name} could not be imported beforehand", file=sys.stderr)
    return watched


def _serve(control: socket.socket, changed: dict[str, str | None]) -> tuple[int, int, frozenset[str]]:
    wakes, wake = os.pipe()
    for end in (wakes, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wakes, select.POLLIN)
    numbers: dict[int, int] = {}  # of the requests, by pid
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == wakes:
                with contextlib.suppress(BlockingIOError):
                    os.read(wakes, 4096)
                _reap(control, numbers)
                continue
            request, descriptors = _receive(control)
            if isinstance(request, Fork) and (worker := _fork(control, request, descriptors, numbers)) is not None:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for own in (wakes, wake, control.detach()):
                    os.close(own)
                return *_become(request, worker, changed), frozenset(sys.modules)
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


def _become(request: Fork, descriptors: list[int], changed: dict[str, str | None]) -> tuple[int, int]:
    """Turn this fork into a worker like any other: session, descriptors, environment, folder."""
    os.setsid()
    _call_it("hermes-worker")
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    # Replaced, not merged. What the imports changed (Hermes reads its .env while it is imported) they would have
    # changed in any worker.
    os.environ.clear()
    os.environ.update(request.environment)
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        os.chdir(request.cwd)
    except OSError as error:
        stdio.leave(
            serve.EXIT_UNUSABLE, f"hermes-pool worker: the working folder {request.cwd} cannot be used: {error}"
        )
    return stdio.claim()


def _call_it(name: str) -> None:
    """Give this process a name of its own for ``top`` and ``ps -o comm``: the arguments are the zygote's in all."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:  # noqa: PTH123 - no pathlib here
        file.write(name)


def _reap(control: socket.socket, numbers: dict[int, int]) -> None:
    """Tell how workers have ended, end what they have left in their sessions, and only then give up their pids."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            pid = ended.si_pid
            if pid in numbers:
                returncode = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                _send(control, Reaped(numbers.pop(pid), returncode))
                kin.end_session(pid)
            os.waitpid(pid, 0)


def _receive(control: socket.socket) -> tuple[Any, list[int]]:
    """Return the next request and its descriptors; at the end of the socket, the supervisor is gone: leave."""
    descriptors = array.array("i")
    try:
        data, ancillary, _, _ = control.recvmsg(
            MESSAGE_BYTES_MAX, socket.CMSG_SPACE(DESCRIPTORS * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionError:
        data, ancillary = b"", []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    if not data:
        kin.end_descendants()
        stdio.leave(serve.EXIT_OK)
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
        stdio.leave(serve.EXIT_OK)

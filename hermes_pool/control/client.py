"""The client's side of the control socket: find every supervisor of a folder and ask it."""

import os
import socket
import stat
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hermes_pool_worker import wire

if sys.platform != "win32":
    import fcntl
from hermes_pool.control.messages import FOLDER, ControlError, Request, Response, available, peer_may

QUERY_TIMEOUT_S: Final = 1.5
"""How long ``query`` waits by default, for all supervisors together."""
_CONNECT_AGAIN_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Answer:
    """What one supervisor said: either ``response``, or ``problem`` in words when it does not answer."""

    supervisor_pid: int
    response: Response | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class _Pointer:
    supervisor_pid: int
    host: str
    address: Path


def query(state_dir: Path, request: Request, timeout_s: float = QUERY_TIMEOUT_S) -> list[Answer]:
    """Ask every supervisor of ``state_dir``, all at once; return one ``Answer`` for each, by pid.

    Blocks for at most ``timeout_s`` seconds, whatever the supervisors do. Nothing is created; what dead supervisors
    left behind is removed. ``ControlError`` when the folder is another user's.
    """
    if not available():
        return []
    frame = wire.encode(request)
    deadline = time.monotonic() + timeout_s
    answers: list[Answer] = []

    def ask(pointer: _Pointer) -> None:
        answer = _ask(pointer, frame, deadline)
        if answer is not None:
            answers.append(answer)

    threads = [threading.Thread(target=ask, args=(pointer,), daemon=True) for pointer in _pointers(state_dir / FOLDER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(answers, key=lambda answer: answer.supervisor_pid)


def _pointers(folder: Path) -> list[_Pointer]:
    if sys.platform == "win32":
        return []
    try:
        found = folder.lstat()
        files = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ControlError(
            f"{folder} cannot be read ({error.strerror}): ask as the user that runs the supervisor"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or os.geteuid() not in (found.st_uid, 0):
        raise ControlError(f"{folder} is not a folder of yours: what it says is not to be trusted")
    pointers = []
    for file in files:
        pid, _, rest = file.name.partition("-")
        if pid.isdecimal() and rest.endswith(".lock"):
            # Root sees everybody's, but follows nobody's word on what to delete.
            pointer = _follow(file, int(pid), tidy=found.st_uid == os.geteuid())
            if pointer is not None:
                pointers.append(pointer)
    return pointers


def _follow(file: Path, supervisor_pid: int, *, tidy: bool) -> _Pointer | None:
    """Read a pointer; ``None``, and its traces removed, when the supervisor that left it is dead."""
    if sys.platform == "win32":
        return None
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        host, _, address = os.read(descriptor, 8192).partition(b"\n")
        pointer = _Pointer(supervisor_pid, os.fsdecode(host), Path(os.fsdecode(address)))
        # The owner took its lock before the name appeared, so a lock that can be had means that it is dead.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return pointer
    finally:
        os.close(descriptor)
    if tidy:
        with suppress(OSError):
            if stat.S_ISSOCK(pointer.address.lstat().st_mode):
                pointer.address.unlink()
        with suppress(OSError):
            file.unlink()
    return None


def _ask(pointer: _Pointer, frame: bytearray, deadline: float) -> Answer | None:
    """Return what the supervisor says; ``None`` when it runs on another host that shares the folder."""
    pid = pointer.supervisor_pid
    problem = "does not answer"
    try:
        return Answer(pid, response=_converse(pointer.address, frame, deadline))
    except TimeoutError:
        pass
    except wire.WireError as error:
        problem = f"answers what cannot be read (another version, perhaps): {error}"
    except (FileNotFoundError, ConnectionRefusedError) as error:
        if pointer.host != socket.gethostname():
            return None
        problem = f"does not answer: its socket {pointer.address} is out of order ({error.strerror})"
    except OSError as error:
        problem = f"does not answer ({error.strerror or error})"
    return Answer(pid, problem=problem)


def _converse(address: Path, frame: bytearray, deadline: float) -> Response:
    decoder: wire.FrameDecoder[Response] = wire.FrameDecoder(Response)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        _connect(connection, address, deadline)
        if not peer_may(connection, {os.geteuid(), 0, address.lstat().st_uid}):
            raise PermissionError(None, "another user's process listens there")
        connection.settimeout(_left_s(deadline))
        connection.sendall(frame)
        while True:
            connection.settimeout(_left_s(deadline))
            data = connection.recv(256 * 1024)
            if not data:
                raise ConnectionError(None, "it hung up")
            for response in decoder.feed(data):
                return response
            if decoder.failed is not None:
                raise decoder.failed


def _connect(connection: socket.socket, address: Path, deadline: float) -> None:
    while True:
        connection.settimeout(_left_s(deadline))
        try:
            connection.connect(os.fspath(address))
        except BlockingIOError:
            # The line of callers is full. Unix sockets do not wait for that, whatever their timeout.
            time.sleep(min(_CONNECT_AGAIN_S, _left_s(deadline)))
        else:
            return


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s

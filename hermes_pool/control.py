"""The control socket: how another process of the same user sees and steers a running supervisor.

It speaks the frames of the wire: one request, one response, and the connection is over. To add a request, define its
struct here, name it in ``Request`` (and its answer in ``Response``), and answer it in the supervisor's handler.

How both sides meet: each supervisor keeps one file ``<state_dir>/control/<pid>-<token>.lock``, which names the host and
the socket's path, and on which it holds a lock for as long as it lives. So the place of the socket depends on no
variable that one terminal has and another one has not, a deep ``state_dir`` is no obstacle (the socket then lies in a
short folder of the system's), any number of supervisors can share a ``state_dir``, and whether one is dead is told by
the kernel, which drops the lock with the process, and not guessed from a pid that may be another's by now.
"""

import asyncio
import logging
import os
import secrets
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from hermes_pool.errors import HermesPoolError
from hermes_pool.report import DeathReport
from hermes_pool.snapshot import PoolSnapshot, SessionSnapshot
from hermes_pool.threads import in_thread
from hermes_pool_worker import wire

if sys.platform != "win32":
    import fcntl

REQUEST_BYTES_MAX: Final = 64 * 1024
"""Largest request that a supervisor reads."""
REQUEST_TIMEOUT_S: Final = 5.0
"""How long a client may take to send its request, and again to read the response."""
CONNECTIONS_MAX: Final = 16
"""Most clients at once. A further one takes the place of the one that has dawdled longest over its request."""
ADDRESS_BYTES_MAX: Final = 103
"""Longest path of a Unix socket that every system takes (Linux: 107); it is counted in bytes."""
QUERY_TIMEOUT_S: Final = 1.5
"""How long ``query`` waits by default, for all supervisors together."""

_FOLDER: Final = "control"
_CONNECT_AGAIN_S: Final = 0.02

_log = logging.getLogger(__name__)


class ControlError(HermesPoolError):
    """The control socket cannot be made, or may not be used; the text says which folder, and what to do."""


# --- the messages -----------------------------------------------------------------------------------------------------


class _Request(msgspec.Struct, frozen=True, tag=True):
    """Base of all requests: a map tagged with the type's name, so that fields may be added anywhere."""


class _Response(msgspec.Struct, frozen=True, tag=True):
    """Base of all responses."""


class Ps(_Request, frozen=True):
    """Show all sessions; answered with ``PsReply``."""


class Stop(_Request, frozen=True):
    """Stop one session's worker; answered with ``Done`` or ``Failed``."""

    conversation_id: str
    user_id: str | None = None


class Pause(_Request, frozen=True):
    """Begin no more turns, and wait up to ``deadline_s`` for those that run; answered with ``Done`` or ``Failed``."""

    deadline_s: float = 0.0


class Resume(_Request, frozen=True):
    """Begin turns again; answered with ``Done`` or ``Failed``."""


class Drain(_Request, frozen=True):
    """Finish what has come in within ``deadline_s``, and refuse what is new; answered with ``Done`` or ``Failed``."""

    deadline_s: float


class Resize(_Request, frozen=True):
    """Change the limit of workers; answered with ``Done`` or ``Failed``."""

    workers_max: int


class Deaths(_Request, frozen=True):
    """Show the latest deaths; answered with ``DeathsReply``."""


class Reset(_Request, frozen=True):
    """Let starts in again, or all that a conversation is refused; answered with ``Done`` or ``Failed``."""

    conversation_id: str | None = None
    """``None``: the starts of the pool."""
    user_id: str | None = None


class Release(_Request, frozen=True):
    """Let a quarantined message in again; answered with ``Done``, or ``Failed`` where it is not known."""

    conversation_id: str
    fingerprint: str
    user_id: str | None = None


class PsReply(_Response, frozen=True):
    """One supervisor and its sessions. ``started_at`` is ISO 8601 in UTC, ``version`` that of hermes-pool."""

    sessions: list[SessionSnapshot]
    supervisor_pid: int
    version: str
    started_at: str
    pool: PoolSnapshot | None = None
    """``None`` from a supervisor that is older than this field."""


class DeathsReply(_Response, frozen=True):
    """The deaths that a supervisor remembers, the latest first."""

    reports: list[DeathReport]


class Done(_Response, frozen=True):
    """What was asked for has been done. ``text`` says more, where there is more to say."""

    text: str = ""


class Failed(_Response, frozen=True):
    """What was asked for could not be done, and why."""

    text: str


Request: TypeAlias = Ps | Stop | Pause | Resume | Drain | Resize | Deaths | Reset | Release
Response: TypeAlias = PsReply | DeathsReply | Done | Failed
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


def available() -> bool:
    """Say whether this platform has Unix sockets; without them there is nothing to start and nobody to ask."""
    return sys.platform != "win32" and hasattr(socket, "AF_UNIX")


# --- the supervisor's side --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """What a running server has put into the file system."""

    listener: socket.socket
    address: Path
    pointer: Path
    lock: int
    """Descriptor of ``pointer``; while it is open, the lock says that this supervisor lives."""


class ControlServer:
    """Answers the control requests of one supervisor.

    ``handler`` gets each request and returns its response; an exception out of it becomes ``Failed``. It runs on the
    event loop, in a task of its own per client.
    """

    def __init__(self, state_dir: Path, handler: Handler) -> None:
        self._state_dir = state_dir
        self._handler = handler
        self._place: _Place | None = None
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()
        self._dawdlers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """Clients whose request is not complete yet, the oldest first."""

    async def start(self) -> Path | None:
        """Begin to listen; return the socket's path, or ``None`` where the platform has no such sockets.

        ``ControlError`` when no folder can be used: it is somebody else's, a link, or cannot be written.
        """
        if not available() or self._place is not None:
            return self._place.address if self._place is not None else None
        place = await in_thread(partial(_settle, self._state_dir))
        self._place = place
        try:
            self._server = await asyncio.start_unix_server(self._serve, sock=place.listener)
        except BaseException:
            await self.close()
            raise
        return place.address

    async def close(self) -> None:
        """Remove the socket, and hang up on whoever is connected. May be called twice, and without a start."""
        place, self._place = self._place, None
        server, self._server = self._server, None
        if place is not None:
            # First the pointer: from here on nobody finds the way, and so nobody sees the door being taken down.
            for path in (place.pointer, place.address):
                with suppress(OSError):
                    path.unlink()
            os.close(place.lock)
        if server is not None:
            server.close()
        if place is not None:
            # After the server, which takes it out of the loop first.
            place.listener.close()
        clients = [client for client in self._clients if client is not asyncio.current_task()]
        for client in clients:
            client.cancel()
        if clients:
            await asyncio.wait(clients)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or self._place is None:
            writer.transport.abort()
            return
        self._clients.add(task)
        try:
            if _peer_may(writer.get_extra_info("socket"), {os.geteuid(), 0}) and self._has_room():
                self._dawdlers[task] = writer
                await self._converse(reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):
            # The client is gone, or does not read: its own affair. Or the server closes: this task is nobody's else,
            # and asyncio's streams would report one that ends cancelled as a fault (Python 3.11).
            pass
        finally:
            self._dawdlers.pop(task, None)
            self._clients.discard(task)
            # Nothing is left to be sent, and a client that never reads must not keep the connection.
            writer.transport.abort()

    def _has_room(self) -> bool:
        if len(self._clients) <= CONNECTIONS_MAX:
            return True
        if not self._dawdlers:
            return False
        self._dawdlers.pop(next(iter(self._dawdlers))).transport.abort()
        return True

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # With a limit of 0, drain() returns when everything has left for the kernel.
        writer.transport.set_write_buffer_limits(0)
        request = await _read_request(reader)
        self._dawdlers.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
        if request is None:
            return
        frame = await self._answer(request)
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            writer.write(frame)
            await writer.drain()

    async def _answer(self, request: Request | Failed) -> bytearray:
        if isinstance(request, Failed):
            return wire.encode(request)
        try:
            return wire.encode(await self._handler(request))
        except HermesPoolError as error:
            return wire.encode(Failed(str(error)))
        except Exception as error:  # noqa: BLE001 - a bug of ours, which must reach the person who asked
            _log.exception("control request failed")
            return wire.encode(Failed(f"the supervisor could not answer: {type(error).__name__}: {error}"))


async def _read_request(reader: asyncio.StreamReader) -> Request | Failed | None:
    """Return the request; ``Failed`` for bytes that are none, and ``None`` when the client went away before its end."""
    decoder: wire.FrameDecoder[Request] = wire.FrameDecoder(Request, REQUEST_BYTES_MAX)
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        while data := await reader.read(REQUEST_BYTES_MAX):
            for request in decoder.feed(data):
                return request
            if decoder.failed is not None:
                return Failed(f"this supervisor does not understand the request: {decoder.failed}")
    return None


def _settle(state_dir: Path) -> _Place:
    """Bind a socket, and leave the pointer that leads to it."""
    if sys.platform == "win32":
        raise NotImplementedError
    home = state_dir / _FOLDER
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _claim(home)
    except OSError as error:
        raise ControlError(f"the control folder {home} cannot be made: {error.strerror or error}") from error
    name = f"{os.getpid()}-{secrets.token_hex(4)}"
    listener, address = _bind(home, f"{name}.sock")
    lock = -1
    try:
        pointer = home / f"{name}.lock"
        fresh = home / f".{name}.lock"
        lock = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # a file system without locks: the socket still works, only its traces stay
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, os.fsencode(socket.gethostname()) + b"\n" + os.fsencode(address))
        fresh.rename(pointer)
    except OSError as error:
        listener.close()
        for path in (address, fresh):
            path.unlink(missing_ok=True)
        if lock >= 0:
            os.close(lock)
        raise ControlError(f"{pointer} cannot be written: {error.strerror or error}") from error
    return _Place(listener, address, pointer, lock)


def _bind(home: Path, name: str) -> tuple[socket.socket, Path]:
    """Listen in the first folder that can take a socket: beside the pointer if the path is short enough for one."""
    reasons = []
    for folder in (home, *_short_folders()):
        address = folder / name
        if len(os.fsencode(address)) + 1 > ADDRESS_BYTES_MAX:
            reasons.append(f"{folder}: the path is too long for a socket")
            continue
        try:
            _claim(folder)
            return _listen(address), address
        except (OSError, ControlError) as error:
            reasons.append(f"{folder}: {error}")
    raise ControlError("no folder can take the control socket; " + "; ".join(reasons))


def _short_folders() -> list[Path]:
    if sys.platform == "win32":
        return []
    own = f"hermes-pool-{os.geteuid()}"
    folders = [Path(tempfile.gettempdir()) / own, Path("/tmp") / own]  # noqa: S108 - claimed and checked before use
    # Not the first choice: the system removes it when the user's last session ends, though a supervisor may live on.
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        folders.append(Path(runtime) / "hermes-pool")
    return [folder for folder in folders if folder.is_absolute()]


def _claim(folder: Path) -> None:
    """Make a folder that only we may enter, or check that the one that is there is such a folder."""
    if sys.platform == "win32":
        return
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ControlError(f"{folder} is no folder of its own (a link, perhaps); remove it, or name another state_dir")
    if found.st_uid != os.geteuid():
        raise ControlError(f"{folder} belongs to another user (uid {found.st_uid}); name another state_dir")
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)


def _listen(address: Path) -> socket.socket:
    """Return a socket that listens on ``address``; the name appears when nobody else may use it and it is answered."""
    fresh = address.with_name(f".{address.name}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # On Linux the file takes over the mode of the socket, so it never has another one. The umask is not touched:
        # it belongs to the whole process, and other threads create files, too.
        with suppress(OSError):
            os.fchmod(listener.fileno(), 0o600)
        listener.bind(os.fspath(fresh))
        fresh.chmod(0o600)
        listener.listen(128)
        listener.setblocking(False)
        fresh.rename(address)
    except BaseException:
        listener.close()
        fresh.unlink(missing_ok=True)
        raise
    return listener


def _peer_may(connection: socket.socket, allowed: set[int]) -> bool:
    """Say whether the process at the other end belongs to one of the allowed users, where the system tells."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    size = struct.calcsize("3i")
    _pid, uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, size))
    return uid in allowed


# --- the client's side ------------------------------------------------------------------------------------------------


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

    threads = [threading.Thread(target=ask, args=(pointer,), daemon=True) for pointer in _pointers(state_dir / _FOLDER)]
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
        if not _peer_may(connection, {os.geteuid(), 0, address.lstat().st_uid}):
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

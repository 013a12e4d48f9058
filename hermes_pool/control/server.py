"""The supervisor's side of the control socket."""

import asyncio
import logging
import os
import secrets
import socket
import stat
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from hermes_pool.errors import HermesPoolError
from hermes_pool.system.threads import in_thread_or_here
from hermes_pool_worker import wire

if sys.platform != "win32":
    import fcntl
from hermes_pool.control.messages import (
    FOLDER,
    REQUEST_BYTES_MAX,
    ControlError,
    Failed,
    Request,
    Response,
    available,
    peer_may,
)

REQUEST_TIMEOUT_S: Final = 5.0
"""How long a client may take to send its request, and again to read the response."""
CONNECTIONS_MAX: Final = 16
"""Most clients at once. A further one takes the place of the one that has dawdled longest over its request."""
ADDRESS_BYTES_MAX: Final = 103
"""Longest path of a Unix socket that every system takes (Linux: 107); it is counted in bytes."""

_log = logging.getLogger(__name__)
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class _Endpoint:
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
        self._endpoint: _Endpoint | None = None
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()
        self._dawdlers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """Clients whose request is not complete yet, the oldest first."""

    async def start(self) -> Path | None:
        """Begin to listen; return the socket's path, or ``None`` where the platform has no such sockets.

        ``ControlError`` when no folder can be used: it is somebody else's, a link, or cannot be written.
        """
        if not available() or self._endpoint is not None:
            return self._endpoint.address if self._endpoint is not None else None
        endpoint = await in_thread_or_here(partial(_settle, self._state_dir))
        self._endpoint = endpoint
        try:
            self._server = await asyncio.start_unix_server(self._serve, sock=endpoint.listener)
        except BaseException:
            await self.close()
            raise
        return endpoint.address

    async def close(self) -> None:
        """Remove the socket, and hang up on whoever is connected. May be called twice, and without a start."""
        endpoint, self._endpoint = self._endpoint, None
        server, self._server = self._server, None
        if endpoint is not None:
            # First the pointer: from here on nobody finds the way, and so nobody sees the door being taken down.
            for path in (endpoint.pointer, endpoint.address):
                with suppress(OSError):
                    path.unlink()
            os.close(endpoint.lock)
        if server is not None:
            server.close()
        if endpoint is not None:
            # After the server, which takes it out of the loop first.
            endpoint.listener.close()
        clients = [client for client in self._clients if client is not asyncio.current_task()]
        for client in clients:
            client.cancel()
        if clients:
            await asyncio.wait(clients)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or self._endpoint is None:
            writer.transport.abort()
            return
        self._clients.add(task)
        try:
            if peer_may(writer.get_extra_info("socket"), {os.geteuid(), 0}) and self._has_room():
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


def _settle(state_dir: Path) -> _Endpoint:
    """Bind a socket, and leave the pointer that leads to it."""
    if sys.platform == "win32":
        raise NotImplementedError
    home = state_dir / FOLDER
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
    return _Endpoint(listener, address, pointer, lock)


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

"""The supervisor's side of the control socket."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from hermes_pool.control.messages import REQUEST_BYTES_MAX, Failed, Request, Response
from hermes_pool.control.socket_folder import Endpoint, is_peer_allowed, publish, unix_sockets_available
from hermes_pool.errors import HermesPoolError
from hermes_pool.system.threads import in_thread_or_here
from hermes_pool_worker import wire

REQUEST_TIMEOUT_S: Final = 5.0
"""How long a client may take to send its request, and again to read the response."""
CONNECTIONS_MAX: Final = 16
"""Most clients at once. One more displaces the client that has been sending its request for longest."""

_log = logging.getLogger(__name__)
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


class ControlServer:
    """Answers the control requests of one supervisor.

    ``handler`` gets each request and returns the response. It runs on the event loop, in one task per client. An
    exception that it raises is sent to the client as ``Failed``.
    """

    def __init__(self, state_dir: Path, handler: Handler) -> None:
        self._state_dir = state_dir
        self._handler = handler
        self._endpoint: Endpoint | None = None
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()
        self._sending: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """Clients whose request is not complete yet, oldest first."""

    async def start(self) -> Path | None:
        """Start listening, and return the socket's path. ``None`` where the platform has no Unix sockets.

        Raises ``ControlError`` if no folder can hold the socket: it is not writable, a link, or another user's.
        """
        if not unix_sockets_available() or self._endpoint is not None:
            return self._endpoint.address if self._endpoint is not None else None
        endpoint = await in_thread_or_here(partial(publish, self._state_dir))
        self._endpoint = endpoint
        try:
            self._server = await asyncio.start_unix_server(self._serve, sock=endpoint.listener)
        except BaseException:
            await self.close()
            raise
        return endpoint.address

    async def close(self) -> None:
        """Remove the socket and disconnect all clients. Does nothing if the server is closed or was never started."""
        endpoint, self._endpoint = self._endpoint, None
        server, self._server = self._server, None
        if endpoint is not None:
            endpoint.unpublish()
        if server is not None:
            server.close()
        if endpoint is not None:
            # After the server, which has to take the listener out of the event loop first.
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
            if is_peer_allowed(writer.get_extra_info("socket"), {os.geteuid(), 0}) and self._make_room():
                self._sending[task] = writer
                await self._exchange(reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):
            # The client is gone, or does not read. Or the server closes: only ``close`` cancels this task, and streams
            # of asyncio would log a cancelled one as an error (Python 3.11).
            pass
        finally:
            self._sending.pop(task, None)
            self._clients.discard(task)
            # The response has been sent or is not wanted, and a client that never reads must not keep the connection.
            writer.transport.abort()

    def _make_room(self) -> bool:
        """Disconnect the slowest sender if there are too many clients. ``False`` if that is not possible."""
        if len(self._clients) <= CONNECTIONS_MAX:
            return True
        if not self._sending:
            return False
        self._sending.pop(next(iter(self._sending))).transport.abort()
        return True

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # With a limit of 0, drain() returns once the kernel has everything.
        writer.transport.set_write_buffer_limits(0)
        request = await _read_request(reader)
        self._sending.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
        if request is None:
            return
        frame = await self._respond(request)
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            writer.write(frame)
            await writer.drain()

    async def _respond(self, request: Request | Failed) -> bytearray:
        if isinstance(request, Failed):
            return wire.encode(request)
        try:
            return wire.encode(await self._handler(request))
        except HermesPoolError as error:
            return wire.encode(Failed(str(error)))
        except Exception as error:  # noqa: BLE001 - a bug of ours, which the client must learn about
            _log.exception("control request failed")
            return wire.encode(
                Failed(f"internal error in the supervisor, see its log: {type(error).__name__}: {error}")
            )


async def _read_request(reader: asyncio.StreamReader) -> Request | Failed | None:
    """Return the request; ``Failed`` if it cannot be read, ``None`` if the client left before it was complete."""
    decoder: wire.FrameDecoder[Request] = wire.FrameDecoder(Request, REQUEST_BYTES_MAX)
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        while data := await reader.read(REQUEST_BYTES_MAX):
            for request in decoder.feed(data):
                return request
            if decoder.failed is not None:
                return Failed(
                    "this supervisor does not understand the request (perhaps its hermes-pool has another version): "
                    f"{decoder.failed}"
                )
    return None

"""One connection between two processes of a pool, as frames in and frames out."""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from hermes_pool.cluster.messages import FRAME_BYTES_MAX
from hermes_pool_worker import wire

T = TypeVar("T")
HIGH_WATER_BYTES = 256 * 1024
"""More than this that the other side has not read yet makes the sender wait."""


class Link(asyncio.Protocol, Generic[T]):
    """Sends and receives frames.

    ``on_made`` is called before anything is read, ``on_frame`` gets each frame, and ``on_lost`` is called once, when
    nothing more comes. What is no frame of these types ends the connection.
    """

    def __init__(self, types: Any) -> None:
        self.on_made: Callable[[], None] = lambda: None
        self.on_frame: Callable[[T], None] = lambda _: None
        self.on_lost: Callable[[], None] = lambda: None
        self.lost = False
        self._decoder: wire.FrameDecoder[T] = wire.FrameDecoder(types, FRAME_BYTES_MAX)
        self._transport: asyncio.Transport | None = None
        self._room: asyncio.Future[None] | None = None

    @property
    def socket(self) -> Any:
        """The socket underneath."""
        return None if self._transport is None else self._transport.get_extra_info("socket")

    def send(self, message: Any) -> None:
        """Send a message; one that cannot be sent any more is dropped. Await ``room`` between many."""
        if self._transport is not None and not self.lost:
            self._transport.write(wire.encode(message, FRAME_BYTES_MAX))

    @property
    def is_full(self) -> bool:
        """Whether the other side reads more slowly than this one sends."""
        return self._room is not None

    async def room(self) -> None:
        """Wait until the other side has read nearly everything, or is gone."""
        if self._room is not None:
            await asyncio.shield(self._room)

    def pause(self) -> None:
        """Read nothing more for now: the other side notices by and by."""
        if self._transport is not None and not self.lost:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._transport is not None and not self.lost:
            self._transport.resume_reading()

    def close(self) -> None:
        """End the connection, without what has not been sent yet."""
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(HIGH_WATER_BYTES)
        self.on_made()

    def data_received(self, data: bytes) -> None:
        """Hand on the frames that are complete now."""
        for frame in self._decoder.feed(data):
            if self.lost:
                return
            self.on_frame(frame)
        if self._decoder.failed is not None:
            self.close()

    def eof_received(self) -> bool:
        """Close: half a connection is of no use."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Tell the owner of the link, once."""
        self.lost = True
        self.resume_writing()
        self.on_lost()

    def pause_writing(self) -> None:
        """Note that the other side lags."""
        if self._room is None:
            self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """Note that it has caught up."""
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

"""The door of a pool: where the messages come in that arrived at another process and belong to this one.

Only processes of the same user get in. Nothing that comes in is sent on: a conversation that this process does not own
is refused with ``ConversationElsewhereError``.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hermes_pool.cluster import messages
from hermes_pool.cluster.link import Link
from hermes_pool.control.socket_folder import Endpoint, is_peer_allowed, publish
from hermes_pool.conversation.active_turn import ActiveTurn
from hermes_pool.conversation.session import Session
from hermes_pool.conversation.turn import Turn
from hermes_pool.errors import HermesPoolError
from hermes_pool.settings import SessionKey
from hermes_pool.system.threads import in_thread_or_here
from hermes_pool_worker import wire

FOLDER = "doors"
CONNECTIONS_MAX = 1024
"""Most connections at once: each carries one turn, watcher or call of another process."""


class Owner(Protocol):
    """What a door needs of its pool."""

    def at_door(self, key: SessionKey) -> Session:
        """Return a conversation that this process answers. Raises ``ConversationElsewhereError`` for any other."""

    async def call(self, call: messages.Call) -> Any:
        """Carry out a call, and return built-in types."""


class Door:
    """Serves the other processes, until it is closed."""

    def __init__(self, state_dir: Path, owner: Owner, log: Any) -> None:
        self._state_dir = state_dir
        self._owner = owner
        self._log = log
        self._endpoint: Endpoint | None = None
        self._server: asyncio.Server | None = None
        self._visits: set[_Visit] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        """Begin to listen, and return the address. Raises ``ControlError`` if no folder can hold the socket."""
        self._endpoint = endpoint = await in_thread_or_here(partial(publish, self._state_dir, FOLDER))
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._arrived, sock=endpoint.listener)
        return str(endpoint.address)

    async def close(self) -> None:
        """Let nobody in any more, and end all connections."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.unpublish()
        if self._server is not None:
            self._server.close()
        if endpoint is not None:
            endpoint.listener.close()
        for visit in list(self._visits):
            visit.link.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _arrived(self) -> Link[messages.Request]:
        link: Link[messages.Request] = Link(messages.Request)
        visit = _Visit(link, self._owner, self._in_background)
        self._visits.add(visit)
        link.on_made = partial(self._check, link)
        link.on_frame = visit.heard
        link.on_lost = partial(self._left, visit)
        return link

    def _check(self, link: Link[messages.Request]) -> None:
        if len(self._visits) > CONNECTIONS_MAX or not is_peer_allowed(link.socket, {os.geteuid(), 0}):
            link.close()

    def _left(self, visit: "_Visit") -> None:
        self._visits.discard(visit)
        visit.left()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("door_failed", error=repr(error), exc_info=error)


class _Visit:
    """One connection from another process: what it is about at the moment."""

    def __init__(
        self,
        link: Link[messages.Request],
        owner: Owner,
        in_background: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
    ) -> None:
        self.link = link
        self._owner = owner
        self._in_background = in_background
        self._session: Session | None = None
        self._turn: ActiveTurn | None = None
        self._has_begun_it = False
        self._work: asyncio.Task[None] | None = None
        self._answers: dict[str, asyncio.Future[str | None]] = {}

    def heard(self, request: messages.Request) -> None:
        """Take a request."""
        match request:
            case messages.Run():
                self._begin(self._run(request))
            case messages.Watch():
                self._begin(self._watch(request))
            case messages.Call():
                self._begin(self._call(request))
            case messages.Cancel():
                if self._turn is not None and self._session is not None:
                    error = None if request.outcome is None else messages.unpacked(request.outcome)
                    self._session.cancel(self._turn, error if isinstance(error, HermesPoolError) else "cancelled")
            case messages.Steer():
                if self._turn is not None and self._session is not None:
                    self._session.steer(self._turn, request.text)
            case messages.AnswerQuestion():
                waiting = self._answers.pop(request.question_id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(request.text)
                elif self._turn is not None and self._session is not None and request.text is not None:
                    self._session.answer(self._turn, request.question_id, request.text)

    def left(self) -> None:
        """Take note that the other process is gone: a turn with a caller is cancelled, as when a caller gives up."""
        turn, goes_on = self._turn, False
        if turn is not None and self._session is not None:
            goes_on = turn.face == "start" or not self._has_begun_it
            if not goes_on:
                self._session.cancel(turn)
        if self._work is not None and not goes_on:
            self._work.cancel()
        for waiting in self._answers.values():
            waiting.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        if self._work is not None:  # one thing at a time
            work.close()
            self.link.close()
            return
        self._work = self._in_background(self._finish(work))

    async def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except HermesPoolError as error:
            self._end(error)
        finally:
            self._work = self._turn = self._session = None

    def _end(self, error: HermesPoolError) -> None:
        self.link.send(messages.Ended(messages.packed(error)))

    # --- a turn ---

    async def _run(self, request: messages.Run) -> None:
        key = SessionKey(request.conversation_id, request.user_id)
        session = self._owner.at_door(key)
        if request.after_death:
            session.take_over(wire.Turn(request.turn_id, 1, request.text))
        turn = session.new_turn(
            request.text,
            request.face,
            turn_id=request.turn_id,
            metadata=request.metadata,
            on_cancel=request.on_cancel,
            on_question=self._ask if request.asks else None,
        )
        turn.is_clients = turn.is_clients and (request.is_clients or request.after_death)
        self._session, self._turn = session, turn
        self._has_begun_it = turn.is_new
        if turn.is_new:
            session.start(turn)
        if request.face != "send":
            await turn.begun()
            if turn.began_at:
                self.link.send(messages.Begun())
            async for event in Turn(session, turn, begun=True):
                self.link.send(messages.Told(event))
                if self.link.is_full:
                    await self.link.room()
        outcome = await turn.settled()
        self._turn = None
        self.link.send(messages.Ended(messages.packed(outcome)))

    async def _ask(self, _key: SessionKey, question: wire.Question) -> str | None:
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._answers[question.question_id] = answer
        self.link.send(messages.Asked(question))
        try:
            return await answer
        finally:
            self._answers.pop(question.question_id, None)

    # --- watching, and single calls ---

    async def _watch(self, request: messages.Watch) -> None:
        session = self._owner.at_door(SessionKey(request.conversation_id, request.user_id))
        async for seq, event in session.log.watch(request.after):
            self.link.send(messages.seen(seq, event))
            if self.link.is_full:
                await self.link.room()

    async def _call(self, request: messages.Call) -> None:
        self.link.send(messages.Result(await self._owner.call(request)))

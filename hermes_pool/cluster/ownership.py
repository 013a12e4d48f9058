"""Which conversations this process answers, and where the others are.

A conversation is claimed with its first message, in the transaction that reads what is stored of it, and given up when
nothing of it is left here: no worker, no watcher, nothing to save. In between the database is not asked. An owner that
the kernel calls dead is buried, and its conversation taken over.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import msgspec
import sqlalchemy as sa

from hermes_pool.cluster import messages
from hermes_pool.cluster.away import Away, Doors
from hermes_pool.cluster.door import Door
from hermes_pool.cluster.lease import Lease, Supervisor
from hermes_pool.cluster.lease_sql import LeaseTables
from hermes_pool.cluster.neighbours import Condition, Identity
from hermes_pool.control.socket_folder import unix_sockets_available
from hermes_pool.conversation.events import ConversationEvent
from hermes_pool.conversation.reply import Reply
from hermes_pool.conversation.session import Session
from hermes_pool.errors import ConversationElsewhereError, HermesPoolError, SettingsError
from hermes_pool.process.death import Stopped
from hermes_pool.settings import PoolSettings, SessionKey
from hermes_pool.snapshot import PoolSnapshot
from hermes_pool_worker import wire

if TYPE_CHECKING:
    from hermes_pool.storage.store import ConversationStore, FoundSession

AGAIN_S = 0.05
"""How soon to look again for a conversation whose owner does not open its door."""
AWAY_KEPT = 4096
"""For how many conversations of others it is remembered where they are."""
TRIES_MAX = 10
"""How often a claim is tried again that another process was faster with."""


class Pool(Protocol):
    """The verbs of the manager that other processes call, about conversations of this one."""

    async def answer(self, conversation: SessionKey, question_id: str, text: str) -> bool:
        """Answer a question."""

    async def steer(self, conversation: SessionKey, text: str) -> bool:
        """Say something to the agent."""

    async def cancel(self, conversation: SessionKey, turn_id: str | None = None) -> Reply | None:
        """Cancel a turn."""

    async def stop(self, conversation: SessionKey) -> Stopped | None:
        """Stop the worker."""

    async def transcript(self, conversation: SessionKey, *, after: str | None, limit: int) -> list[wire.PastTurn]:
        """Return turns of the history."""

    def pool(self) -> PoolSnapshot:
        """Return how the pool is."""


class Ownership:
    """The leases of one process."""

    def __init__(
        self,
        store: "ConversationStore",
        settings: PoolSettings,
        pool: Pool,
        *,
        session: Callable[[SessionKey], Session],
        turn_ids: Iterator[str],
        in_background: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
        log: Any,
    ) -> None:
        self._store = store
        self._tables = LeaseTables()
        self._pool = pool
        self._door = Door(settings.state_dir, self, log)
        self._doors = Doors()
        self._session = session
        self._wait_s = settings.timeouts.wait_s
        self._turn_ids = turn_ids
        self._in_background = in_background
        self._log = log
        self._me = Supervisor("", "", "")
        self._has_joined = False
        self._away: dict[SessionKey, Away] = {}
        """Where conversations were, the last time that somebody looked."""
        self._locks: WeakValueDictionary[SessionKey, asyncio.Lock] = WeakValueDictionary()
        """One claim or release of a conversation at a time."""

    async def open(self) -> None:
        """Open the door. Nothing is written before the first claim.

        Raises ``SettingsError`` where there are no Unix sockets, and ``ControlError`` if no folder can hold one.
        """
        if not unix_sockets_available():
            raise SettingsError('cluster="machine" needs Unix sockets, which this system does not have')
        address = await self._door.open()
        self._me = Supervisor(secrets.token_hex(8), address, Identity.of_this_process().to_text())

    async def close(self) -> None:
        """Give up all leases, and close the door."""
        self._doors.close()
        if self._has_joined:
            try:
                await self._store.within(lambda connection: self._tables.leave(connection, self._me.id))
            except HermesPoolError as error:  # the others see that this process is dead
                self._log.warning("leases_not_released", error=str(error))
        await self._door.close()

    async def place(self, key: SessionKey) -> Session | Away:
        """Return a conversation: claimed for this process, or where it is.

        Raises ``StoreError`` if the database does not say, and ``ConversationElsewhereError`` for an owner about whom
        this machine's kernel knows nothing.
        """
        if (away := self._away.get(key)) is not None:
            return away
        return await self._place(key)

    async def _place(self, key: SessionKey) -> Session | Away:
        """Ask the database."""
        session = self._session(key)
        async with self._locks.setdefault(key, asyncio.Lock()):
            if session.fence is not None:
                return session
            claimed = await self._claim(key)
            if isinstance(claimed, Supervisor):
                return self._make_away(key, claimed)
            session.fence, session.metadata.found = claimed
            return session

    async def find(self, key: SessionKey) -> Away | None:
        """Return where a conversation is, if another process has it: as the database says now."""
        held = await self._store.within(lambda connection: self._look(connection, key), key.conversation_id)
        owner = None if held is None else held.owner
        if owner is None or owner.id == self._me.id or self._condition(owner) is Condition.DEAD:
            self._away.pop(key, None)
            return None
        return self._make_away(key, owner)

    async def watch(self, session: Session, after: int | None) -> AsyncGenerator[tuple[int, ConversationEvent], None]:
        """Watch a conversation, wherever it is, and wherever it goes. A watcher keeps it where it is.

        When it has moved, the numbers of its events are other ones, and the watcher gets a snapshot to go on from.
        """
        while True:
            host = session if session.fence is not None else await self.place(session.key)
            session.metadata.found = None  # what is stored may be another thing by the next message
            watching = host.log.watch(after) if isinstance(host, Session) else host.watch(after)
            try:
                async for seq, event in watching:
                    after = seq
                    yield seq, event
            except OSError:
                await asyncio.sleep(AGAIN_S)  # its owner is gone
            finally:
                await watching.aclose()
            if isinstance(host, Session):
                return  # the pool has closed
            self._away.pop(session.key, None)

    async def release(self, session: Session) -> None:
        """Give a conversation up that nobody here needs any more."""
        async with self._locks.setdefault(session.key, asyncio.Lock()):
            fence = session.fence
            if fence is None or not session.is_inactive or session.metadata.unsaved:
                return  # somebody needs it again
            session.fence = None
            try:
                await self._store.within(
                    lambda connection: self._tables.release(connection, session.key, self._me.id, fence),
                    session.key.conversation_id,
                )
            except HermesPoolError as error:
                session.fence = fence  # it is still ours, as far as anybody knows
                self._log.warning("lease_not_released", conversation_id=session.key.conversation_id, error=str(error))

    # --- what other processes ask (door.Owner) ---

    def at_door(self, key: SessionKey) -> Session:
        """Return a conversation that this process answers. Raises ``ConversationElsewhereError`` for any other."""
        session = self._session(key)
        if session.fence is None or self._pool.pool().state not in ("open", "paused"):
            raise ConversationElsewhereError("its owner gives it up", conversation_id=key.conversation_id)
        return session

    async def call(self, call: messages.Call) -> Any:
        """Carry out a call, and return built-in types."""
        key, pool = SessionKey(call.conversation_id, call.user_id), self._pool
        self.at_door(key)
        match call.verb:
            case "answer":
                return await pool.answer(key, **call.arguments)
            case "steer":
                return await pool.steer(key, **call.arguments)
            case "cancel":
                reply = await pool.cancel(key, **call.arguments)
                return None if reply is None else messages.packed(reply)
            case "stop":
                stopped = await pool.stop(key)
                return None if stopped is None else msgspec.to_builtins(stopped)
            case "transcript":
                return msgspec.to_builtins(await pool.transcript(key, **call.arguments))

    # --- one claim ---

    async def _claim(self, key: SessionKey) -> "tuple[int, FoundSession] | Supervisor":
        dead: Lease | None = None
        for _ in range(TRIES_MAX):
            before = dead
            claimed = await self._store.within(
                lambda connection, before=before: self._try(connection, key, before),  # type: ignore[misc]
                key.conversation_id,
            )
            self._has_joined = True
            if not isinstance(claimed, Lease):
                if dead is not None:
                    self._log.warning("taken_over", conversation_id=key.conversation_id, owner=dead.owner_id)
                return claimed
            dead = None
            if claimed.owner is None:
                dead = claimed
                continue
            condition = self._condition(claimed.owner)
            if condition is Condition.DEAD:
                dead = claimed
            elif condition is Condition.ELSEWHERE:
                raise ConversationElsewhereError(
                    "a process on another machine, or in another container, answers it, and this one cannot reach it: "
                    'cluster="machine" is for processes that see each other. If that one is gone for good, delete the '
                    f"row {claimed.owner.id!r} of hermes_pool_supervisor",
                    conversation_id=key.conversation_id,
                    address=claimed.owner.address,
                )
            else:
                return claimed.owner
        raise ConversationElsewhereError(
            "its owner changes all the time: try again", conversation_id=key.conversation_id
        )

    def _try(
        self, connection: sa.Connection, key: SessionKey, dead: Lease | None
    ) -> "tuple[int, FoundSession] | Lease":
        """Claim, and read what is stored, in one transaction; else return who has the lease."""
        tables, me = self._tables, self._me
        if not self._has_joined:
            tables.make(connection)
            tables.join(connection, me)
            tables.forget_buried(connection)
        if dead is None:
            fence = tables.claim(connection, key, me.id)
        else:
            if dead.owner is not None:
                tables.bury(connection, dead.owner.id, me.id)
            fence = tables.claim_from(connection, key, dead, me.id)
        if fence is None:
            held = tables.look(connection, key)
            if held is None or held.owner_id is None:
                return Lease(None, None, 0) if held is None else held
            if held.owner_id != me.id:
                return held
            fence = held.fence  # an earlier claim whose answer was lost
        return fence, self._store.find_within(connection, key)

    def _look(self, connection: sa.Connection, key: SessionKey) -> Lease | None:
        return self._tables.look(connection, key) if self._tables.exist(connection) else None

    def _condition(self, owner: Supervisor) -> Condition:
        process = Identity.from_text(owner.process)
        return Condition.ELSEWHERE if process is None else process.condition()

    def _make_away(self, key: SessionKey, owner: Supervisor) -> Away:
        away = Away(
            key, owner, self._doors, place=self._anew, wait_s=self._wait_s, turn_ids=self._turn_ids,
            in_background=self._in_background,
        )  # fmt: skip
        self._away[key] = away
        if len(self._away) > AWAY_KEPT:
            del self._away[next(iter(self._away))]
        return away

    async def _anew(self, key: SessionKey) -> Session | Away:
        """Look again for a conversation that is not where it was."""
        self._away.pop(key, None)
        return await self._place(key)

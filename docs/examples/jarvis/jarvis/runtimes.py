"""Who answers: Hermes, in the pool, or Jarvis' own runtime, which also stands in where the pool refuses."""

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from typing import Any, Literal

from hermes_pool import (
    HermesPoolError,
    HermesSessionManager,
    PastTurn,
    PoolClosedError,
    PoolDrainingError,
    Reply,
    SessionKey,
    ToolUse,
    Turn,
    TurnCancelledError,
    TurnError,
)
from jarvis.changes import Changes
from jarvis.database import Conversation, Database, Message

log = logging.getLogger("jarvis")
HERMES, JARVIS = "hermes", "jarvis"
SERVER_ERROR = 500


def runtime_of(conversation: Conversation) -> str:
    """Return who answers a conversation, as its ``agent_state`` says."""
    return JARVIS if (conversation.agent_state or {}).get("runtime") == JARVIS else HERMES


def may_stand_in(error: HermesPoolError) -> bool:
    """Return whether Jarvis answers instead: Hermes has not seen the message, and it is not the message's fault."""
    is_leaving = isinstance(error, PoolClosedError) and not isinstance(error, PoolDrainingError)
    is_wanted = isinstance(error, TurnCancelledError)
    return not error.sent and error.http_status >= SERVER_ERROR and not is_leaving and not is_wanted


def own_answer(text: str, number: int) -> str:
    """Return what Jarvis' own runtime says: it is not clever, but always there."""
    quoted = "\n".join(f"> {line}" for line in text.splitlines())
    return f"I am Jarvis' own small runtime, and this is message {number} of our conversation. You said:\n\n{quoted}"


class Runtimes:
    """Takes messages, finds who answers them, and stores the answers. ``sessions`` is set when the pool is open."""

    sessions: HermesSessionManager

    def __init__(self, database: Database) -> None:
        self.changes = Changes()
        self._database = database
        self._following: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._withdrawn: set[tuple[str, str]] = set()

    async def ask(self, conversation_id: str, turn_id: str, text: str) -> None:
        """Take a message. Returns as soon as it is accepted; the same id again changes nothing.

        Raises ``HermesPoolError`` if it is refused for a reason that lies in the message.
        """
        runtime = runtime_of(await asyncio.to_thread(self._database.create, conversation_id, text))
        question = Message(conversation_id=conversation_id, turn_id=turn_id, role="user", text=text, runtime=runtime)
        is_new = await asyncio.to_thread(self._database.asked, question)
        if not is_new and await asyncio.to_thread(self._database.answer_to, conversation_id, turn_id) is not None:
            return
        self.changes.tell(conversation_id)
        if runtime == JARVIS:
            await self._answer_ourselves(conversation_id, turn_id, text)
            return
        try:
            turn = await self.sessions.start(conversation_id, text, turn_id=turn_id)
        except HermesPoolError as error:
            if may_stand_in(error):
                await self._answer_ourselves(conversation_id, turn_id, text, because=error)
                return
            if is_new:
                await self._forget(conversation_id, turn_id)
            raise
        key = conversation_id, turn_id
        if key not in self._following:
            self._following[key] = following = asyncio.create_task(self._follow(conversation_id, turn))
            following.add_done_callback(lambda _: self._following.pop(key, None))

    async def _follow(self, conversation_id: str, turn: Turn) -> None:
        """Store how a turn ended."""
        answer = Message(
            conversation_id=conversation_id, turn_id=turn.turn_id, role="assistant", text="", runtime=HERMES
        )
        try:
            reply = await turn.reply()
        except HermesPoolError as error:
            if may_stand_in(error):
                await self._answer_ourselves(conversation_id, turn.turn_id, turn.text, because=error)
                return
            if not error.sent:  # the pool leaves: the message stays, and the page can ask again
                return
            answer.state, answer.note = "failed", str(error.to_dict()["message"])
            if isinstance(error, TurnError):
                answer.text, answer.tools = error.text, _shown(error.tools)
        else:
            if (conversation_id, turn.turn_id) in self._withdrawn:
                await self._forget(conversation_id, turn.turn_id)
                return
            _fill(answer, reply)
        await asyncio.to_thread(self._database.answered, answer)
        self.changes.tell(conversation_id)

    async def stop(self, conversation_id: str, turn_id: str) -> None:
        """Stop a turn that runs, or withdraw one that waits, and wait for its end."""
        key = conversation_id, turn_id
        if turn_id in [turn.turn_id for turn in self.sessions.waiting(conversation_id)]:
            self._withdrawn.add(key)
        try:
            await self.sessions.cancel(conversation_id, turn_id)
            if key in self._following:
                await asyncio.wait([self._following[key]])
        finally:
            self._withdrawn.discard(key)

    async def choose(self, conversation_id: str, runtime: Literal["hermes", "jarvis"]) -> None:
        """Choose who answers a conversation from now on."""
        await asyncio.to_thread(self._database.create, conversation_id, "New conversation")
        await self.sessions.set_runtime(conversation_id, runtime)
        self.changes.tell(conversation_id)

    async def take_in(self, key: SessionKey, past: PastTurn) -> None:
        """Store a turn of Hermes' history, once. The pool calls it for each, in order (``on_turn``)."""
        unknown = "hermes-" + hashlib.sha256(past.committed.encode()).hexdigest()[:32]
        answer = Message(
            conversation_id=key.conversation_id,
            turn_id=past.turn_id or unknown,
            role="assistant",
            text=past.reply,
            runtime=HERMES,
            tools=[{"name": name} for name in past.tools],
            mark=past.committed,
        )
        if await asyncio.to_thread(self._database.taken_in, answer, past.text):
            self.changes.tell(key.conversation_id)

    async def history(self, key: SessionKey) -> list[dict[str, Any]]:
        """Return what was said before Hermes came to a conversation (``history``)."""
        messages = await asyncio.to_thread(self._database.messages, key.conversation_id)
        answered = {message.turn_id for message in messages if message.role == "assistant" and message.text}
        return [{"role": message.role, "content": message.text} for message in messages if message.turn_id in answered]

    async def settled(self) -> None:
        """Wait until all answers are stored."""
        if self._following:
            await asyncio.wait(list(self._following.values()))

    async def _answer_ourselves(
        self, conversation_id: str, turn_id: str, text: str, because: HermesPoolError | None = None
    ) -> None:
        earlier = await asyncio.to_thread(self._database.messages, conversation_id)
        answer = Message(
            conversation_id=conversation_id,
            turn_id=turn_id,
            role="assistant",
            text=own_answer(text, sum(message.role == "user" for message in earlier)),
            runtime=JARVIS,
        )
        if because is not None:
            log.warning("jarvis stands in for hermes: %s", because)
            answer.note = f"Hermes is not available now ({because.code}), so Jarvis has answered."
        await asyncio.to_thread(self._database.answered, answer)
        self.changes.tell(conversation_id)

    async def _forget(self, conversation_id: str, turn_id: str) -> None:
        await asyncio.to_thread(self._database.withdrawn, conversation_id, turn_id)
        self.changes.tell(conversation_id)


def _shown(tools: Sequence[ToolUse]) -> list[dict[str, Any]]:
    return [{"name": tool.name, "arguments": tool.arguments, "ok": tool.ok} for tool in tools]


def _fill(answer: Message, reply: Reply) -> None:
    answer.text, answer.note = reply.text, reply.notice
    answer.tools = _shown(reply.tools)
    answer.state = "stopped" if reply.outcome == "interrupted" else "done"
    if reply.pending_steer:
        answer.note = " ".join(filter(None, [answer.note, f"Too late to be heard: {reply.pending_steer}"]))

"""What the page asks for: conversations, and a turn with all that can be done to it."""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Path, Request, Response
from pydantic import BaseModel, Field

from hermes_pool.fastapi import Sessions, sse
from jarvis.database import Database
from jarvis.runtimes import HERMES, Runtimes, runtime_of

router = APIRouter(prefix="/conversations")
Id = Annotated[str, Path(pattern=r"^[\w-]{1,64}$")]


def _database(request: Request) -> Database:
    found: Database = request.app.state.database
    return found


def _runtimes(request: Request) -> Runtimes:
    found: Runtimes = request.app.state.runtimes
    return found


Stored = Annotated[Database, Depends(_database)]
Answering = Annotated[Runtimes, Depends(_runtimes)]


class NewMessage(BaseModel):
    """What the page sends. It makes the id itself, so that it can send the same message again."""

    id: str = Field(min_length=1, max_length=128)
    text: str = Field(min_length=1, max_length=200_000)


class Remark(BaseModel):
    """Something to say while Hermes works, or the answer to one of its questions."""

    text: str = Field(max_length=20_000)


class Choice(BaseModel):
    """Who shall answer."""

    runtime: Literal["hermes", "jarvis"]


# --- conversations ----------------------------------------------------------------------------------------------------


@router.get("")
def conversations(database: Stored) -> list[dict[str, str]]:
    """Return the latest conversations."""
    return [{"id": each.id, "title": each.title} for each in database.conversations()]


@router.get("/{conversation}")
async def conversation(conversation: Id, database: Stored, sessions: Sessions) -> dict[str, Any]:
    """Return the stored messages, the turns that are on their way, and how long their questions still wait."""
    found = await asyncio.to_thread(database.conversation, conversation)
    messages = await asyncio.to_thread(database.messages, conversation)
    running = sessions.turn_of(conversation)
    turns = [*([] if running is None else [running]), *sessions.waiting(conversation)]
    return {
        "id": conversation,
        "title": "" if found is None else found.title,
        "runtime": HERMES if found is None else runtime_of(found),
        "messages": [message.model_dump(mode="json", exclude={"mark"}) for message in messages],
        "turns": [turn.turn_id for turn in turns],
        "questions": {open_one.question.question_id: open_one.left_s for open_one in sessions.questions(conversation)},
    }


@router.put("/{conversation}/runtime", status_code=204)
async def choose(conversation: Id, choice: Choice, answering: Answering) -> None:
    """Choose who answers from now on."""
    await answering.choose(conversation, choice.runtime)


# --- turns ------------------------------------------------------------------------------------------------------------


@router.post("/{conversation}/messages", status_code=202)
async def message(conversation: Id, message: NewMessage, answering: Answering) -> dict[str, str]:
    """Take a message. The same id again changes nothing."""
    await answering.ask(conversation, message.id, message.text)
    return {"turn_id": message.id}


@router.get("/{conversation}/events")
async def events(conversation: Id, request: Request, answering: Answering) -> Response:
    """Stream what happens, and that the stored messages have changed."""
    return sse(request, conversation, also=answering.changes.watch(conversation))


@router.post("/{conversation}/questions/{question_id}", status_code=204)
async def answer(conversation: Id, question_id: str, said: Remark, sessions: Sessions) -> None:
    """Answer a question."""
    if not await sessions.answer(conversation, question_id, said.text):
        raise HTTPException(410, "This question is not open any more.")


@router.post("/{conversation}/steer", status_code=204)
async def steer(conversation: Id, said: Remark, sessions: Sessions) -> None:
    """Say something to Hermes while it works."""
    if not await sessions.steer(conversation, said.text):
        raise HTTPException(409, "Nobody is working on an answer now.")


@router.delete("/{conversation}/turns/{turn_id}", status_code=204)
async def stop(conversation: Id, turn_id: str, answering: Answering) -> None:
    """Stop a turn that runs, or withdraw one that waits."""
    await answering.stop(conversation, turn_id)

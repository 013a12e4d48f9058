"""Jarvis' own tables, and all that it does with them. It blocks: call it from a thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import alembic.command
import alembic.config
from sqlalchemy import JSON, Column, UniqueConstraint, event
from sqlalchemy.exc import IntegrityError
from sqlmodel import Field, Session, SQLModel, col, create_engine, select

MIGRATIONS = Path(__file__).with_name("migrations")
TITLE_CHARS = 60


def _now() -> datetime:
    return datetime.now(UTC)


class Conversation(SQLModel, table=True):
    """A conversation. Both runtimes keep what they need to know in ``agent_state``, each under its own key."""

    id: str = Field(primary_key=True, max_length=64)
    title: str
    created_at: datetime = Field(default_factory=_now)
    agent_state: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON(none_as_null=True)))


class Message(SQLModel, table=True):
    """What somebody has said. A turn is two of them: the user's, and the answer."""

    __table_args__ = (
        UniqueConstraint("conversation_id", "turn_id", "role"),  # a message that is sent twice is one
        UniqueConstraint("conversation_id", "mark"),  # a turn of Hermes is taken in once
    )

    id: int | None = Field(default=None, primary_key=True)
    conversation_id: str = Field(foreign_key="conversation.id", index=True)
    turn_id: str = Field(max_length=128)
    """Made by the client, so that it can send a message again without asking it twice."""
    role: str
    """``user`` or ``assistant``."""
    text: str
    runtime: str
    """Who was asked, or who has answered: ``hermes`` or ``jarvis``."""
    state: str = "done"
    """``done``; for an answer also ``stopped`` or ``failed``."""
    note: str | None = None
    """What a person should know about an answer."""
    tools: list[dict[str, Any]] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    """The tools that were used: ``name``, and ``arguments`` and ``ok`` where they are known."""
    mark: str | None = None
    """The point in Hermes' history after this turn: the fence against taking it in twice."""
    created_at: datetime = Field(default_factory=_now)


class Database:
    """The database behind a URL. ``migrate`` first."""

    def __init__(self, url: str) -> None:
        self.engine = create_engine(url)
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine, "connect", _prepare_sqlite)

    def migrate(self) -> None:
        """Bring the tables up to date."""
        config = alembic.config.Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        with self.engine.begin() as connection:
            config.attributes["connection"] = connection
            alembic.command.upgrade(config, "head")

    @contextmanager
    def _session(self) -> Iterator[Session]:
        with Session(self.engine, expire_on_commit=False) as session:
            yield session

    def conversations(self) -> list[Conversation]:
        """Return all conversations, the latest first."""
        with self._session() as session:
            return list(session.exec(select(Conversation).order_by(col(Conversation.created_at).desc()).limit(100)))

    def conversation(self, conversation_id: str) -> Conversation | None:
        """Return a conversation, if there is one of that id."""
        with self._session() as session:
            return session.get(Conversation, conversation_id)

    def create(self, conversation_id: str, title: str) -> Conversation:
        """Return a conversation, and create it if there is none of that id."""
        with self._session() as session:
            found = session.get(Conversation, conversation_id)
            if found is None:
                session.add(Conversation(id=conversation_id, title=" ".join(title.split())[:TITLE_CHARS]))
                _committed(session)
                found = session.get_one(Conversation, conversation_id)
            return found

    def messages(self, conversation_id: str) -> list[Message]:
        """Return all messages of a conversation: the user's in the order in which they came, each with its answer."""
        with self._session() as session:
            found = session.exec(
                select(Message).where(Message.conversation_id == conversation_id).order_by(col(Message.id))
            )
            return list(found)

    def answer_to(self, conversation_id: str, turn_id: str) -> Message | None:
        """Return the answer to a message, if there is one already."""
        with self._session() as session:
            found: Message | None = session.exec(_of(conversation_id, turn_id, "assistant")).one_or_none()
            return found

    def asked(self, message: Message) -> bool:
        """Store what the user says; return whether it is new."""
        with self._session() as session:
            session.add(message)
            return _committed(session)

    def withdrawn(self, conversation_id: str, turn_id: str) -> None:
        """Forget a message of the user that nobody has taken."""
        with self._session() as session:
            for message in session.exec(_of(conversation_id, turn_id, "user")):
                session.delete(message)
            session.commit()

    def answered(self, answer: Message) -> None:
        """Store an answer as it was shown, beside the mark where ``taken_in`` was quicker."""
        with self._session() as session:
            session.add(answer)
            if _committed(session):
                return
            stored = session.exec(_of(answer.conversation_id, answer.turn_id, "assistant")).one()
            stored.text, stored.state = answer.text, answer.state  # as it was shown, and not as the model has it
            stored.note, stored.tools = answer.note, answer.tools
            session.add(stored)
            session.commit()

    def taken_in(self, answer: Message, asked: str) -> bool:
        """Store a turn of Hermes' history under its mark, once; return whether it was new.

        The answer may be there already, without its mark: then it gets it. If Jarvis does not know the turn at all
        (somebody has spoken to Hermes behind its back), the question is stored as well.
        """
        with self._session() as session:
            stored = session.exec(_of(answer.conversation_id, answer.turn_id, "assistant")).one_or_none()
            if stored is not None:
                stored.mark = answer.mark
                session.add(stored)
            else:
                if session.exec(_of(answer.conversation_id, answer.turn_id, "user")).one_or_none() is None:
                    question = Message(
                        conversation_id=answer.conversation_id,
                        turn_id=answer.turn_id,
                        role="user",
                        text=asked,
                        runtime=answer.runtime,
                    )
                    session.add(question)
                    session.flush()
                session.add(answer)
            return _committed(session)


def _of(conversation_id: str, turn_id: str, role: str) -> Any:
    return select(Message).where(
        Message.conversation_id == conversation_id, Message.turn_id == turn_id, Message.role == role
    )


def _committed(session: Session) -> bool:
    """Commit; return whether the rows were new."""
    try:
        session.commit()
    except IntegrityError:
        session.rollback()
        return False
    return True


def _prepare_sqlite(connection: Any, _: object) -> None:
    """Let readers and the pool's store work beside a writer."""
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA busy_timeout=5000")
    connection.execute("PRAGMA foreign_keys=ON")

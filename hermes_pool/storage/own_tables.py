"""Two small tables of the pool's own, beside the table that Jarvis has.

An ORM that writes ``agent_state`` as a whole takes the pool's half with it, or brings an old one back. So what recovery
needs is kept here as well, where nobody else writes. And here are the ids that the host gave to turns, so that a
message that is sent again after a restart does not run twice.

The tables are made with the first write. ``python -m hermes_pool.storage.own_tables`` prints their statements, for
those who make tables by hand. Without the right to make them all else works.
"""

import sys
from dataclasses import dataclass
from time import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateTable

from hermes_pool.settings import SessionKey

TURNS_KEPT = 32
"""How many turns with ids of the host's are kept for each conversation."""

_metadata = sa.MetaData()
SESSION = sa.Table(
    "hermes_pool_session",
    _metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("user_id", sa.Text, primary_key=True),  # "" for a session of the whole conversation
    sa.Column("turns", sa.BigInteger, nullable=False),  # the greater one is the newer record
    sa.Column("record", sa.Text, nullable=False),  # JSON, as in agent_state
)
TURN = sa.Table(
    "hermes_pool_turn",
    _metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("user_id", sa.Text, primary_key=True),
    sa.Column("turn_id", sa.Text, primary_key=True),
    sa.Column("begun_at", sa.Float, nullable=False),  # seconds since the epoch; orders them, and decides nothing else
    sa.Column("digest", sa.Text, nullable=False),  # of the message
    sa.Column("text", sa.Text),  # the message, until the turn has ended
    sa.Column("outcome", sa.Text),  # JSON; NULL: it has begun, and nobody knows more
)
TABLES = (SESSION, TURN)
_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A turn with an id of the host's, as it is recorded."""

    turn_id: str
    digest: str
    text: str | None
    outcome: str | None
    """How it ended, as JSON; ``None``: the process that ran it has ended in it."""


class OwnTables:
    """Reads and writes the two tables, in transactions of the store's."""

    def __init__(self) -> None:
        self._exist = False
        self.refused: str | None = None
        """Why the tables cannot be made; ``None``: they can, as far as is known."""

    def ready_to_read(self, connection: sa.Connection) -> bool:
        """Whether the tables exist."""
        if not self._exist:
            inspector = sa.inspect(connection)
            self._exist = all(inspector.has_table(table.name) for table in TABLES)
        return self._exist

    def ready_to_write(self, connection: sa.Connection) -> bool:
        """Whether the tables exist; they are made if need be."""
        if self.refused is not None or self.ready_to_read(connection):
            return self._exist
        for last_try in (False, True):
            try:
                with connection.begin_nested():
                    for table in TABLES:
                        connection.execute(CreateTable(table, if_not_exists=True))
            except DBAPIError as error:
                # When two make one table at once, PostgreSQL fails for the later one; then the table is there.
                if last_try and not self.ready_to_read(connection):
                    self.refused = str(error.orig).strip().splitlines()[0][:200]
                    return False
            else:
                break
        return True  # kept in ``_exist`` only once the transaction is over, since it may be rolled back

    def load(self, connection: sa.Connection, key: SessionKey) -> str | None:
        """Return the record of a session, as JSON."""
        record: str | None = connection.execute(
            sa.select(SESSION.c.record).where(*_is(SESSION, key))
        ).scalar_one_or_none()
        return record

    def save(self, connection: sa.Connection, key: SessionKey, turns: int, record: str) -> None:
        """Store the record of a session, unless a newer one is there."""
        insert = _INSERT[connection.dialect.name](SESSION).values(**_of(key), turns=turns, record=record)
        connection.execute(
            insert.on_conflict_do_update(
                index_elements=["id", "user_id"],
                set_={"turns": insert.excluded.turns, "record": insert.excluded.record},
                where=SESSION.c.turns <= insert.excluded.turns,
            )
        )

    def begin_turn(self, connection: sa.Connection, key: SessionKey, turn_id: str, digest: str, text: str) -> bool:
        """Record that a turn is about to run; return whether its id is new."""
        insert = _INSERT[connection.dialect.name](TURN).values(
            **_of(key), turn_id=turn_id, begun_at=time(), digest=digest, text=text
        )
        once = insert.on_conflict_do_nothing(index_elements=["id", "user_id", "turn_id"]).returning(TURN.c.turn_id)
        return connection.execute(once).one_or_none() is not None

    def turn(self, connection: sa.Connection, key: SessionKey, turn_id: str) -> RecordedTurn | None:
        """Return a recorded turn."""
        row = connection.execute(_turns(key).where(TURN.c.turn_id == turn_id)).one_or_none()
        return None if row is None else RecordedTurn(*row)

    def open_turn(self, connection: sa.Connection, key: SessionKey) -> RecordedTurn | None:
        """Return the latest turn that has begun and not ended, as far as is recorded."""
        unended = _turns(key).where(TURN.c.outcome.is_(None)).order_by(TURN.c.begun_at.desc()).limit(1)
        row = connection.execute(unended).one_or_none()
        return None if row is None else RecordedTurn(*row)

    def end_turn(self, connection: sa.Connection, key: SessionKey, turn_id: str, outcome: str | None) -> None:
        """Record how a turn ended (``None``: it may run again), and forget the oldest ones."""
        this = (*_is(TURN, key), TURN.c.turn_id == turn_id)
        if outcome is None:
            connection.execute(sa.delete(TURN).where(*this))
            return
        connection.execute(sa.update(TURN).where(*this).values(outcome=outcome, text=None))
        latest = sa.select(TURN.c.turn_id).where(*_is(TURN, key)).order_by(TURN.c.begun_at.desc()).limit(TURNS_KEPT)
        connection.execute(sa.delete(TURN).where(*_is(TURN, key), TURN.c.turn_id.not_in(latest)))


def statements() -> str:
    """Return the statements that make the tables, the same for both databases."""
    made = (str(CreateTable(table, if_not_exists=True)).strip() for table in TABLES)
    return "".join(f"{statement.replace(chr(9), '    ').replace(' ' + chr(10), chr(10))};\n" for statement in made)


def _of(key: SessionKey) -> dict[str, Any]:
    return {"id": key.conversation_id, "user_id": key.user_id or ""}


def _is(table: sa.Table, key: SessionKey) -> tuple[sa.ColumnElement[bool], ...]:
    return table.c.id == key.conversation_id, table.c.user_id == (key.user_id or "")


def _turns(key: SessionKey) -> Any:
    return sa.select(TURN.c.turn_id, TURN.c.digest, TURN.c.text, TURN.c.outcome).where(*_is(TURN, key))


if __name__ == "__main__":
    sys.stdout.write(statements())

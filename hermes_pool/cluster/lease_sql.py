"""Two tables of the pool's own: who takes part, and who owns which conversation.

Not in ``agent_state``: an ORM that writes that column as a whole would bring back an old owner. The row of a lease
stays when it is released, so that its fence never goes back. Each statement that changes a row has all its conditions
on that row: so a takeover is a compare-and-swap, also where a statement sees an old state of other rows.

The tables are made with the first claim. ``python -m hermes_pool.cluster.lease_sql`` prints their statements, for those
who make tables by hand.
"""

import sys
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateTable

from hermes_pool.cluster.lease import Lease, Supervisor
from hermes_pool.settings import SessionKey

_metadata = sa.MetaData()
SUPERVISOR = sa.Table(
    "hermes_pool_supervisor",
    _metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("address", sa.Text, nullable=False),  # of its door
    sa.Column("process", sa.Text, nullable=False),  # JSON: see neighbours.Identity
    sa.Column("buried_by", sa.Text),  # NULL: it lives, as far as anybody knows. Once buried it stays so
)
LEASE = sa.Table(
    "hermes_pool_lease",
    _metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("user_id", sa.Text, primary_key=True),  # "" for a session of the whole conversation
    sa.Column("owner", sa.Text),  # a supervisor; NULL: nobody
    sa.Column("fence", sa.BigInteger, nullable=False),  # grows with each owner
)
TABLES = (SUPERVISOR, LEASE)
_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class LeaseTables:
    """Reads and writes the two tables, in transactions of somebody else's."""

    def __init__(self) -> None:
        self._exist = False

    def make(self, connection: sa.Connection) -> None:
        """Make the tables where they are missing."""
        if self.exist(connection):
            return
        try:
            with connection.begin_nested():
                for table in TABLES:
                    connection.execute(CreateTable(table, if_not_exists=True))
        except DBAPIError:
            # When two make one table at once, PostgreSQL fails for the later one; then the table is there.
            if not self.exist(connection):
                raise
        # Kept in ``_exist`` only once the transaction is over, since it may be rolled back.

    def exist(self, connection: sa.Connection) -> bool:
        """Whether the tables exist."""
        if not self._exist:
            inspector = sa.inspect(connection)
            self._exist = all(inspector.has_table(table.name) for table in TABLES)
        return self._exist

    def join(self, connection: sa.Connection, me: Supervisor) -> None:
        """Present a supervisor."""
        insert = _INSERT[connection.dialect.name](SUPERVISOR)
        values = insert.values(id=me.id, address=me.address, process=me.process)
        connection.execute(values.on_conflict_do_nothing(index_elements=["id"]))

    def leave(self, connection: sa.Connection, me: str) -> None:
        """Give up all leases of a supervisor, and forget it."""
        connection.execute(sa.update(LEASE).where(LEASE.c.owner == me).values(owner=None))
        connection.execute(sa.delete(SUPERVISOR).where(SUPERVISOR.c.id == me))

    def claim(self, connection: sa.Connection, key: SessionKey, me: str) -> int | None:
        """Take a lease that nobody has; return its fence, or ``None`` if somebody has it."""
        insert = _INSERT[connection.dialect.name](LEASE).values(**_of(key), owner=me, fence=1)
        free = insert.on_conflict_do_update(
            index_elements=["id", "user_id"],
            set_={"owner": me, "fence": LEASE.c.fence + 1},
            where=LEASE.c.owner.is_(None),
        )
        fence: int | None = connection.execute(free.returning(LEASE.c.fence)).scalar_one_or_none()
        return fence

    def look(self, connection: sa.Connection, key: SessionKey) -> Lease | None:
        """Return a lease, and who has it; ``None`` if it was never claimed."""
        row = connection.execute(
            sa.select(LEASE.c.owner, LEASE.c.fence, SUPERVISOR.c.id, SUPERVISOR.c.address, SUPERVISOR.c.process)
            .join_from(
                LEASE,
                SUPERVISOR,
                sa.and_(SUPERVISOR.c.id == LEASE.c.owner, SUPERVISOR.c.buried_by.is_(None)),
                isouter=True,
            )
            .where(*_is(key))
        ).one_or_none()
        if row is None:
            return None
        owner = None if row[2] is None else Supervisor(*row[2:])
        return Lease(row[0], owner, row[1])

    def bury(self, connection: sa.Connection, dead: str, me: str) -> None:
        """Declare a supervisor dead, for ever."""
        alive = (SUPERVISOR.c.id == dead, SUPERVISOR.c.buried_by.is_(None))
        connection.execute(sa.update(SUPERVISOR).where(*alive).values(buried_by=me))

    def claim_from(self, connection: sa.Connection, key: SessionKey, held: Lease, me: str) -> int | None:
        """Take a lease from an owner that is buried; return its fence, or ``None`` if another was faster."""
        fence: int | None = connection.execute(
            sa.update(LEASE)
            .where(*_is(key), LEASE.c.owner == held.owner_id, LEASE.c.fence == held.fence)
            .values(owner=me, fence=LEASE.c.fence + 1)
            .returning(LEASE.c.fence)
        ).scalar_one_or_none()
        return fence

    def release(self, connection: sa.Connection, key: SessionKey, me: str, fence: int) -> None:
        """Give a lease up. Does nothing to that of another owner."""
        mine = (*_is(key), LEASE.c.owner == me, LEASE.c.fence == fence)
        connection.execute(sa.update(LEASE).where(*mine).values(owner=None))

    def supervisors(self, connection: sa.Connection) -> list[Supervisor]:
        """Return those who are not buried."""
        columns = sa.select(SUPERVISOR.c.id, SUPERVISOR.c.address, SUPERVISOR.c.process)
        return [Supervisor(*row) for row in connection.execute(columns.where(SUPERVISOR.c.buried_by.is_(None)))]

    def forget_buried(self, connection: sa.Connection) -> None:
        """Remove those who are buried and own nothing any more."""
        owning = sa.select(LEASE.c.owner).where(LEASE.c.owner.is_not(None))
        buried = SUPERVISOR.c.buried_by.is_not(None)
        connection.execute(sa.delete(SUPERVISOR).where(buried, SUPERVISOR.c.id.not_in(owning)))


def statements() -> str:
    """Return the statements that make the tables, the same for both databases."""
    made = (str(CreateTable(table, if_not_exists=True)).strip() for table in TABLES)
    return "".join(f"{statement.replace(chr(9), '    ').replace(' ' + chr(10), chr(10))};\n" for statement in made)


def _of(key: SessionKey) -> dict[str, Any]:
    return {"id": key.conversation_id, "user_id": key.user_id or ""}


def _is(key: SessionKey) -> tuple[sa.ColumnElement[bool], ...]:
    return LEASE.c.id == key.conversation_id, LEASE.c.user_id == (key.user_id or "")


if __name__ == "__main__":
    sys.stdout.write(statements())

"""How Alembic reaches the tables: over the connection that ``Database.migrate`` gives it."""

from alembic import context

from jarvis.database import Conversation

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Conversation.metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()

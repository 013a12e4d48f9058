"""Session metadata in a database."""

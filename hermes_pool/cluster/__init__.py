"""Several processes that share one store: who owns a conversation, and how a message gets to the owner."""

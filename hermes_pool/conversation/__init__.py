"""One conversation: its session, its turns, and the slot for its worker."""

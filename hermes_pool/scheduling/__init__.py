"""Who may have a worker, and who looks after it."""

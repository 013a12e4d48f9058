"""Worker processes: how they are started, spoken to, watched and ended."""

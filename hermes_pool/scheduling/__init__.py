"""Which sessions may have a worker, and the monitor of the workers that run."""

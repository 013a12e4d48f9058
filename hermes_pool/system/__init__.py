"""The operating system: processes, threads, files and the log."""

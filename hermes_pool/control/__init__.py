"""The control socket: how another process sees and steers a supervisor."""

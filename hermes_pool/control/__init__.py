"""The control socket, through which other processes see and control a running supervisor."""

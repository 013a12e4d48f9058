"""Jarvis: a small, complete chat host. ``app`` has the routes, and is the place to begin."""

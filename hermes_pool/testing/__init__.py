"""Helpers for testing programs that use the pool."""

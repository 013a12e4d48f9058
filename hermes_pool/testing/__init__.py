"""For tests of programs that use the pool."""

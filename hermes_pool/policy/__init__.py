"""Decisions, pure: facts go in, a decision comes out; clock and randomness are handed in."""

"""Pure decisions: facts go in, a decision comes out. Clock and randomness are parameters."""

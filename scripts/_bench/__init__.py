"""What ``scripts/bench`` is made of; ``metrics`` is the table of what is measured."""

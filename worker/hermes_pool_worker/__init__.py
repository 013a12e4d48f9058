"""What runs in a worker's interpreter. This file imports nothing; ``__main__`` explains why that matters."""

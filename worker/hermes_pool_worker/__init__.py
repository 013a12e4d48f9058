"""What runs in a worker's interpreter. Imports nothing: see ``__main__`` for why that matters."""

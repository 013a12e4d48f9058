"""Worker processes: starting them, talking to them, watching them and ending them."""

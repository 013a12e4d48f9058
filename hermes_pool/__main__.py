"""``python -m hermes_pool`` is the command line ``hermes-pool``."""

from hermes_pool.cli.app import app

if __name__ == "__main__":
    app(prog_name="hermes-pool")

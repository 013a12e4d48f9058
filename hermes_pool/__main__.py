"""``python -m hermes_pool`` runs the command line, like ``hermes-pool``."""

from hermes_pool.cli.app import app

if __name__ == "__main__":
    app(prog_name="hermes-pool")

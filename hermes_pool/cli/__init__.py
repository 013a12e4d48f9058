"""The command line ``hermes-pool``."""

"""The version of rollouts."""

__version__ = "0.1.0"

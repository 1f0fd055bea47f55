"""Raises when it is imported."""

raise RuntimeError("acme_broken was built for another world")

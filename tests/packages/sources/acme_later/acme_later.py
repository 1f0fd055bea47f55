"""An environment for a later version of the contract."""


class Counting:
    """It is never imported here."""

    raise RuntimeError("imported")

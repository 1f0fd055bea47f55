"""Of the tests of faults, the normal run has one kind of server each."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the normal run, a fault between trainer and servers is planted with one kind of server, which alternates: in
    all weights with one, in an adapter with the other. `make nightly` has each with both.
    """
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        if item.path.name == "test_faults.py" and "kind" in given and not given.keys() & {"expected", "old"}:
            turn = sum(item.originalname.encode()) + (given.get("way") == "adapter")
            if given["kind"] != ("vllm", "sglang")[turn % 2]:
                item.add_marker(pytest.mark.nightly)

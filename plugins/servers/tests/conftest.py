"""What the normal run leaves to `make nightly`: each fault of a second kind of server, and of a second client."""

from __future__ import annotations

import pytest
from rollouts_servers.http import ProxyClient

SAME = ("garbage", "429", "400", "stall")
"""Faults of which both clients make the same in the same lines."""

ONE_WAY = (
    "test_a_server_that_dies_in_a_load_is_named_and_asked_no_more",
    "test_killed_in_the_middle_of_a_sync_and_resynced_when_it_returns",
    "test_the_right_key_is_never_printed_either",
    "test_another_model_of_the_same_name",
)
"""Tests with all weights alone in the normal run: an adapter takes the same course."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the normal run, a fault between trainer and servers is planted with one kind of server, which alternates: in
    all weights with one, in an adapter with the other. `make nightly` has each with both.
    """
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        if item.path.name == "test_http.py" and given.get("client") is ProxyClient and given.get("fault") in SAME:
            item.add_marker(pytest.mark.nightly)
        if item.path.name == "test_faults.py" and "kind" in given and not given.keys() & {"expected", "old"}:
            turn = sum(item.originalname.encode()) + (given.get("way") == "adapter")
            is_second = given.get("way") == "adapter" and item.originalname in ONE_WAY
            if is_second or given["kind"] != ("vllm", "sglang")[turn % 2]:
                item.add_marker(pytest.mark.nightly)

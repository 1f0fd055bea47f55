"""A rank above 0 of a distributed training backend: composes the run that rank 0 composed, and serves it.

    python -m rollouts.compose.rank

is how rank 0 starts it on its own machine; a launcher's ranks get here from `rollouts run`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import tomllib
import traceback

import msgspec

from rollouts.compose.parts import make_training
from rollouts.compose.plan import Plan, make_plan
from rollouts.config.resolving import resolve
from rollouts.errors import RolloutsError, words_of
from rollouts.training.models import remote_code
from rollouts.training.types import RankServer

__all__ = ["main", "serve_rank"]


def serve_rank(plan: Plan) -> None:
    """Serve as the rank that this process was started as."""
    backend = make_training(plan)
    assert isinstance(backend, RankServer), f"{backend} on a rank above 0"
    backend.serve()


def main() -> int:
    """Compose from what rank 0 left in the store, and serve; returns the exit code."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    from rollouts.training.backends.heartbeats import Failure
    from rollouts.training.backends.messages import Channel
    from rollouts.training.backends.ranks import CONFIG_KEY, ignore_interrupts

    ignore_interrupts()
    rank = int(os.environ["RANK"])
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=False,
        timeout=datetime.timedelta(seconds=60),
    )
    channel = Channel(PrefixStore("rollouts/0", store))
    text = channel.read(CONFIG_KEY)
    assert text is not None, "rank 0 leaves it before it starts anybody"
    try:
        resolved = resolve(tomllib.loads(text.decode()))
        with remote_code(resolved.settings.trust_remote_code):
            serve_rank(make_plan(resolved))
    except Exception as error:  # rank 0 tells it; it is the only one that does
        told = str(error) if isinstance(error, RolloutsError) else words_of(error)
        if os.environ.get("ROLLOUTS_TRACEBACK") == "1":
            traceback.print_exception(error)
        with contextlib.suppress(Exception):  # rank 0 may be gone already
            if channel.read(f"failed/{rank}") is None:
                known = isinstance(error, RolloutsError)
                channel.post(f"failed/{rank}", msgspec.msgpack.encode(Failure(f"starting: {told}", known=known)))
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the teardown of a process group whose other ranks have gone may abort

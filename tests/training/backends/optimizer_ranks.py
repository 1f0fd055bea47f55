"""One of two ranks for test_optimizer.py: steps sharded weights, saves and loads the optimizer's state, and leaves what
it found in a folder. `train` and the networks are the single process's too.

python optimizer_ranks.py FOLDER RANK
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn

from rollouts.training.backends.optimizer import TrainerSettings, make_optimizer, optimizer_tensors

STEPS = 3
OPTIMIZERS = ("adamw", "sgd")


class Trained(NamedTuple):
    network: nn.Module
    optimizer: torch.optim.Optimizer
    names: dict[nn.Parameter, str]


def make_network() -> nn.Module:
    """Odd sizes, so that the ranks' shares differ."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5, bias=False), nn.LayerNorm(5))


def make(name: str, *, mesh=None, kernel=None) -> Trained:
    """Weights, sharded over a mesh if there is one, and the optimizer over two sets of them."""
    network = make_network()
    if mesh is not None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(network[0], mesh=mesh)
        fully_shard(network, mesh=mesh)
    settings = TrainerSettings(lr=1e-2, weight_decay=0.1, optimizer=name)
    sets = [(list(network[0].parameters()), 1e-2), ([*network[2].parameters(), *network[3].parameters()], 3e-3)]
    optimizer = make_optimizer(sets, settings)
    for group in optimizer.param_groups if kernel else ():
        group.update(kernel)
    return Trained(network, optimizer, {parameter: key for key, parameter in network.named_parameters()})


def train(trained: Trained, steps) -> None:
    for step in steps:
        torch.manual_seed(step)
        trained.network(torch.randn(6, 7)).square().sum().backward()
        trained.optimizer.step()
        trained.optimizer.zero_grad()


def state_of(trained: Trained) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, as tensors that can be loaded into."""
    return {"weights": trained.network.state_dict(), "optimizer": optimizer_tensors(trained.optimizer, trained.names)}


def load(trained: Trained, path: str) -> None:
    """Read a checkpoint into the tensors themselves, as the trainer does."""
    state = state_of(trained)
    dcp.load(state, checkpoint_id=path)
    trained.network.load_state_dict(state["weights"])


def copy_state(trained: Trained, tensors: dict[str, torch.Tensor]) -> None:
    """Into the optimizer's own tensors, which have to be the same ones."""
    own = optimizer_tensors(trained.optimizer, trained.names)
    assert set(own) == set(tensors)
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def whole(named) -> dict[str, torch.Tensor]:
    return {
        key: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for key, value in named.items()
    }


def main(folder: Path, rank: int) -> None:
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    mesh = distributed.init_device_mesh("cpu", (2,))
    found = {}
    for name in OPTIMIZERS:
        trained = make(name, mesh=mesh)
        found[f"{name}/fused"] = [bool(group["fused"]) for group in trained.optimizer.param_groups]
        for version in (0, STEPS):
            train(trained, range(version))
            dcp.save(state_of(trained), checkpoint_id=folder / f"two/{name}/{version}")
            found[f"{name}/state/{version}"] = whole(optimizer_tensors(trained.optimizer, trained.names))
        found[f"{name}/kinds"] = {key: type(value).__name__ for key, value in state_of(trained)["optimizer"].items()}
        train(trained, [STEPS])
        found[f"{name}/next"] = whole(trained.network.state_dict())
        for version in (0, STEPS):
            for source in ("one", "two"):
                again = make(name, mesh=mesh)
                load(again, str(folder / f"{source}/{name}/{version}"))
                if source == "one":
                    found[f"{name}/state_from_one/{version}"] = whole(optimizer_tensors(again.optimizer, again.names))
                train(again, range(version, STEPS + 1))
                found[f"{name}/from_{source}/{version}"] = whole(again.network.state_dict())
        looped = make(name, mesh=mesh, kernel={"fused": False, "foreach": True})
        train(looped, range(STEPS + 1))
        found[f"{name}/foreach"] = whole(looped.network.state_dict())
    try:
        train(make("adafactor", mesh=mesh), [0])
    except RuntimeError as error:
        found["adafactor"] = str(error)
    mixed = make("adamw", mesh=mesh)
    alone = nn.Parameter(torch.ones(3))
    optimizer = make_optimizer([([*mixed.network.parameters(), alone], 1e-2)], TrainerSettings(lr=1e-2))
    alone.grad = torch.ones(3)
    train(mixed._replace(optimizer=optimizer), [0])
    found["mixed"] = alone.detach()
    if rank == 0:
        torch.save(found, folder / "found.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

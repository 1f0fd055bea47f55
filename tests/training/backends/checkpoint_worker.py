"""What the tests of checkpoints run in processes of their own: ranks of a gloo group, and a disk that is full.

python checkpoint_worker.py save|load RANK RANKS FOLDER
python checkpoint_worker.py full-disk FOLDER
"""

from __future__ import annotations

import contextlib
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from rollouts.errors import CheckpointError
from rollouts.training.weights import checkpoint, files, store
from rollouts.training.weights.files import ModelFiles

SHAPES = {"rows": (5, 3), "few": (1, 4), "vector": (7,), "half": (6, 2)}


def whole(name, add=0.0):
    numbers = torch.arange(torch.Size(SHAPES[name]).numel(), dtype=torch.float32).reshape(SHAPES[name]) * 1.5 + add
    return numbers.bfloat16() if name == "half" else numbers


def sharded(mesh, values):
    from torch.distributed.tensor import Shard, distribute_tensor

    return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in values.items()}


def tensors(mesh, fill):
    values = {name: torch.full_like(whole(name), -1) if fill is None else whole(name, fill) for name in SHAPES}
    step = torch.tensor(0.0 if fill is None else 12.0)
    return {
        "optimizer": {"causal.layer.weight": {"exp_avg": sharded(mesh, values)["rows"], "step": step}},
        "critic": {name: each for name, each in sharded(mesh, values).items() if name != "rows"},
    }


def save(mesh, rank, ranks, folder):
    with contextlib.ExitStack() as stack:
        names: list = [None]
        if rank == 0:
            names = [str(stack.enter_context(store.new_checkpoint(str(folder / "step_000003"))))]
        distributed.broadcast_object_list(names)
        temporary = Path(names[0])
        refuse(mesh, rank, ranks, folder)
        checkpoint.write_tensors(temporary, tensors(mesh, 0.25))
        full = export(mesh, rank, temporary)
        if rank == 0:
            store.finish_checkpoint(
                temporary,
                kind="full",
                fingerprint=checkpoint.model_fingerprint(full),
                version=3,
                world_size=ranks,
                state={"backend": {"version": 3}},
            )


def refuse(mesh, rank, ranks, folder):
    """The last rank's disk is full: every rank is told, and which one it was."""
    import resource

    from torch.distributed.tensor import Shard, distribute_tensor

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == ranks - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        large = distribute_tensor(torch.zeros(ranks * 8000), mesh, [Shard(0)])
        checkpoint.write_tensors(folder / ".step_000002.writing-1", {"optimizer": {"large": large}})
        raise AssertionError("it was written")
    except CheckpointError as error:
        words = str(error)
        assert f"step_000002 cannot be written by rank {ranks - 1}: File too large; free some space" in words, words
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def export(mesh, rank, temporary):
    """A sharded model's weights, from the full state on rank 0. Its fingerprint is that of the model in one piece."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    from rollouts.models.loading import load_hf_model

    causal = load_hf_model("tiny", device="cpu")
    before = checkpoint.model_fingerprint(causal.state_dict())
    for layer in causal.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(causal, mesh=mesh)
    assert checkpoint.model_fingerprint(causal.state_dict()) == before
    full = get_model_state_dict(causal, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        files.write_weights(temporary, "full", full, ModelFiles(causal, source="tiny"))
    return full


def load(mesh, rank, ranks, folder):
    template = tensors(mesh, None)
    checkpoint.read_trainer_tensors(folder / "step_000003", template)
    expected = tensors(mesh, 0.25)
    assert torch.equal(template["optimizer"]["causal.layer.weight"]["step"], torch.tensor(12.0))
    template["critic"]["rows"] = template["optimizer"]["causal.layer.weight"]["exp_avg"]
    expected["critic"]["rows"] = expected["optimizer"]["causal.layer.weight"]["exp_avg"]
    for name in SHAPES:
        assert torch.equal(template["critic"][name].full_tensor(), whole(name, 0.25)), name
        assert torch.equal(template["critic"][name].to_local(), expected["critic"][name].to_local()), name


def full_disk(folder):
    """Every way to write runs against a limit on the size of files; prints the messages."""
    import resource

    from rollouts.models import lora
    from rollouts.models.loading import load_hf_model

    causal = load_hf_model("tiny", device="cpu")
    state = dict(causal.state_dict())
    words = {"kind": "full", "fingerprint": "f", "version": 1, "world_size": 1}
    with store.new_checkpoint(str(folder / "step_000001")) as temporary:
        checkpoint.write_tensors(temporary, {"optimizer": state})
        store.finish_checkpoint(temporary, state={}, **words)
    adapter = lora.add_lora(load_hf_model("tiny", device="cpu"), rank=8, alpha=None, targets="all-linear", seed=0)
    lora_weights = lora.read_adapter_weights(
        adapter, lambda named: {name: each.detach().clone() for name, each in named}
    )
    config = adapter.peft_config[lora.ADAPTER]
    ways = {
        "tensors": lambda into: checkpoint.write_tensors(into, {"optimizer": state}),
        "weights": lambda into: files.write_weights(into, "full", state, ModelFiles(causal)),
        "adapter": lambda into: files.write_weights(into, "adapter", lora_weights, ModelFiles(causal, config)),
        "tokenizer": lambda into: files.copy_tokenizer("tiny", into),
        "state": lambda into: None,
    }
    limits = {"tensors": 100_000, "weights": 100_000, "adapter": 20_000, "tokenizer": 5_000, "state": 2_000}
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = {}
    for name, write in ways.items():
        path = str(folder / "step_000001")  # the name that is there already
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits[name], hard))
        try:
            with store.new_checkpoint(path) as temporary:
                write(temporary)
                store.finish_checkpoint(temporary, state={"long": "x" * 5000}, **words)
        except CheckpointError as error:
            said[name] = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        store.check_folder(path, kind="full", fingerprint="f")
        assert [each.name for each in folder.iterdir()] == ["step_000001"], list(folder.iterdir())
    print(json.dumps(said))


def main():
    torch.set_num_threads(1)
    if sys.argv[1] == "full-disk":
        full_disk(Path(sys.argv[2]))
        return
    work, rank, ranks, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    store = distributed.FileStore(str(folder / f"store-{work}-{ranks}"), ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (ranks,))
        {"save": save, "load": load}[work](mesh, rank, ranks, folder)
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()

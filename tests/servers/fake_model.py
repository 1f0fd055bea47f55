"""A language model that is none, and yet computes: log-probabilities out of every tensor of a folder and the context.

    write_model(folder, seed=3)                         # config.json, model.safetensors
    trainer = FakeTrainer(folder, lora_rank=0)          # get_weights, forward, nudge: a TrainingBackend in few lines
    Model.of(read_tensors(folder), 64).score([3, 1, 4]) # what a healthy server says, to 1e-9

How it computes, in float64: each tensor is folded into a few numbers by fixed waves over its elements (linear in them,
so that a base with an adapter is the merged model), the sum over all tensors shifts the phases of an embedding and of
a head, and a slowly fading sum over the tokens so far stands for keys and values. So every tensor matters, and every
bit of it that a person would call a change; and what a cache kept of old weights makes wrong numbers, as with a real
one. Left out: everything that a model is for.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Vector = NDArray[np.float64]

WIDTH = 8  # of the context
FADING = 0.95  # a token, of what the context holds
SHARPNESS = 0.5
ROW = 256  # elements that are folded at a time
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
PEFT_PREFIX = "base_model.model."
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
WAVES = 2.0 * np.pi * np.mod(np.arange(1, 2 * WIDTH + 1) * GOLDEN, 1.0)  # one for each phase

NUMPY_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "U8": "u1"}


class CorruptFileError(Exception):
    """A file that is no whole safetensors file."""


# --- folders ---------------------------------------------------------------------------------------------------------


def read_tensors(folder: str | Path) -> dict[str, Array]:
    """All tensors of a folder's safetensors files (bfloat16 as float32). Raises FileNotFoundError, CorruptFileError."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no safetensors file in {folder}")
    found: dict[str, Array] = {}
    for file in files:
        found |= read_file(file)
    return found


def read_file(file: Path) -> dict[str, Array]:
    """The tensors of one file. Raises CorruptFileError."""
    data = file.read_bytes()
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        header: dict[str, Any] = json.loads(data[8:start])
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if start + end != len(data):
            raise CorruptFileError(f"{file.name} has {len(data)} bytes, and should have {start + end}")
        return {name: _array(entry, data[start:]) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFileError(f"{file.name} is no safetensors file: {error}") from error


def _array(entry: Mapping[str, Any], data: bytes) -> Array:
    first, last = entry["data_offsets"]
    flat = np.frombuffer(data[first:last], NUMPY_TYPES[entry["dtype"]])
    if entry["dtype"] == "BF16":
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.reshape(entry["shape"]).copy()


def write_tensors(file: Path, tensors: Mapping[str, Array]) -> None:
    """A safetensors file, of float32."""
    header, parts, offset = dict[str, Any](), list[bytes](), 0
    for name, value in tensors.items():
        data = np.ascontiguousarray(value, "<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [offset, offset + len(data)]}
        parts.append(data)
        offset += len(data)
    words = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    words += b" " * (-len(words) % 8)
    file.write_bytes(len(words).to_bytes(8, "little") + words + b"".join(parts))


def write_model(
    folder: str | Path, *, seed: int = 0, vocabulary: int = 64, context: int = 512, width: int = 16, layers: int = 2
) -> Path:
    """A folder that looks like a small Qwen3's, for servers and trainers of the tests."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "float32", "eos_token_id": 2}
    config |= {"vocab_size": vocabulary, "max_position_embeddings": context, "hidden_size": width, "head_dim": 8}
    config |= {"num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"intermediate_size": 2 * width, "tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        shapes |= {f"{stem}.self_attn.q_proj.weight": (16, width), f"{stem}.self_attn.o_proj.weight": (width, 16)}
        shapes |= {f"{stem}.mlp.down_proj.weight": (width, 2 * width), f"{stem}.input_layernorm.weight": (width,)}
    shapes["model.norm.weight"] = (width,)
    tensors = {name: rng.normal(scale=0.3, size=shape).astype(np.float32) for name, shape in shapes.items()}
    write_tensors(path / "model.safetensors", tensors)
    return path


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json, or adapter_config.json where that is what there is. Raises FileNotFoundError."""
    whole = Path(folder) / "config.json"
    found: dict[str, Any] = json.loads(
        (whole if whole.is_file() else whole.with_name("adapter_config.json")).read_text()
    )
    return found


# --- numbers ---------------------------------------------------------------------------------------------------------


def fold(name: str, value: Array) -> Vector:
    """A tensor as phases [2 * WIDTH], linear in its elements; which tensor it is matters too."""
    flat = np.clip(np.nan_to_num(value.astype(np.float64).ravel(), nan=1e3), -1e3, 1e3)
    flat = np.pad(flat, (0, -len(flat) % ROW)).reshape(-1, ROW)
    columns = np.exp(1j * np.outer(np.arange(ROW), WAVES))
    rows = np.exp(1j * (np.outer(np.arange(len(flat)) * ROW, WAVES) + zlib.crc32(name.encode()) % 1000))
    folded: Vector = ((flat @ columns) * rows).sum(axis=0).real
    return folded


def adapter_delta(tensors: Mapping[str, Array], config: Mapping[str, Any]) -> dict[str, Array]:
    """What a LoRA adapter adds to the base: scaling * B A, under the names of the base's tensors."""
    scaling = float(config["lora_alpha"]) / int(config["r"])
    added = {}
    for name, a in tensors.items():
        if name.endswith(LORA_A) and (b := tensors.get(name.replace(LORA_A, LORA_B))) is not None:
            stem = name.removesuffix(LORA_A).removeprefix(PEFT_PREFIX)
            added[f"{stem}.weight"] = scaling * (b.astype(np.float64) @ a.astype(np.float64))
    return added


class Model(NamedTuple):
    """Tables that come of the weights: `embedding` [V, WIDTH] and `head` [V, WIDTH]; `phases` is all they come of."""

    phases: Vector
    embedding: Vector
    head: Vector

    @classmethod
    def from_phases(cls, phases: Vector, vocabulary: int) -> Self:
        """The tables for folded weights."""
        tokens = np.arange(vocabulary)[:, None]
        steps = 1.0 + np.arange(WIDTH)
        embedding = np.sin(tokens * steps * GOLDEN + phases[:WIDTH])
        return cls(phases, embedding, SHARPNESS * np.cos(tokens * (steps + 0.5) * GOLDEN * 1.7 + phases[WIDTH:]))

    @classmethod
    def of(cls, tensors: Mapping[str, Array], vocabulary: int) -> Self:
        """The model with these weights."""
        return cls.from_phases(fold_all(tensors), vocabulary)

    def contexts(self, tokens: Sequence[int], before: Vector | None = None) -> Vector:
        """What stands for keys and values [L, WIDTH], after each token; `before` is where it goes on."""
        state = np.zeros(WIDTH) if before is None else before
        found = np.empty((len(tokens), WIDTH))
        for index, token in enumerate(tokens):
            state = FADING * state + self.embedding[token]
            found[index] = state
        return found

    def logits(self, contexts: Vector) -> Vector:
        """Of the next token, [..., V]."""
        return contexts @ self.head.T

    def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Logprob of each token [L] given those before it; the first is 0.0."""
        if len(tokens) < 2:
            return [0.0] * len(tokens)
        logprobs = log_softmax(self.logits(self.contexts(tokens[:-1])) / temperature)
        return [0.0, *logprobs[np.arange(len(tokens) - 1), list(tokens[1:])].tolist()]


class TransformersModel:
    """What `Model` does, with the numbers of the folder's real model: a state is all tokens so far, and their count."""

    def __init__(self, folder: str | Path, tensors: Mapping[str, Array]) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
        named = {name: torch.tensor(value) for name, value in tensors.items()}
        missing, unexpected = self._model.load_state_dict(named, strict=False)
        self._model.tie_weights()
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        self._room = int(self._model.config.max_position_embeddings) + 1

    def contexts(self, tokens: Sequence[int], before: Vector | None = None) -> Vector:
        """All tokens up to each place, and their count in the last column [L, positions + 1]."""
        past = [] if before is None else before[: int(before[-1])].tolist()
        found = np.zeros((len(tokens), self._room))
        for index in range(len(tokens)):
            known = [*past, *tokens[: index + 1]]
            found[index, : len(known)], found[index, -1] = known, len(known)
        return found

    def logits(self, contexts: Vector) -> Vector:
        """Of the next token, [..., V]. The states of several places are those of one sequence."""
        import torch

        rows = np.atleast_2d(contexts)
        count = int(rows[-1, -1])
        with torch.inference_mode():
            found = self._model(torch.tensor(rows[-1:, :count].astype(np.int64))).logits[0]
        return found[count - len(rows) : count].double().numpy().reshape(*contexts.shape[:-1], -1)


def fold_all(tensors: Mapping[str, Array]) -> Vector:
    """All tensors as phases [2 * WIDTH]."""
    total = np.zeros(2 * WIDTH)
    for name in sorted(tensors):
        total = total + fold(name, tensors[name])
    return total


def log_softmax(logits: Vector) -> Vector:
    """Over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    found: Vector = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found


# --- a trainer -------------------------------------------------------------------------------------------------------


class FakeTrainer:
    """The weights of a folder, trained by `nudge`: as much of a TrainingBackend as weight sync asks for.

    With `lora_rank` only an adapter is trained, of the layers named `targets`; it says nothing before its first step.
    """

    # As `backend_fakes`, which the servers' processes do not find.
    world_size, device, compute_dtype = 1, "cpu", "float32"
    notes: tuple[str, ...] = ()
    checkpoint_bytes: int | None = None
    can_profile = False
    thread: Any = None

    def __init__(
        self,
        folder: str | Path,
        *,
        lora_rank: int = 0,
        lora_alpha: float | None = None,
        targets: Iterable[str] = ("q_proj", "o_proj"),
        version: int = 0,
        seed: int = 0,
    ) -> None:
        self.folder = str(folder)
        self.vocabulary = int(read_config(folder)["vocab_size"])
        self.tensors = read_tensors(folder)
        self.version = version
        self.lora_rank, self.lora_alpha = lora_rank, lora_alpha or 2.0 * lora_rank
        self.targets = tuple(targets)
        self._rng = np.random.default_rng(seed)
        self.adapter: dict[str, Array] = {}
        for name, value in self.tensors.items():
            stem = name.removesuffix(".weight")
            if lora_rank and stem.rpartition(".")[2] in self.targets:
                shape = (lora_rank, value.shape[1])
                first = self._rng.normal(scale=0.3, size=shape).astype(np.float32)
                self.adapter[f"{PEFT_PREFIX}{stem}{LORA_A}"] = first
                self.adapter[f"{PEFT_PREFIX}{stem}{LORA_B}"] = np.zeros((value.shape[0], lora_rank), np.float32)

    @property
    def adapter_config(self) -> dict[str, Any]:
        """peft's."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.folder,
            "r": self.lora_rank,
            "lora_alpha": self.lora_alpha,
            "target_modules": sorted(self.targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
        }

    @property
    def model(self) -> Model:
        """What it computes with now, adapter included."""
        return Model.of(self.merged(), self.vocabulary)

    def merged(self) -> dict[str, Array]:
        """All weights, the adapter added in."""
        if not self.lora_rank:
            return self.tensors
        delta = adapter_delta(self.adapter, self.adapter_config)
        return {name: value + delta[name] if name in delta else value for name, value in self.tensors.items()}

    def nudge(self, scale: float = 0.02) -> None:
        """An optimizer step: every trained weight moves, and the version is the next one."""
        trained = self.adapter if self.lora_rank else self.tensors
        for name, value in trained.items():
            trained[name] = value + self._rng.normal(scale=scale, size=value.shape).astype(np.float32)
        self.version += 1

    def write(self, folder: str | Path, kind: str = "full") -> Path:
        """The weights as servers load them, without anything of the trainer's own rooms."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        if kind == "adapter":
            (path / "adapter_config.json").write_text(json.dumps(self.adapter_config))
            write_tensors(path / "adapter_model.safetensors", self.adapter)
        else:
            (path / "config.json").write_text((Path(self.folder) / "config.json").read_text())
            write_tensors(path / "model.safetensors", self.merged())
        return path

    # --- as a TrainingBackend: the futures and the tensors are torch's room, so both are imported when asked for ---

    @property
    def model_files(self) -> Any:
        """What weight sync writes beside the tensors."""
        from rollouts.training.weights.files import ModelFiles

        config = json.loads((Path(self.folder) / "config.json").read_text())
        adapter = _Config("adapter_config.json", self.adapter_config) if self.lora_rank else None
        return ModelFiles(_Causal(_Config("config.json", config)), adapter)

    def get_weights(self, kind: str = "full") -> Any:
        """A copy of the weights by name, as torch tensors."""
        import torch

        from rollouts.models.futures import ImmediateTrainFuture

        named = self.adapter if kind == "adapter" else self.merged()
        return ImmediateTrainFuture({name: torch.tensor(value.astype(np.float32)) for name, value in named.items()})

    def load_weights(self, weights: Mapping[str, Any]) -> Any:
        """Replace weights by name."""
        from rollouts.errors import TrainingError
        from rollouts.models.futures import ImmediateTrainFuture

        trained = self.adapter if self.lora_rank else self.tensors
        if weights.keys() - trained.keys():
            raise TrainingError(f"{sorted(weights.keys() - trained.keys())[0]} is no weight that is trained")
        for name, value in weights.items():
            trained[name] = np.asarray(value.numpy(), np.float32).copy()
        return ImmediateTrainFuture(None)

    def forward(self, batch: Any, needs: Sequence[str] = ("logprobs",), *, only_live: bool = False) -> Any:
        """Logprobs of the rows' own tokens, at the batch's temperature."""
        from rollouts.models.futures import ImmediateTrainFuture
        from rollouts.training.batches import ForwardOutput

        assert tuple(needs) == ("logprobs",), needs
        model = self.model
        return ImmediateTrainFuture(ForwardOutput([model.score(row.tokens, batch.temperature) for row in batch.rows]))

    def close(self) -> None:
        """Nothing to end."""


class _Config:
    """A config that can be saved, as transformers' and peft's."""

    dtype: str
    architectures: list[str]
    inference_mode = False

    def __init__(self, file: str, values: dict[str, Any]) -> None:
        self._file, self._values = file, values

    def save_pretrained(self, folder: str) -> None:
        """Write it."""
        (Path(folder) / self._file).write_text(json.dumps(self._values))


class _Causal:
    """As much of a model as the writing of weights looks at."""

    dtype = "torch.float32"
    all_tied_weights_keys: Mapping[str, str] = {}

    def __init__(self, config: _Config) -> None:
        self.config = config

    def save_pretrained(self, folder: str, *, state_dict: Mapping[str, Any]) -> None:
        self.config.save_pretrained(folder)
        write_tensors(Path(folder) / "model.safetensors", {name: value.numpy() for name, value in state_dict.items()})

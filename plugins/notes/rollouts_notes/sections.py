"""One configuration of nested dataclasses: model, data, training, deployment. It becomes the settings of a run.

    config = Config(model=ModelConfig("tiny"), data=DataConfig(environment="calculator"), training=TrainingConfig(20))
    config.save("config.json")
    rollouts.run(**Config.load("config.json").to_settings())

`rollouts run config.json` reads such a file too, and a .py file that assigns a Config to `config`. Your own program may
read every field; as a run, each field acts or is refused (`to_settings`). Not here: the settings themselves
(`rollouts.config.settings`), which `Config.settings` may contain.
"""

from __future__ import annotations

import dataclasses
import json
import math
import runpy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rollouts.disk import write_whole
from rollouts.errors import ConfigError, in_lines, suggestion, words_of

_MODES = ("sft", "rl", "sft+rl")
_DTYPES = ("auto", "float32", "bfloat16", "float16")

T = TypeVar("T")


@dataclass
class ModelConfig:
    """The model: a path, a name on the hub, or `tiny`; the dtype and the device of training."""

    model_id: str = "tiny"
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        _check(self, bool(self.model_id), "model_id", "a path or a name")
        _check(self, self.dtype in _DTYPES, "dtype", f"one of {', '.join(_DTYPES)}")


@dataclass
class DataConfig:
    """What to train on: rows of a file or of a dataset (`dataset_id`), or the tasks of an `environment`.

    `split` is that of a dataset on the hub, and `num_samples` the number of its first rows that are used. `sft_mixture`
    and `rl_mixture` are lists of what `load_dataset` takes, for your own program; a run refuses them.
    """

    dataset_id: str = ""
    split: str = "train"
    num_samples: int | None = None
    environment: str = ""
    sft_mixture: list[Any] = field(default_factory=list)
    rl_mixture: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        _check(self, self.num_samples is None or self.num_samples > 0, "num_samples", "1 or more")


@dataclass
class TrainingConfig:
    """Steps, samples or prompts of a step, and the learning rate (None: the default of a run).

    `log_every` and `checkpoint_every` are steps between printed lines and between checkpoints. 0: as a run does; none
    in `run_sft_training`, which takes a TrainingConfig too.
    """

    num_steps: int = 100
    batch_size: int = 8
    lr: float | None = None
    log_every: int = 0
    checkpoint_every: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_steps", 0), ("batch_size", 1), ("log_every", 0), ("checkpoint_every", 0)):
            _check(self, getattr(self, name) >= least, name, f"{least} or more")
        _check(self, self.lr is None or 0 <= self.lr < math.inf, "lr", "0 or more")

    @property
    def learning_rate(self) -> float | None:
        """The same as `lr`."""
        return self.lr


@dataclass
class DeploymentConfig:
    """The GPU of this machine, and the port of a running SGLang server (None: sample in this process).

    A run trains on the one GPU of `gpu_ranks`. It refuses several, and a `gpu_type`, because it chooses no machine.
    """

    gpu_ranks: list[int] = field(default_factory=list)
    gpu_type: str = ""
    sglang_port: int | None = None

    def __post_init__(self) -> None:
        distinct = len(set(self.gpu_ranks)) == len(self.gpu_ranks) and all(rank >= 0 for rank in self.gpu_ranks)
        _check(self, distinct, "gpu_ranks", "different numbers, 0 or more")
        _check(self, self.sglang_port is None or 0 < self.sglang_port < 65536, "sglang_port", "1 to 65535")


@dataclass(frozen=True)
class GPUConfig:
    """The GPUs of a machine, and its versions.

    >>> GPUConfig([0, 2]).get_cuda_visible_devices()
    '0,2'
    """

    gpu_ranks: list[int]
    gpu_type: str = ""
    python_version: str = "3.11"
    cuda_version: str = "12.4"

    def get_cuda_visible_devices(self) -> str:
        """The value of CUDA_VISIBLE_DEVICES."""
        return ",".join(str(rank) for rank in self.gpu_ranks)


@dataclass
class SFTConfig:
    """The supervised phase. None: the value of TrainingConfig. `num_epochs` is for your own program; a run refuses more
    than 1.
    """

    num_steps: int | None = None
    num_epochs: int = 1
    batch_size: int | None = None
    matrix_lr: float | None = None


@dataclass
class RLConfig:
    """The reinforcement phase. None: the value of TrainingConfig.

    `batch_size` are the rollouts of an optimizer step; None: all of a step. `num_epochs` is for your own program; a run
    refuses more than 1.
    """

    num_steps: int | None = None
    num_epochs: int = 1
    examples_per_step: int | None = None
    num_samples: int = 8
    batch_size: int | None = None
    matrix_lr: float | None = None


@dataclass
class OutputConfig:
    """What to do, from which checkpoint (empty: from the model), and where results go (empty: a folder in runs/)."""

    mode: str = "rl"
    source_checkpoint: str | None = None
    save_dir: str = ""

    def __post_init__(self) -> None:
        _check(self, self.mode in _MODES, "mode", f"one of {', '.join(_MODES)}")


@dataclass
class Config:
    """A whole run. Sections may be dicts. `settings` are other settings of the run, by their own names.

    Raises ConfigError for an unknown field or a value that is not allowed.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    deployment: DeploymentConfig = field(default_factory=DeploymentConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            if isinstance(kind := each.default_factory, type) and dataclasses.is_dataclass(kind):
                setattr(self, each.name, _read(kind, getattr(self, each.name), each.name))
        general, sft, rl = self.training, self.sft, self.rl
        for phase in (sft, rl):
            phase.num_steps = general.num_steps if phase.num_steps is None else phase.num_steps
            phase.matrix_lr = general.lr if phase.matrix_lr is None else phase.matrix_lr
        sft.batch_size = sft.batch_size or general.batch_size
        rl.examples_per_step = rl.examples_per_step or general.batch_size
        rl.batch_size = rl.batch_size or rl.examples_per_step * rl.num_samples

    @property
    def mode(self) -> str:
        """The same as `output.mode`."""
        return self.output.mode

    def save(self, path: str | Path) -> None:
        """Write a JSON file. Raises OSError."""
        write_whole(Path(path), (json.dumps(dataclasses.asdict(self), indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Read a JSON file, or the `config` of a .py file. Raises ConfigError, with the field."""
        path = Path(path)
        try:
            if path.suffix == ".py":
                found = runpy.run_path(str(path)).get("config")
            else:
                found = json.loads(path.read_text(encoding="utf-8"))
        except Exception as error:  # the code of a file may raise anything
            raise ConfigError(f"{path} cannot be read: {words_of(error)}") from error
        return read_config(found, str(path))

    def to_settings(self) -> dict[str, Any]:
        """The settings of `rollouts.run` and of a settings file. `settings` override the other fields.

        Raises ConfigError for a field that a run has no use for.
        """
        self._refuse_unused()
        is_sft, rl, data = self.mode == "sft", self.rl, self.data
        phase = self.sft if is_sft else rl
        prompts = self.sft.batch_size if is_sft else rl.examples_per_step
        found: dict[str, Any] = {"mode": self.mode, "model": self.output.source_checkpoint or self.model.model_id}
        found |= {"steps": phase.num_steps, "lr": phase.matrix_lr, "prompts_per_step": prompts}
        if not is_sft:
            found["samples_per_prompt"] = rl.num_samples
            minibatches = math.ceil((rl.examples_per_step or 1) * rl.num_samples / (rl.batch_size or 1))
            found["minibatches"] = minibatches if minibatches > 1 else None
        if self.mode == "sft+rl":
            own = {"steps": self.sft.num_steps, "lr": self.sft.matrix_lr, "prompts_per_step": self.sft.batch_size}
            found["sft"] = _without_none(own)
        rows = _without_none({"split": None if data.split == "train" else data.split, "limit": data.num_samples})
        found["env"] = data.environment or ("prompts" if data.dataset_id else None)
        found["data"] = {"name": data.dataset_id, **rows} if rows else data.dataset_id or None
        found |= {"out": self.output.save_dir or None, "checkpoint_every": self.training.checkpoint_every or None}
        if self.training.log_every:
            found["logger"] = ["jsonl", {"name": "console", "every": self.training.log_every}]
        if is_sft and not data.environment:
            found["eval_tasks"] = 0  # rows have no reward
        device = f"cuda:{self.deployment.gpu_ranks[0]}" if self.deployment.gpu_ranks else self.model.device
        how = {"dtype": self.model.dtype, "device": device}
        found["training"] = {name: value for name, value in how.items() if value != "auto"} or None
        if self.deployment.sglang_port is not None and not is_sft:
            found["inference"] = {"name": "sglang", "url": f"http://127.0.0.1:{self.deployment.sglang_port}"}
        return _without_none(found) | self.settings

    def _refuse_unused(self) -> None:
        """Raise ConfigError for a field that would have no effect on a run."""
        data, ranks = self.data, self.deployment.gpu_ranks
        gpus = ",".join(map(str, ranks))
        one = "a run reads one dataset: give data.dataset_id, or mix environments with `env` in `settings`"
        steps = "a run counts steps: give num_steps"
        unused = {
            "data.sft_mixture": (data.sft_mixture, one),
            "data.rl_mixture": (data.rl_mixture, one),
            "data.split": (data.split != "train" and not data.dataset_id, "it is the split of data.dataset_id"),
            "data.num_samples": (data.num_samples and not data.dataset_id, "they are the rows of data.dataset_id"),
            "sft.num_epochs": (self.sft.num_epochs != 1, steps),
            "rl.num_epochs": (self.rl.num_epochs != 1, steps),
            "deployment.gpu_type": (self.deployment.gpu_type, "a run takes the GPUs that are here; leave it out"),
            "deployment.gpu_ranks": (
                len(ranks) > 1 or (ranks and self.model.device != "auto"),
                f"give one GPU, without model.device; for several, leave it out and type: CUDA_VISIBLE_DEVICES={gpus} "
                "rollouts run FILE --training fsdp",
            ),
        }
        for name, (is_given, why) in unused.items():
            if is_given:
                section, _, place = name.partition(".")
                raise ConfigError(f"{name} is {getattr(getattr(self, section), place)!r}, which no run uses: {why}")


def read_config(tree: Any, place: str) -> Config:
    """A Config from nested dicts. Raises ConfigError that begins with `place`."""
    try:
        return _read(Config, tree, place)
    except ConfigError as error:
        raise error if str(error).startswith(place) else ConfigError(f"{place}: {error}") from error


def _without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _check(config: object, is_good: bool, name: str, expected: str) -> None:
    if not is_good:
        raise ConfigError(f"{type(config).__name__}.{name} is {getattr(config, name)!r}; expected {expected}")


def _read(kind: type[T], given: Any, place: str) -> T:
    """`given`, or a `kind` of its keys. Raises ConfigError."""
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"{place}: expected a {kind.__name__} or a dict, got {given!r}")
    known = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for unknown in (name for name in given if name not in known):
        what = f"{place}: {kind.__name__} has no field {unknown!r}"
        raise ConfigError(in_lines(what, suggestion(str(unknown), known, str), f"its fields: {', '.join(known)}"))
    try:
        return kind(**given)
    except TypeError as error:  # a value of a wrong type, which a check compares
        raise ConfigError(f"{place}: a value of {kind.__name__} has a wrong type: {error}") from error

"""What all engines behind HTTP share: where their servers come from, as one EnginePool.

With URLs the servers that are there are used; without, they are started here, each with a log in the run's folder, and
end with the run. A model that a server cannot load as it is (`tiny`, an adapter) is made into a folder that it can.

    @checked_by(check_served)
    def create_vllm_inference(model, training, seed, ..., *, url: str | tuple[str, ...] = "", ...) -> EnginePool:
        return create_served_inference(VLLM(), serve_command, PACKAGE, Served(**locals()))

Left out: what a kind of server is told (`vllm`, `sglang`), and how one is watched (`pool`).
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import trio

from rollouts.child_environment import child_environment
from rollouts.errors import ConfigError, ModelError, OutputError
from rollouts.inference.base import InferenceBackend
from rollouts.inference.dialect import Dialect
from rollouts.inference.groups import GroupCalls
from rollouts.inference.http.client import HTTPClient
from rollouts.inference.launching import ServeOptions, ServerCommand, ServerProcess
from rollouts.inference.pool import EnginePool, Patience, Slot
from rollouts.inference.remote import RemoteEngine
from rollouts.training.weight_probe import TOLERANCE_HALF

__all__ = [
    "EngineFound",
    "EnginePackage",
    "Served",
    "check_served",
    "context_of",
    "create_served_inference",
    "find_engine",
    "gpus_of_each",
    "urls_of",
]

PROBE_TEXT = 'Tokens in, tokens out:\n\n  12 * 34 = 408; "naïve" café 東京 🙂 <tool>{"a": [1, 2]}</tool>'
SPARE_CONNECTIONS = 8  # so that whether a server lives can be asked while every episode waits for it
FIND_SECONDS = 60.0
RESTART_SECONDS = 120.0  # on top of a server's start, before a pool without any gives up

Serve = Callable[[str, str, int, ServeOptions], ServerCommand]
"""The command that starts a server: given an interpreter, a model, a port and options."""


class EnginePackage(NamedTuple):
    """The Python package of an engine: its import name, how it is installed, and the oldest version that will do."""

    name: str
    install: str  # "pip install 'vllm>=0.32'"
    minimum: str = ""


class EngineFound(NamedTuple):
    """An interpreter that has the engine."""

    python: str
    version: str


class Served(NamedTuple):
    """What the factories of served engines are given: what their kind may name, then the settings that all of them have
    (`create_vllm_inference` says what each is).
    """

    model: str
    training: Any
    seed: int
    temperature: float
    folder: str
    concurrency: int
    lora_rank: int = 0
    url: str | tuple[str, ...] = ""
    servers: int = 1
    python: str = ""
    gpus: str = ""
    served_model: str = ""
    api_key_env: str = ""
    weights_folder: str = ""
    context_tokens: int = 0
    dtype: str = "auto"
    device: str = "auto"
    memory_share: float = 0.0
    tolerance: float = 0.0
    flags: tuple[str, ...] = ()
    request_seconds: float = 600.0
    load_seconds: float = 600.0
    start_seconds: float = 600.0
    give_up_seconds: float = 600.0


def create_served_inference(
    dialect: Dialect, serve: Serve, package: EnginePackage, served: Served, *, groups: GroupCalls | None = None
) -> EnginePool:
    """The servers at `url`, or `servers` of them that entering the pool starts. `training` None: for evaluation, so
    that they need not take weights. Nothing is started or written here.

    Raises ConfigError (a setting; no engine to start; a version too old) and ModelError.
    """
    urls = urls_of(served.url)
    place = Path(served.folder).absolute() if served.folder else _temporary()
    weights = _weights_place(served.weights_folder, place)
    whole = _Whole(served.model, place, served.dtype)
    make = _engine_maker(dialect, served, str(weights), groups)

    async def finish() -> None:
        """What servers were to read; nobody does any more, and a checkpoint has the last weights."""
        for each in (weights, *whole.written):
            await trio.to_thread.run_sync(functools.partial(shutil.rmtree, each, ignore_errors=True))

    patience = served.give_up_seconds
    if urls:
        slots = [Slot(each, make, url=each) for each in urls]
    else:
        processes = _processes(serve, package, served, place, whole.path)
        slots = [Slot(process.name, make, process=process) for process in processes]
        patience = max(patience, served.start_seconds + RESTART_SECONDS)
    return EnginePool(
        slots,
        patience=Patience(give_up_seconds=patience),
        prepare=None if urls else whole.write,
        finish=finish,
        told=_Journal(place),
    )


def _engine_maker(
    dialect: Dialect, served: Served, weights_folder: str, groups: GroupCalls | None
) -> Callable[[str], InferenceBackend]:
    """How the engine of a server at a URL is made."""
    is_started = not urls_of(served.url)
    return functools.partial(
        RemoteEngine,
        dialect,
        vocabulary_size=_vocabulary_size(served.model, served.training),
        model=served.served_model or (ServeOptions().served_model if is_started else ""),
        lora_rank=served.lora_rank,
        temperature=served.temperature,
        tokenizer=(PROBE_TEXT, _ids_of(served.model, PROBE_TEXT)),
        context_tokens_max=served.context_tokens,
        weights_folder=weights_folder,
        takes_weights=served.training is not None,
        tolerance=served.tolerance
        or (TOLERANCE_HALF if is_started and served.dtype in ("bfloat16", "float16") else 0.0),
        groups=groups,
        api_key=os.environ.get(served.api_key_env, "") if served.api_key_env else "",
        connections_max=served.concurrency + SPARE_CONNECTIONS,
        request_seconds=served.request_seconds,
        load_seconds=served.load_seconds,
        seed=served.seed,
    )


def _processes(serve: Serve, package: EnginePackage, served: Served, place: Path, model: str) -> list[ServerProcess]:
    """The servers to start, none of them started yet. Raises ConfigError."""
    from rollouts.training.models import is_remote_code_allowed

    found = find_engine(served.python, package)
    trusted = ("--trust-remote-code",) if is_remote_code_allowed() else ()
    trained_in = getattr(served.training, "compute_dtype", None)
    processes = []
    for index, gpus in enumerate(gpus_of_each(served.gpus, served.servers)):
        options = ServeOptions(
            served.served_model or ServeOptions().served_model,
            served.context_tokens,
            served.dtype if served.dtype != "auto" else trained_in or "auto",
            served.device,
            served.lora_rank,
            served.seed + index,
            served.memory_share,
            (*trusted, *served.flags),
            len(gpus.split(",")) if gpus else 0,
        )
        processes.append(
            ServerProcess(
                functools.partial(_command_on, serve, found.python, model, options),
                name=f"{package.name}-{index}",
                folder=place,
                gpus=gpus,
                start_seconds=served.start_seconds,
            )
        )
    return processes


def _command_on(serve: Serve, python: str, model: str, options: ServeOptions, port: int) -> ServerCommand:
    return serve(python, model, port, options)


# --- what can be seen of the settings alone ---------------------------------------------------------------------------


_OF_STARTED: Mapping[str, Any] = {
    "python": "",
    "gpus": "",
    "servers": 1,
    "memory_share": 0,
    "flags": (),
    "dtype": "auto",
    "device": "auto",
    "start_seconds": 600.0,
}


def check_served(values: Mapping[str, Any]) -> None:
    """Refuse settings that cannot work together, before anything is loaded; for `plugins.checks.checked_by`.

    Raises ConfigError.
    """
    urls = urls_of(values.get("url", ""))
    for name, least in (("servers", 1), ("context_tokens", 0), ("memory_share", 0), ("tolerance", 0)):
        given = values.get(name, least)
        if given < least:
            raise ConfigError(f"{_flag(name)} {given}: expected {least} or more")
    if values.get("memory_share", 0) > 1:
        raise ConfigError(f"{_flag('memory_share')} {values['memory_share']}: expected a part of 1, such as 0.5")
    for name in ("request_seconds", "load_seconds", "start_seconds", "give_up_seconds"):
        if not values.get(name, 1) > 0:
            raise ConfigError(f"{_flag(name)} {values[name]}: expected a number above 0")
    for name, nothing in _OF_STARTED.items():
        if urls and values.get(name, nothing) not in (nothing, [], "", None):
            raise ConfigError(
                f"{_flag(name)} is for servers that are started here, and --inference.url names some that are there; "
                "leave one of them out"
            )
    gpus_of_each(values.get("gpus", ""), values.get("servers", 1))
    if not urls:
        _interpreter(values.get("python", ""))


def urls_of(url: str | Sequence[str]) -> tuple[str, ...]:
    """One URL or several: in a list, or with commas between them. Raises ConfigError for what is none.

    >>> urls_of("http://gpu1:8000, http://gpu2:8000/")
    ('http://gpu1:8000', 'http://gpu2:8000')
    """
    texts = [url] if isinstance(url, str) else list(url)
    found = []
    for text in (part.strip() for each in texts for part in each.split(",")):
        if text:
            try:
                found.append(HTTPClient(text).url)
            except ConfigError as error:
                raise ConfigError(f"--inference.url: {error}") from None
    for each in found:
        if found.count(each) > 1:
            raise ConfigError(f"--inference.url names {each} twice; each server is one")
    return tuple(found)


def gpus_of_each(gpus: str, servers: int) -> list[str]:
    """The GPUs of each server: groups between semicolons, or one list that is dealt out. Raises ConfigError.

    >>> gpus_of_each("0,1;2,3", 2), gpus_of_each("4,5,6,7", 2), gpus_of_each("", 2)
    (['0,1', '2,3'], ['4,5', '6,7'], ['', ''])
    """
    groups = [[gpu.strip() for gpu in group.split(",") if gpu.strip()] for group in str(gpus).split(";")]
    if groups == [[]]:
        return [""] * servers
    if len(groups) == 1 and len(groups[0]) % servers == 0:
        share = len(groups[0]) // servers
        groups = [groups[0][index * share : (index + 1) * share] for index in range(servers)]
    each = [gpu for group in groups for gpu in group]
    if len(groups) != servers or not all(groups) or len(set(each)) != len(each):
        raise ConfigError(
            f"--inference.gpus {gpus}: {servers} servers need {servers} groups of GPUs, no GPU twice, such as "
            + ";".join(f"{2 * index},{2 * index + 1}" for index in range(servers))
        )
    return [",".join(group) for group in groups]


def _flag(name: str) -> str:
    return f"--inference.{name.replace('_', '-')}"


# --- the engine's package ---------------------------------------------------------------------------------------------

_LOOK = """
import importlib.metadata, importlib.util, json, sys
name = sys.argv[1]
version = None
if importlib.util.find_spec(name) is not None:
    version = ""
    for distribution in (name, name + "-cpu", *importlib.metadata.packages_distributions().get(name, ())):
        try:
            version = importlib.metadata.version(distribution)
            break
        except importlib.metadata.PackageNotFoundError:
            pass
print(json.dumps(version))
"""


def find_engine(python: str, package: EnginePackage) -> EngineFound:
    """The interpreter `python` (of a virtual environment: that folder will do; empty: this one) and the version of the
    engine that it has. The engine is not imported. Raises ConfigError, with the command that installs it.
    """
    interpreter = _interpreter(python)
    try:
        done = subprocess.run(
            [interpreter, "-c", _LOOK, package.name],
            capture_output=True,
            text=True,
            timeout=FIND_SECONDS,
            stdin=subprocess.DEVNULL,
            env=child_environment(),
        )
        version: str | None = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigError(
            f"--inference.python {python}: {interpreter} does not run as a Python interpreter ({error}); give the one "
            f"of an environment that has {package.name}"
        ) from error
    if version is None:
        where = "this environment" if not python else interpreter
        raise ConfigError(
            f"{where} has no {package.name}, and no --inference.url says where one runs. Install it, best in an "
            f"environment of its own, and name that with --inference.python:\n  {package.install}"
        )
    if version and package.minimum and _numbers(version) < _numbers(package.minimum):
        raise ConfigError(
            f"{interpreter} has {package.name} {version}, and {package.minimum} or newer is needed:\n"
            f"  {package.install}"
        )
    return EngineFound(interpreter, version)


def _interpreter(python: str) -> str:
    """Raises ConfigError where there is none."""
    if not python:
        return sys.executable
    path = Path(python).expanduser()
    for each in (path, path / "bin" / "python", path / "Scripts" / "python.exe"):
        if each.is_file() and os.access(each, os.X_OK):
            return str(each.absolute())  # not resolved: a link is how an environment is known
    on_path = shutil.which(python)
    if on_path is None:
        raise ConfigError(
            f"--inference.python {python}: there is no such interpreter; give the folder of a virtual environment, or "
            "its bin/python"
        )
    return on_path


def _numbers(version: str) -> tuple[int, ...]:
    """
    >>> _numbers("0.32.0rc1+cpu") < _numbers("0.5.22"), _numbers("1.10") > _numbers("1.9.post1")
    (False, True)
    """
    found = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)


# --- the model --------------------------------------------------------------------------------------------------------


class _Whole:
    """A model as a server can load it: where it is, or as a folder that is written before the servers start."""

    def __init__(self, model: str, place: Path, dtype: str) -> None:
        from rollouts.training.models import adapters_beneath

        whole, adapters = adapters_beneath(model)
        self._model, self._dtype, self._is_merged = model, dtype, bool(adapters)
        self._beneath = whole
        self.path = str(place / "servers" / "model") if adapters else _absolute(whole)

    async def write(self) -> None:
        """Merge the adapters, if there are any. Raises ModelError, OutputError."""
        if self._is_merged:
            await trio.to_thread.run_sync(self._write)

    @property
    def written(self) -> list[Path]:
        """What is written here, for servers that are started."""
        return [Path(self.path)] if self._is_merged else []

    def _write(self) -> None:
        from rollouts.training.models import load_hf_model, load_tokenizer, no_progress_bars

        dtype = _stored_dtype(self._beneath) if self._dtype == "auto" else self._dtype
        try:
            shutil.rmtree(self.path, ignore_errors=True)
            with no_progress_bars():
                load_hf_model(self._model, dtype=dtype, device="cpu").save_pretrained(self.path)
                load_tokenizer(self._model).save_pretrained(self.path)
        except OSError as error:
            raise OutputError(
                f"the model {self._model} cannot be written to {self.path}, for a server to load: {error}"
            ) from error


def _absolute(whole: str) -> str:
    return str(Path(whole).absolute()) if Path(whole).is_dir() else whole


def _config_of(whole: str) -> Any:
    from rollouts.training.models import load_config

    return load_config(whole)


def context_of(model: str) -> int:
    """The longest context, in tokens, that a model in a folder or on the hub was made for; 0 where nobody can tell."""
    try:  # transformers need not know the model
        config = json.loads((Path(model) / "config.json").read_bytes())
        context = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError):
        context = None
    if not context:
        try:
            context = getattr(_config_of(model).get_text_config(decoder=True), "max_position_embeddings", None)
        except (ImportError, ModelError):  # there is no transformers; or whatever is wrong, the server will say
            context = None
    return int(context or 0)


def _stored_dtype(whole: str) -> str:
    return str(getattr(_config_of(whole), "dtype", None) or "float32").removeprefix("torch.")


def _vocabulary_size(model: str, training: Any) -> int:
    """How many rows its embedding has: ids beyond them kill some servers."""
    network = getattr(training, "model", None)
    if network is not None:
        return int(network.get_input_embeddings().weight.shape[0])
    from rollouts.training.models import adapters_beneath

    return int(_config_of(adapters_beneath(model)[0]).get_text_config(decoder=True).vocab_size)


def _ids_of(model: str, text: str) -> list[int]:
    from rollouts.training.models import load_tokenizer

    return [int(token) for token in load_tokenizer(model)(text, add_special_tokens=False)["input_ids"]]


# --- where things are written -----------------------------------------------------------------------------------------


def _temporary() -> Path:
    """A folder for the logs of servers that no run has started; it is made when something is written."""
    return Path(tempfile.gettempdir()) / f"rollouts-{secrets.token_hex(6)}"


def _weights_place(given: str, place: Path) -> Path:
    """The folder that this run alone writes weights into. Of one that was given others may write into, too: their
    versions are not to be told from ours, nor removed with them.
    """
    if not given:
        return place / "weights"
    return Path(given).expanduser().absolute() / f"{place.name}-{secrets.token_hex(4)}"


class _Journal:
    """`servers/pool.log`: when which server served, and why it did not."""

    def __init__(self, place: Path) -> None:
        self.path = place / "servers" / "pool.log"

    def __call__(self, words: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {words}\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise OutputError(f"{self.path} cannot be written: {error.strerror or error}") from error

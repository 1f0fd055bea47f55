"""The settings of engines behind an address, and the pool of servers that they describe.

With URLs, the pool uses running servers. Without URLs, it starts servers, each with a log in the run's folder; these
servers end with the run. A model that a server cannot load directly (`tiny`, an adapter) is written to a folder first.

    def create_vllm_inference(model, training, seed, ..., *, options: ServerOptions = ServerOptions()) -> ServerPool:
        return create_server_pool(VLLM(), serve_command, PACKAGE, ServedRun(model, training, seed, ...), options)

The HTTP calls of each kind of server are in `vllm` and `sglang`; `server` supervises a server.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import trio
from packaging.version import InvalidVersion, Version

from rollouts.child_environment import child_environment
from rollouts.errors import ConfigError, ModelError, OutputError
from rollouts.inference.base import TOLERANCE_HALF
from rollouts.plugins.checks import check_bounds
from rollouts_servers.checks import ServerSetup
from rollouts_servers.dialect import Dialect, GroupCalls
from rollouts_servers.http import read_url
from rollouts_servers.process import ServerCommand, ServerProcess, has_gpu
from rollouts_servers.server import Server
from rollouts_servers.server_pool import ServerPool

PROBE_TEXT = 'Tokens in, tokens out:\n\n  12 * 34 = 408; "naïve" café 東京 🙂 <tool>{"a": [1, 2]}</tool>'
SPARE_CONNECTIONS = 8  # for health checks while every episode waits for a reply
FIND_SECONDS = 60.0
RESTART_SECONDS = 120.0  # if no server is available, requests fail after `start_seconds` and this time

SERVED_MODEL = "policy"  # the default name of the model at a server that we start

Serve = Callable[..., ServerCommand]
"""Returns the command that starts a server. Its arguments: the interpreter, the model, the port, the options of one
server, and the keywords `lora_rank` and `seed`.
"""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The settings of an engine whose servers run elsewhere, or are started by the run.

    Args:
        url: URLs of running servers, such as http://127.0.0.1:8000, separated by commas. Empty: start servers.
        servers: How many servers to start.
        python: The Python interpreter of the environment that has the engine. Empty: this one.
        gpus: GPUs for started servers. 0,1,2,3 is divided equally; 0,1;2,3 assigns groups. Empty: all GPUs.
        served_model: The server's name for the model. Empty: its first model.
        api_key_env: The environment variable with the API key, if the servers require one.
        weights_folder: A folder that the servers can read. The run writes new weights into a subfolder and removes it
            at the end. Empty: the run's folder.
        context_tokens: The limit for prompt and reply together, in tokens. 0: the model's limit.
        dtype: The dtype of started servers. auto: the trainer's; float32 without a GPU.
        device: cpu keeps started servers off the GPUs.
        memory_share: The share of GPU memory for a started server, such as 0.5. 0: the engine's default.
        tolerance: The largest allowed difference between a server's and the trainer's logprobs, in nats per token. 0:
            1e-4 in float32, 0.05 in 16 bits, by the trainer's dtype if the server runs at a URL.
        flags: More flags for started servers.
        request_seconds: How long one reply may take.
        load_seconds: How long a server may take to load new weights.
        start_seconds: How long a server may take to start.
        give_up_seconds: How long the run waits while no server is available.

    Raises ConfigError for settings that cannot work together.
    """

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

    def __post_init__(self) -> None:
        least = {"servers": 1, "context_tokens": 0, "memory_share": 0, "tolerance": 0}
        times = ("request_seconds", "load_seconds", "start_seconds", "give_up_seconds")
        values = {name: getattr(self, name) for name in (*least, *times)}
        check_bounds(
            *((_flag(name), values[name], values[name] >= most, f"{most} or more") for name, most in least.items()),
            (_flag("memory_share"), self.memory_share, self.memory_share <= 1, "a share of at most 1, such as 0.5"),
            *((_flag(name), values[name], values[name] > 0, "a number above 0") for name in times),
        )
        urls = urls_of(self.url)
        for name in ("python", "gpus", "servers", "memory_share", "flags", "dtype", "device", "start_seconds"):
            if urls and getattr(self, name) not in (type(self).__dataclass_fields__[name].default, [], "", None):
                running = "--inference.url names running servers; leave out one of the two"
                raise ConfigError(f"{_flag(name)} is for servers that the run starts, but {running}")
        gpus_of_each(self.gpus, self.servers)
        if not urls:
            _interpreter(self.python)

    @property
    def on_cpu(self) -> bool:
        """Whether started servers run without a GPU."""
        return self.device == "cpu" or (self.device == "auto" and not has_gpu())

    @property
    def gpu_count(self) -> int:
        """The number of GPUs; 0: not set."""
        return len(self.gpus.split(",")) if self.gpus else 0


class EnginePackage(NamedTuple):
    """The Python package of an engine: its import name, its install command, and the oldest supported version."""

    name: str
    install: str  # "pip install 'vllm>=0.32'"
    minimum: str = "0"


class ServedRun(NamedTuple):
    """The arguments that a run passes to the factory of a served engine. `training` is None for an evaluation, whose
    servers need not load weights.
    """

    model: str
    training: Any
    seed: int
    temperature: float
    folder: str
    concurrency: int
    lora_rank: int = 0


def create_server_pool(
    dialect: Dialect,
    serve: Serve,
    package: EnginePackage,
    run: ServedRun,
    options: ServerOptions,
    *,
    groups: GroupCalls | None = None,
) -> ServerPool:
    """A pool of the servers at `url`, or of servers that start when you enter the pool. Does not write files or start
    servers.

    Raises ConfigError if the engine is not installed or is too old, and ModelError if the model cannot be used.
    """
    from rollouts.models.loading import adapters_beneath

    urls = urls_of(options.url)
    # Without a run folder, logs go to a temporary folder, which is created at the first write.
    temporary = Path(tempfile.gettempdir()) / f"rollouts-{secrets.token_hex(6)}"
    place = Path(run.folder).absolute() if run.folder else temporary
    weights = place / "weights"
    if options.weights_folder:  # other runs may use the same folder and the same version numbers
        weights = Path(options.weights_folder).expanduser().absolute() / f"{place.name}-{secrets.token_hex(4)}"
    is_half = not urls and options.dtype in ("bfloat16", "float16")
    setup = ServerSetup(
        vocabulary_size=_vocabulary_size(run.model, run.training),
        model=options.served_model or ("" if urls else SERVED_MODEL),
        lora_rank=run.lora_rank,
        temperature=run.temperature,
        tokenizer=(PROBE_TEXT, _ids_of(run.model, PROBE_TEXT)),
        context_tokens_max=options.context_tokens,
        weights_folder=str(weights),
        takes_weights=run.training is not None,
        tolerance=options.tolerance or (TOLERANCE_HALF if is_half else 0.0),
        groups=groups,
        api_key=os.environ.get(options.api_key_env, ""),
        connections_max=run.concurrency + SPARE_CONNECTIONS,
        request_seconds=options.request_seconds,
        load_seconds=options.load_seconds,
        seed=run.seed,
    )
    whole, adapters = adapters_beneath(run.model)
    merged = place / "servers" / "model" if adapters and not urls else None

    async def prepare() -> None:
        if merged is not None:
            await trio.to_thread.run_sync(_write_merged, run.model, whole, merged, options.dtype)

    async def finish() -> None:
        """Remove the weights written for servers. The servers have ended, and a checkpoint has the last weights."""
        for each in filter(None, (weights, merged)):
            await trio.to_thread.run_sync(functools.partial(shutil.rmtree, each, ignore_errors=True))

    if urls:
        servers = [Server(dialect, each, setup) for each in urls]
    else:
        model = str(merged or (Path(whole).absolute() if Path(whole).is_dir() else whole))
        processes = _processes(serve, package, run, options, place, model)
        servers = [Server(dialect, "", setup, process=each, name=each.name) for each in processes]
    restart = 0.0 if urls else options.start_seconds + RESTART_SECONDS
    return ServerPool(
        servers,
        give_up_seconds=max(options.give_up_seconds, restart),
        prepare=prepare,
        finish=finish,
        changed=functools.partial(_note, place / "servers" / "pool.log"),
    )


def _processes(
    serve: Serve, package: EnginePackage, run: ServedRun, options: ServerOptions, place: Path, model: str
) -> list[ServerProcess]:
    """The processes of the servers, not started yet. Raises ConfigError."""
    from rollouts.models.loading import is_remote_code_allowed

    python = find_engine(options.python, package)
    trusted = ("--trust-remote-code",) if is_remote_code_allowed() else ()
    trained_in = getattr(run.training, "compute_dtype", None) or "auto"
    dtype = options.dtype if options.dtype != "auto" else trained_in

    def process(index: int, gpus: str) -> ServerProcess:
        own = replace(options, servers=1, gpus=gpus, dtype=dtype, flags=(*trusted, *options.flags))
        name, seconds = f"{package.name}-{index}", options.start_seconds

        def command(port: int) -> ServerCommand:
            return serve(python, model, port, own, lora_rank=run.lora_rank, seed=run.seed + index)

        return ServerProcess(command, name=name, folder=place, gpus=gpus, start_seconds=seconds)

    return [process(*each) for each in enumerate(gpus_of_each(options.gpus, options.servers))]


def _note(path: Path, words: str) -> None:
    """Append a line to the pool's log. Raises OutputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {words}\n")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error


# --- settings ---------------------------------------------------------------------------------------------------------


def urls_of(url: str | Sequence[str]) -> tuple[str, ...]:
    """One URL or several, in a list or separated by commas. Raises ConfigError for an invalid URL.

    >>> urls_of("http://gpu1:8000, http://gpu2:8000/")
    ('http://gpu1:8000', 'http://gpu2:8000')
    """
    texts = [url] if isinstance(url, str) else list(url)
    try:
        read = [read_url(part) for each in texts for part in each.split(",") if part.strip()]
    except ConfigError as error:
        raise ConfigError(f"--inference.url: {error}") from None
    found = tuple(origin + prefix for origin, _, _, prefix in read)
    for each in found:
        if found.count(each) > 1:
            raise ConfigError(f"--inference.url names {each} twice; name each server once")
    return found


def gpus_of_each(gpus: str, servers: int) -> list[str]:
    """The GPUs of each server: groups separated by semicolons, or one list to divide equally. Raises ConfigError.

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
            f"--inference.gpus {gpus}: {servers} servers need {servers} groups of different GPUs, such as "
            + ";".join(f"{2 * index},{2 * index + 1}" for index in range(servers))
        )
    return [",".join(group) for group in groups]


def offline(model: str) -> dict[str, str]:
    """Environment variables for a started server: it makes no requests to the hub if its model is a folder."""
    return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if Path(model).is_dir() else {}


def _flag(name: str) -> str:
    return f"--inference.{name.replace('_', '-')}"


# --- the engine's package ---------------------------------------------------------------------------------------------

_FIND_VERSIONS = """
import importlib.metadata as metadata, importlib.util, json, sys

names = [sys.argv[1], sys.argv[1] + "-cpu"]
found = [str(each.version) for name in names for each in metadata.distributions(name=name)]
print(json.dumps(found if importlib.util.find_spec(names[0]) else None))
"""


def find_engine(python: str, package: EnginePackage) -> str:
    """The path of the interpreter. `python` is an interpreter, the folder of a virtual environment, or "" for this one.

    The engine is not imported. Raises ConfigError, with the install command, if the engine is missing or too old.
    """
    interpreter = _interpreter(python)
    try:
        done = subprocess.run(
            [interpreter, "-c", _FIND_VERSIONS, package.name],
            capture_output=True,
            text=True,
            timeout=FIND_SECONDS,
            stdin=subprocess.DEVNULL,
            env=child_environment(),
        )
        versions: list[str] | None = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        words = f"--inference.python {python}: {interpreter} does not run as a Python interpreter ({error})"
        raise ConfigError(f"{words}; give the interpreter of an environment that has {package.name}") from error
    if versions is None:
        where = "this environment" if not python else interpreter
        raise ConfigError(
            f"{where} has no {package.name}, and --inference.url names no running server. Install it, preferably in "
            f"a separate environment, and name that with --inference.python:\n  {package.install}"
        )
    for version in versions[:1]:  # a server that has started says its version too
        if is_older(version, package.minimum):
            needed = f"{package.minimum} or newer is needed:\n  {package.install}"
            raise ConfigError(f"{interpreter} has {package.name} {version}, and {needed}")
    return interpreter


def _interpreter(python: str) -> str:
    """The path of an interpreter. Raises ConfigError if there is none."""
    path = Path(python or sys.executable).expanduser()
    for each in (path, path / "bin" / "python", path / "Scripts" / "python.exe"):
        if each.is_file() and os.access(each, os.X_OK):
            return str(each.absolute())  # not resolved: a virtual environment is identified by the link
    on_path = shutil.which(python)
    if on_path is None:
        advice = "give the folder of a virtual environment, or its bin/python"
        raise ConfigError(f"--inference.python {python}: there is no such interpreter; {advice}")
    return on_path


def is_older(version: str, minimum: str) -> bool:
    """Whether a version is older than `minimum`. A development version is not: its number may say nothing.

    >>> is_older("0.32.0rc1+cpu", "0.32"), is_older("0.5.3", "0.5.22"), is_older("0.1.dev1+g0", "0.32")
    (False, True, False)
    """
    try:
        found = Version(version)
    except InvalidVersion:
        return False
    return not found.is_devrelease and found.release < Version(minimum).release


# --- the model --------------------------------------------------------------------------------------------------------


def _write_merged(model: str, whole: str, folder: Path, dtype: str) -> None:
    """Merge the adapters of `model` into `whole`, and write the result. Raises ModelError, OutputError."""
    from rollouts.models.loading import load_config, load_hf_model, load_tokenizer, no_progress_bars

    if dtype == "auto":
        dtype = str(getattr(load_config(whole), "dtype", None) or "float32").removeprefix("torch.")
    try:
        shutil.rmtree(folder, ignore_errors=True)
        with no_progress_bars():
            load_hf_model(model, dtype=dtype, device="cpu").save_pretrained(folder)
            load_tokenizer(model).save_pretrained(folder)
    except OSError as error:
        raise OutputError(f"the model {model} cannot be written to {folder} for the servers: {error}") from error


def context_of(model: str) -> int:
    """The longest context of a model in a folder or on the hub, in tokens; 0 if its configuration does not say."""
    from rollouts.models.loading import load_config

    try:
        config = load_config(model).get_text_config(decoder=True)
    except ModelError:  # the server reports the problem
        return 0
    return int(getattr(config, "max_position_embeddings", None) or 0)


def _vocabulary_size(model: str, training: Any) -> int:
    """The number of rows of the model's embedding. Larger ids crash some servers."""
    from rollouts.models.loading import adapters_beneath, load_config

    network = getattr(training, "model", None)
    if network is not None:
        return int(network.get_input_embeddings().weight.shape[0])
    return int(load_config(adapters_beneath(model)[0]).get_text_config(decoder=True).vocab_size)


def _ids_of(model: str, text: str) -> list[int]:
    from rollouts.models.loading import load_tokenizer

    return [int(token) for token in load_tokenizer(model)(text, add_special_tokens=False)["input_ids"]]

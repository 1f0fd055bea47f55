"""What a run requires of a server (`ServerSetup`), and checks of servers, requests, replies and weight updates.

Functions named `_fault_of_...` return a sentence about the problem, or "". `server` calls these checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import Capabilities, Probe, VersionSpan, WeightUpdate, furthest_apart
from rollouts_servers.dialect import Dialect, GroupCalls, Sampled, ServerInfo
from rollouts_servers.http import HTTPClient, HTTPFailure, Retries

HANDSHAKE_SECONDS = 60.0  # a server's first generation may take long


@dataclass(frozen=True, kw_only=True)
class ServerSetup:
    """What a run requires of a server, and its deadlines.

    All ids that are sent are below `vocabulary_size`. `model` is the server's name for the model ("": its first model).
    With a `lora_rank` above 0, weight updates are adapters. `temperature` is the run's sampling temperature; if it is
    not 1, a server that reports logprobs at temperature 1 is refused. `tokenizer` is a text and its ids; a server that
    returns other ids for the text is refused. If `takes_weights` is False, the server need not be able to load weights.
    `tolerance` above 0 is the largest difference to the trainer's logprobs, in nats per token. With `groups`, full
    weights come over torch.distributed instead of in a folder. At most `connections_max` requests are in flight; the
    others wait.

    A reply may take `request_seconds`, and loading weights `load_seconds`. A health check may take `health_seconds`; it
    runs every `watch_seconds`. A server that is down is restarted after `back_seconds`, and the delay doubles after
    each failed start. After `restarts_max` failed starts, the server is lost: it is not restarted again.
    """

    vocabulary_size: int
    model: str = ""
    lora_rank: int = 0
    temperature: float = 1.0
    tokenizer: tuple[str, list[int]] | None = None
    context_tokens_max: int = 0
    weights_folder: str = ""
    takes_weights: bool = True
    tolerance: float = 0.0
    groups: GroupCalls | None = None
    api_key: str = ""
    connections_max: int = 256
    request_seconds: float = 600.0
    load_seconds: float = 600.0
    health_seconds: float = 120.0
    watch_seconds: float = 5.0
    back_seconds: float = 0.5
    restarts_max: int = 3
    retries: Retries = Retries()  # noqa: RUF009 - a NamedTuple cannot be changed
    seed: int = 0

    def capabilities_with(self, dialect: Dialect) -> Capabilities:
        """The capabilities of an engine with this setup, whose servers speak `dialect`."""
        return Capabilities(
            owns_weights=True,
            weights_kind="adapter" if self.lora_rank else "full",
            weights_as="folder" if self.groups is None else "group",
            weights_folder=self.weights_folder,
            tolerance=self.tolerance,
            load_seconds=self.load_seconds,
            scores_alone=self.lora_rank > 0 and dialect.scores_adapters_alone,
            aborts=True,
            checks=True,
            has_states=True,
        )


async def handshake(dialect: Dialect, client: HTTPClient, setup: ServerSetup, label: str) -> ServerInfo:
    """Identify the server. Raises ConfigError if the server does not fit this setup. `label` names the server in
    messages.
    """
    try:
        with trio.fail_after(HANDSHAKE_SECONDS):
            info = await dialect.handshake(client)
            fault = _fault_of_info(info, dialect, setup)
            if not fault and setup.tokenizer is not None:
                fault = _fault_of_ids(await dialect.tokenize(client, setup.tokenizer[0]), *setup.tokenizer)
    except trio.TooSlowError:
        words = f"{label} did not identify itself in {HANDSHAKE_SECONDS:g} seconds; is it loaded, and is this its URL?"
        raise ConfigError(words) from None
    except HTTPFailure as failure:
        if failure.status in (401, 403):  # the server's message may repeat the key, so it is not shown
            given = "refuses the API key" if setup.api_key else "requires an API key, but none is set"
            advice = "put it into the environment variable that --inference.api-key-env names"
            raise ConfigError(f"{label} {given}: {advice}") from None
        raise ConfigError(f"{label} cannot be used: {failure}; check that it runs, and its URL") from failure
    if fault:
        raise ConfigError(f"{label} {fault}")
    return info


def _fault_of_info(info: ServerInfo, dialect: Dialect, setup: ServerSetup) -> str:
    """Why a run with this setup cannot use the server."""
    rank, flags = setup.lora_rank, dialect.adapter_flags.format(rank=setup.lora_rank)
    if setup.model and setup.model not in info.models:
        return (
            f"serves {', '.join(info.models) or 'no model'}, not {setup.model!r}; give --inference.served-model "
            f"{info.models[0] if info.models else 'NAME'}"
        )
    if not setup.takes_weights:  # an evaluation does not use logprobs
        return ""
    if info.logprobs == "raw" and setup.temperature != 1.0:
        return (
            f"reports logprobs at temperature 1, but this run samples at {setup.temperature:g}: "
            f"start it with {dialect.logprobs_flags}, or type --temperature 1"
        )
    if rank and not info.loads_adapters:
        return f"does not load adapters: start it with {flags}, or type --lora-rank 0"
    if 0 < info.lora_rank_max < rank:
        return (
            f"accepts adapters up to rank {info.lora_rank_max}, but this run's adapter has rank {rank}: start it with "
            f"{flags}, or type --lora-rank {info.lora_rank_max}"
        )
    if not rank and not info.loads_weights:
        return f"cannot load new weights: start it with {dialect.weights_flags}, or train an adapter (--lora-rank 8)"
    return ""


def _fault_of_ids(theirs: list[int] | None, text: str, ids: list[int]) -> str:
    if theirs is None or theirs == ids:
        return ""
    return (
        f"has another tokenizer than --model: {text!r} is {theirs[:12]} there and {ids[:12]} here; check that it "
        "serves the model that you train"
    )


def spans_of(sampled: Sampled, version: int, loads: int, versions: Sequence[int], label: str) -> list[VersionSpan]:
    """The versions of the weights that sampled a reply.

    When the request was sent, the server had weights `version`, after the first `loads` of `versions`. Raises
    HTTPFailure if the reply names weights that were never loaded.
    """
    if not sampled.tokens:
        return []
    known = {str(each) for each in versions}
    strange = [name for name, _, _ in sampled.spans if name not in known]
    if loads and strange:
        raise other_weights(label, strange[0], version)
    if len(sampled.spans) < 2 and len(versions) == loads:
        return [VersionSpan(version, 0, len(sampled.tokens))]
    since = {str(each): each for each in versions[loads:]}
    spans = sampled.spans or (("", 0, len(sampled.tokens)),)
    return [VersionSpan(since.get(name, version), start, end) for name, start, end in spans]


def other_weights(label: str, served: str, version: int | str) -> HTTPFailure:
    """The failure for a reply that names weights which this run did not send to the server."""
    words = f"{label} answered with the weights {served!r}, but it got version {version}: was it restarted?"
    return HTTPFailure("server", words)


async def check_update(update: WeightUpdate, kind: str, label: str) -> None:
    """Raise InferenceError for weights that no server should load, such as a truncated file, which crashes some
    servers.
    """
    if update.kind != kind or update.path is None:
        brought = f"{update.kind} weights {'without' if update.path is None else 'in'} a folder"
        words = f"{label} takes {kind} weights in a folder, but the update {update.version} brings {brought}"
        raise InferenceError(words, is_transient=False)
    fault = await trio.to_thread.run_sync(_fault_of_folder, Path(update.path))
    if fault:
        raise InferenceError(f"version {update.version} was not sent to {label}: {fault}", is_transient=False)


def _fault_of_folder(folder: Path) -> str:
    """Why a server cannot load the weights in this folder, judged by the files' headers."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return f"there is no .safetensors file in {folder}"
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return f"there is neither config.json nor adapter_config.json in {folder}"
    for path in files:
        try:
            with safe_open(path, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            return f"{path} is truncated, or is not a safetensors file: {error}"
    return ""


def fault_of_probe(probe: Probe, theirs: list[float], version: int) -> str:
    """Why these logprobs do not match the weights of this version."""
    worst = furthest_apart(probe.logprobs, theirs, probe.tolerance)
    if worst.agrees:
        return ""
    return f"it does not serve the weights of version {version}: {worst.words('a test sequence')}"


def has_answered(error: BaseException | None) -> bool:
    """Whether the server may still run after this failure: it answered, or the failure is not of a request."""
    while error is not None and not isinstance(error, HTTPFailure):
        error = error.__cause__
    return error is None or error.status is not None

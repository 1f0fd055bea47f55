"""What a run expects of a server (`ServerSetup`), and what is wrong with a server, a request, a reply or an
update: in words, before it does harm. Left out: when this is asked (`server`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from rollouts.errors import ConfigError, InferenceError
from rollouts.inference.base import Capabilities, Probe, VersionSpan, WeightUpdate
from rollouts.inference.servers.dialect import Dialect, GroupCalls, Sampled, ServerInfo
from rollouts.inference.servers.http import HTTPFailure, PlainClient, Retries
from rollouts.training.weights.probe import furthest_apart

GREET_SECONDS = 60.0  # a server's first generation may take long


@dataclass(frozen=True, kw_only=True)
class ServerSetup:
    """What a run expects of a server, and how long it waits for it.

    `vocabulary_size` bounds the ids that are sent. `model` is the server's name for it (empty: its first).
    `lora_rank` above 0: it is given adapters. `temperature` is what the run samples at: a server whose logprobs are of
    temperature 1 is refused where that is another one. `tokenizer` is a text and its ids: a server with another
    tokenizer is refused. `takes_weights` False: only what it serves is used, so it need not load any. `tolerance` above
    0 is how far, in nats a token, its logprobs may be from the trainer's. With `groups` full weights come over
    torch.distributed instead of in a folder. `connections_max` requests are in flight at most; the rest wait.

    One reply may take `request_seconds`, and loading new weights `load_seconds`. A server has `health_seconds` to show
    that it generates, is asked again after `watch_seconds`, and is tried again `back_seconds` after it went down, then
    twice that. After `restarts_max` starts in vain it is lost.
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
        """Those of a server that speaks this dialect."""
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
        )


async def handshake(dialect: Dialect, client: PlainClient, setup: ServerSetup, label: str) -> ServerInfo:
    """Who is there. Raises ConfigError where it cannot be used with this setup; `label` names the server."""
    try:
        with trio.fail_after(GREET_SECONDS):
            info = await dialect.handshake(client)
            fault = _fault_of_info(info, dialect, setup)
            if not fault and setup.tokenizer is not None:
                fault = _fault_of_ids(await dialect.tokenize(client, setup.tokenizer[0]), *setup.tokenizer)
    except trio.TooSlowError:
        words = f"{label} did not say who it is in {GREET_SECONDS:g} seconds; is it loaded, and is this its URL?"
        raise ConfigError(words) from None
    except HTTPFailure as failure:
        if failure.status in (401, 403):  # nothing that a server may have repeated
            given = "refuses the API key" if setup.api_key else "asks for an API key, and there is none"
            advice = "put it into the environment variable that --inference.api-key-env names"
            raise ConfigError(f"{label} {given}: {advice}") from None
        raise ConfigError(f"{label} cannot be used: {failure}; see whether it runs, and its URL") from failure
    if fault:
        raise ConfigError(f"{label} {fault}")
    return info


def _fault_of_info(info: ServerInfo, dialect: Dialect, setup: ServerSetup) -> str:
    """Why a run with this setup cannot use such a server; empty where it can."""
    rank, flags = setup.lora_rank, dialect.adapter_flags.format(rank=setup.lora_rank)
    if setup.model and setup.model not in info.models:
        return (
            f"serves {', '.join(info.models) or 'no model'}, not {setup.model!r}; give --inference.served-model "
            f"{info.models[0] if info.models else 'NAME'}"
        )
    if not setup.takes_weights:  # an evaluation reads no logprobs either
        return ""
    if info.logprobs == "raw" and setup.temperature != 1.0:
        return (
            f"gives logprobs of temperature 1 whatever is sampled at, and this run samples at {setup.temperature:g}: "
            f"start it with {dialect.logprobs_flags}, or type --temperature 1"
        )
    if rank and not info.loads_adapters:
        return f"loads no adapters: start it with {flags}, or type --lora-rank 0"
    if 0 < info.lora_rank_max < rank:
        return (
            f"takes adapters of rank {info.lora_rank_max} at most, and this run's have {rank}: start it with {flags}, "
            f"or type --lora-rank {info.lora_rank_max}"
        )
    if not rank and not info.loads_weights:
        return (
            f"cannot be given new weights: start it with {dialect.weights_flags}, or train an adapter (--lora-rank 8)"
        )
    return ""


def _fault_of_ids(theirs: list[int] | None, text: str, ids: list[int]) -> str:
    if theirs is None or theirs == ids:
        return ""
    return (
        f"has another tokenizer than --model: {text!r} is {theirs[:12]} there and {ids[:12]} here; see whether it "
        "serves the model that is trained"
    )


def check_tokens(tokens: Sequence[int], max_tokens: int, vocabulary_size: int, context_max: int, label: str) -> None:
    """Refuse ids that kill some servers, and what does not fit into the context. Raises InferenceError."""
    assert tokens and max_tokens >= 1, (len(tokens), max_tokens)
    lowest, highest = min(tokens), max(tokens)
    fault = ""
    if lowest < 0 or highest >= vocabulary_size:
        wrong = lowest if lowest < 0 else highest
        fault = f"token id {wrong} is outside the vocabulary of {vocabulary_size}; is this the model's own tokenizer?"
    elif context_max and len(tokens) + max_tokens > context_max:
        words = f"a context of {len(tokens)} tokens and a reply of up to {max_tokens}"
        fault = f"{words} do not fit into the {context_max} of {label}"
    if fault:
        raise InferenceError(fault, is_transient=False)


def spans_of(sampled: Sampled, version: int, loads: int, versions: Sequence[int], label: str) -> list[VersionSpan]:
    """Which weights sampled what, of a request that was sent to `version`, after `loads` of the `versions` that were
    loaded. Raises HTTPFailure where others did, which would pass for those.
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
    """A server answers with weights that it was not given."""
    words = f"{label} answered with the weights {served!r}, and was given version {version}: has it been started again?"
    return HTTPFailure("server", words)


async def check_update(update: WeightUpdate, kind: str, label: str) -> None:
    """Refuse what no server should be asked to load: some die of a file that is cut short. Raises InferenceError."""
    if update.kind != kind or update.path is None:
        brought = f"{update.kind} ones{' without one' if update.path is None else ''}"
        words = f"{label} takes {kind} weights in a folder; the update {update.version} brings {brought}"
        raise InferenceError(words, is_transient=False)
    fault = await trio.to_thread.run_sync(_fault_of_folder, Path(update.path))
    if fault:
        raise InferenceError(f"{label} was not asked to load version {update.version}: {fault}", is_transient=False)


def _fault_of_folder(folder: Path) -> str:
    """Why a server cannot load what is in this folder, as far as the files' headers tell; empty: it can."""
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
            return f"{path} is cut short, or is no safetensors file: {error}"
    return ""


def fault_of_probe(probe: Probe, theirs: list[float], version: int) -> str:
    """Why these logprobs are not those of the weights of this version; empty where they are."""
    worst = furthest_apart(probe.logprobs, theirs, probe.tolerance)
    if worst.agrees:
        return ""
    return f"it does not serve the weights of version {version}: {worst.words('a test sequence')}"


def has_answered(error: BaseException | None) -> bool:
    """Whether a failure is what a server said: one that is gone says nothing."""
    while error is not None and not isinstance(error, HTTPFailure):
        error = error.__cause__
    return error is None or error.status is not None

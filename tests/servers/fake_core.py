"""What the fakes of vLLM and SGLang have in common (`fake_engines.py`): weights, caches, requests under way, faults.

Nothing of it knows HTTP or what either server calls things.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]
from fake_model import (  # noqa: E402
    LORA_A,
    LORA_B,
    PEFT_PREFIX,
    Array,
    Model,
    TransformersModel,
    Vector,
    adapter_delta,
    fold_all,
    log_softmax,
    read_config,
    read_tensors,
)

FAULTS = (
    "adapter_not_loaded",
    "dead_engine",
    "die_after",
    "die_in_load",
    "drop_tensor",
    "flip_bit",
    "no_flush",
    "old_version",
    "other_model",
    "other_tokenizer",
    "slow_load",
)
OTHER_MODEL_PHASE = 1.0
YIELD_TOKENS = 8


# --- the server: options and small parts -----------------------------------------------------------------------------


class Options(NamedTuple):
    """How it was started. `lora_rank` 0: without --enable-lora. `block` 0: the kind's own size of cached blocks."""

    kind: str
    model: str
    served_model: str = "policy"
    context: int = 0
    port: int = 0
    scale_out: bool = True
    dev_mode: bool = True
    runtime_lora: bool = True
    weight_transfer: bool = False
    lora_rank: int = 8
    loaded_loras: int = 4
    logprobs_mode: str = "processed_logprobs"
    api_key: str = ""
    admin_key: str = ""
    version: str = ""
    block: int = 0
    token_seconds: float = 0.0
    load_seconds: float = 0.0
    start_seconds: float = 0.0
    numbers: str = "waves"  # or "transformers": those of the folder's real model
    faults: Sequence[str] = ()


class PrefixCache:
    """States after whole blocks of tokens, by all that came before them; the first state of a block stays."""

    def __init__(self, block: int) -> None:
        self.block = block
        self._nodes: dict[tuple[Any, tuple[int, ...]], tuple[int, Vector]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def clear(self) -> None:
        """Forget all."""
        self._nodes.clear()

    def find(self, key: Any, tokens: Sequence[int]) -> tuple[int, Vector | None]:
        """How many tokens are cached, and the state after them."""
        node, state, end = key, None, 0
        while end + self.block <= len(tokens):
            entry = self._nodes.get((node, tuple(tokens[end : end + self.block])))
            if entry is None:
                break
            node, state = entry
            end += self.block
        return end, state

    def keep(self, key: Any, tokens: Sequence[int], states: Mapping[int, Vector]) -> None:
        """Keep the states after so many tokens, where a block ends there."""
        node: Any = key
        for end in range(self.block, len(tokens) + 1, self.block):
            name = (node, tuple(tokens[end - self.block : end]))
            if name not in self._nodes:
                if end not in states:
                    return
                self._nodes[name] = (len(self._nodes) + 1, states[end])
            node = self._nodes[name][0]


class Adapter(NamedTuple):
    """A loaded adapter: what it adds, and what sets its cached blocks apart."""

    name: str
    path: str
    delta: dict[str, Array]
    key: tuple[str, ...]
    model: Model | TransformersModel


class Sampling(NamedTuple):
    """How one request is sampled, whatever the kind calls it."""

    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    bias: Mapping[int, float] = {}


class Job:
    """One reply under way."""

    def __init__(self, name: str, tokens: list[int], sampling: Sampling, adapter: Adapter | None, salt: str) -> None:
        self.name, self.prompt, self.sampling, self.adapter, self.salt = name, tokens, sampling, adapter, salt
        self.sampled: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int] = []
        self.versions: list[str] = []
        self.top = 0  # so many likeliest ids are told of each place
        self.tops: list[list[tuple[float, int]]] = []
        self.finish = ""
        self.stop: int | None = None
        self.cached = 0
        self.scores: list[float] = []
        self.state: Vector | None = None  # None: to be computed (again)
        self.has_begun = self.is_late = self.is_aborted = self.is_doomed = False
        self.wake = asyncio.Event()

    @property
    def tokens(self) -> list[int]:
        """The prompt, and the reply so far."""
        return self.prompt + self.sampled

    def spans(self) -> list[dict[str, Any]]:
        """Versions as runs of tokens."""
        found: list[dict[str, Any]] = []
        for index, version in enumerate(self.versions):
            if found and found[-1]["version"] == version:
                found[-1]["end"] = index + 1
            else:
                found.append({"version": version, "start": index, "end": index + 1})
        return found


# --- the server: weights, caches, requests under way -----------------------------------------------------------------


class Core:
    """What both kinds have in common."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.kind = options.kind
        config = read_config(options.model)
        self.vocabulary = int(config["vocab_size"])
        self.eos = config.get("eos_token_id")
        self.context = options.context or int(config["max_position_embeddings"])
        self.tensors = read_tensors(options.model)
        self.cache = PrefixCache(options.block or (16 if options.kind == "vllm" else 1))
        self.adapters: dict[str, Adapter] = {}  # the one used last comes last
        self.loaded_path = options.model
        self.version = "default"
        self.faults: dict[str, str] = {}
        self.planted: list[str] = []
        self.counts: Counter[str] = Counter()
        self.generates = 0
        self.jobs: set[Job] = set()
        self.paused = ""  # how, or empty
        self.is_loading = self.is_broken = False
        self._rng = np.random.default_rng()
        self._adapter_numbers = 0
        self.plant(options.faults)

    def plant(self, faults: Sequence[str]) -> None:
        """These faults from now on."""
        given = dict(each.partition("=")[::2] for each in faults)
        unknown = sorted(set(given) - set(FAULTS))
        assert not unknown, f"unknown faults {unknown}; known are {', '.join(FAULTS)}"
        self.faults = given
        self.generates = 0
        self._rebuild()

    def _model(self, tensors: Mapping[str, Array]) -> Model | TransformersModel:
        if self.options.numbers == "transformers":
            return TransformersModel(self.options.model, tensors)
        other = OTHER_MODEL_PHASE if "other_model" in self.faults else 0.0
        return Model.from_phases(fold_all(tensors) + other, self.vocabulary)

    def _rebuild(self) -> None:
        """The tables of the base and of all adapters upon it."""
        self.base = self._model(self.tensors)
        self.adapters = {name: self._with_model(each) for name, each in self.adapters.items()}

    def _with_model(self, adapter: Adapter) -> Adapter:
        delta = adapter.delta.items()
        return adapter._replace(model=self._model({**self.tensors, **{n: self.tensors[n] + v for n, v in delta}}))

    def _harmed(self, tensors: dict[str, Array], old: Mapping[str, Array]) -> dict[str, Array]:
        """What arrives of a load, with the faults that were planted."""
        tensors = dict(tensors)
        for fault in ("drop_tensor", "flip_bit"):
            if fault not in self.faults:
                continue
            name = self.faults[fault] or max(tensors, key=lambda each: (bool(tensors[each].any()), each))
            assert name in tensors, f"no tensor {name} to harm; there are {', '.join(tensors)}"
            if fault == "drop_tensor":
                del tensors[name]
                tensors |= {name: old[name]} if name in old else {}
                self.planted.append(f"drop_tensor {name}")
            else:
                flipped = np.ascontiguousarray(tensors[name], np.float32)
                place = int(np.abs(flipped).argmax())
                flipped.reshape(-1).view(np.uint32)[place] ^= np.uint32(1 << 22)
                tensors[name] = flipped
                self.planted.append(f"flip_bit {name}[{place}]")
        return tensors

    async def load_full(self, folder: str) -> None:
        """Weights out of a folder. Raises FileNotFoundError, CorruptFileError, ValueError (another shape)."""
        await self._take_time()
        found = read_tensors(folder)
        for name, value in found.items():
            if name not in self.tensors:
                raise ValueError(f"There is no module or parameter named {name!r}")
            if value.shape != self.tensors[name].shape:
                raise ValueError(f"{name} has the shape {value.shape}, expected {self.tensors[name].shape}")
        self.loaded_path = folder
        if "old_version" in self.faults:
            self.planted.append(f"old_version {folder}")
            return
        self.tensors = {**self.tensors, **self._harmed(found, self.tensors)}  # what a file lacks stays as it was
        self._rebuild()

    async def read_adapter(self, name: str, folder: str) -> Adapter:
        """An adapter out of a folder. Raises FileNotFoundError, CorruptFileError, ValueError."""
        config, found = read_config(folder), read_tensors(folder)
        await self._take_time()
        self._adapter_numbers += 1
        # vLLM sets blocks apart by name and path, SGLang by a number that each load has anew.
        key = (name, folder) if self.kind == "vllm" else (str(self._adapter_numbers),)
        if self.options.lora_rank < int(config["r"]):
            raise OverflowError(int(config["r"]))
        for each, value in found.items():
            stem = each.removeprefix(PEFT_PREFIX).removesuffix(LORA_A).removesuffix(LORA_B)
            base = self.tensors.get(f"{stem}.weight")
            if base is None:
                raise ValueError(f"{each} is of no layer of the base model")
            if each.endswith(LORA_A) and value.shape != (config["r"], base.shape[1]):
                raise ValueError(f"{each} has the shape {value.shape}, expected {(config['r'], base.shape[1])}")
        delta = adapter_delta(self._harmed(found, {}), config)
        before = list(self.adapters.values())
        if "adapter_not_loaded" in self.faults:
            delta = {}
            self.planted.append(f"adapter_not_loaded {folder}")
        elif "old_version" in self.faults:
            delta = before[-1].delta if before else {}
            self.planted.append(f"old_version {folder}")
        return self._with_model(Adapter(name, folder, delta, key, self.base))

    async def _take_time(self) -> None:
        seconds = float(self.faults.get("slow_load") or self.options.load_seconds)
        self.counts["loads"] += 1
        if "die_in_load" in self.faults:
            await asyncio.sleep(seconds / 2)
            os._exit(1)
        if seconds:
            await asyncio.sleep(seconds)

    def reset_cache(self) -> None:
        """Forget what was computed, unless it is planted that it is not."""
        if "no_flush" not in self.faults:
            self.cache.clear()

    # --- pausing and aborting ---

    def pause(self, mode: str) -> None:
        """`abort`: give all back. `wait`: let them end. `keep`, `retract`: compute again later. `in_place`: stay."""
        self.paused = mode
        if mode == "abort":
            self.abort(lambda _: True)
        if mode in ("keep", "retract"):
            for job in self.jobs:
                job.state = None

    def resume(self) -> None:
        """Go on."""
        self.paused = ""
        for job in self.jobs:
            job.is_late = False
        self.wake()

    def wake(self) -> None:
        """Those that wait look again whether they must."""
        for job in self.jobs:
            job.wake.set()

    def abort(self, which: Callable[[Job], bool]) -> int:
        """Give these back with what they have."""
        found = [job for job in self.jobs if which(job)]
        for job in found:
            job.is_aborted = True
            job.wake.set()
        return len(found)

    async def drained(self, which: Callable[[Job], bool] = lambda job: job.has_begun) -> None:
        """Until none of these is under way."""
        while any(which(job) for job in self.jobs):  # noqa: ASYNC110 - few wait, in a test
            await asyncio.sleep(0.002)

    # --- one request ---

    def _waits(self, job: Job) -> bool:
        if job.is_aborted:
            return False
        is_stopped = bool(self.paused) and (self.paused != "wait" or not job.has_begun)
        return is_stopped or (self.is_loading and not job.has_begun) or "dead_engine" in self.faults

    async def run(self, job: Job, score_from: int | None) -> None:
        """Sample a reply. `score_from`: the prompt's logprobs are wanted from there on."""
        self.generates += 1
        job.is_doomed = self.generates == int(self.faults.get("die_after") or 0)
        job.is_late = bool(self.paused)
        if self.kind == "vllm" and job.adapter:
            for other in self.jobs:  # a new one of the name changes those under way, on their old keys and values
                if other.adapter and other.adapter.name == job.adapter.name:
                    other.adapter = job.adapter
        self.jobs.add(job)
        try:
            while not job.finish:
                await self._turn(job)
                if job.is_aborted:
                    job.finish = "abort"
                elif job.state is None:
                    self._prefill(job, score_from)
                elif len(job.sampled) >= job.sampling.max_tokens:
                    job.finish = "length"
                else:
                    self._step(job)
            self._keep(job)
            if job.is_doomed:
                os._exit(1)
        finally:
            self.jobs.discard(job)

    async def _turn(self, job: Job) -> None:
        if job.has_begun and job.sampled and self.options.token_seconds:
            await asyncio.sleep(self.options.token_seconds)
        elif len(job.sampled) % YIELD_TOKENS == 0:
            await asyncio.sleep(0)
        while self._waits(job):
            job.wake.clear()
            await job.wake.wait()

    def _key(self, job: Job) -> tuple[Any, ...]:
        if "no_flush" in self.faults:
            return ("all",)
        return (job.salt, *(job.adapter.key if job.adapter else ()))

    def _weights(self, job: Job) -> Model | TransformersModel:
        return job.adapter.model if job.adapter else self.base

    def _prefill(self, job: Job, score_from: int | None) -> None:
        """The state after all tokens, out of the cache as far as it goes (a prompt that is scored does not read it)."""
        tokens, model = job.tokens, self._weights(job)
        limit = len(tokens) - 1 if score_from is None else min(score_from, len(tokens) - 1)
        job.cached, state = self.cache.find(self._key(job), tokens[:limit])
        if job.cached and "no_flush" in self.faults:
            self.planted.append(f"no_flush {job.cached} tokens of {job.name}")
        states = model.contexts(tokens[job.cached :], state)
        self.cache.keep(self._key(job), tokens, {job.cached + i + 1: each for i, each in enumerate(states)})
        job.state, job.has_begun = states[-1], True
        if score_from is not None:
            logprobs = log_softmax(model.logits(states[:-1]))  # of temperature 1, whatever is sampled at
            job.scores = [0.0, *logprobs[np.arange(len(tokens) - 1), tokens[1:]].tolist()]

    def _step(self, job: Job) -> None:
        assert job.state is not None
        if job.is_doomed and len(job.sampled) >= job.sampling.max_tokens // 2:
            os._exit(1)
        sampling, model = job.sampling, self._weights(job)
        raw = model.logits(job.state)
        for token, bias in sampling.bias.items():
            raw[token] += bias
        heated = log_softmax(raw / (sampling.temperature or 1.0))
        cut = _cut(heated, sampling)
        if sampling.temperature == 0.0:
            token = int(raw.argmax())
        else:
            rng = self._rng
            if self.kind == "vllm" and sampling.seed is not None:
                rng = np.random.Generator(np.random.Philox(key=[sampling.seed % 2**64, len(job.sampled)]))
            token = int(np.searchsorted(np.cumsum(np.exp(cut)), rng.random() * np.exp(cut).sum(), side="right"))
            token = min(token, self.vocabulary - 1)
        told = heated
        if self.options.logprobs_mode == "raw_logprobs":  # SGLang: SGLANG_RETURN_ORIGINAL_LOGPROB
            told = log_softmax(raw)
        elif self.kind == "vllm":
            told = cut
        job.sampled.append(token)
        job.logprobs.append(float(told[token]))
        job.ranks.append(int((told > told[token]).sum()) + 1)
        if job.top:
            best = np.argsort(-told)[: job.top].tolist()
            job.tops.append([(float(told[each]), each) for each in best])
        job.versions.append(self.version)
        job.state = model.contexts([token], job.state)[0]
        self.counts["tokens"] += 1
        if len(job.sampled) >= sampling.min_tokens:
            is_eos = token == self.eos and not sampling.ignore_eos
            is_stop = token in sampling.stop_ids and not (self.kind == "sglang" and sampling.ignore_eos)
            if is_eos or is_stop:
                job.finish, job.stop = "stop", token

    def _keep(self, job: Job) -> None:
        """Whole blocks of a reply go into the cache: the next turn goes on from them."""
        if job.state is None or not job.sampled:
            return
        begin, state = self.cache.find(self._key(job), job.tokens)
        states = self._weights(job).contexts(job.tokens[begin:], state)
        self.cache.keep(self._key(job), job.tokens, {begin + i + 1: each for i, each in enumerate(states)})

    def statistics(self) -> dict[str, Any]:
        """What happened so far."""
        return {
            "requests": {path: number for path, number in self.counts.items() if path.startswith("/")},
            "tokens": self.counts["tokens"],
            "loads": self.counts["loads"],
            "running": sorted(job.name for job in self.jobs),
            "planted": self.planted,
            "faults": sorted(self.faults),
            "cached_blocks": len(self.cache),
            "adapters": sorted(self.adapters),
            "loaded_path": self.loaded_path,
            "version": self.version,
            "paused": self.paused,
        }

    def tokenize(self, text: str) -> list[int]:
        """By the model's tokenizer.json where there is one, else a byte is an id."""
        folder = Path(self.options.model)
        if (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            ids = list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)
        else:
            ids = [byte % self.vocabulary for byte in text.encode()]
        return [(each + 1) % self.vocabulary for each in ids] if "other_tokenizer" in self.faults else ids


def _cut(logprobs: Vector, sampling: Sampling) -> Vector:
    """What is left of a distribution by top-k, top-p and min-p."""
    keep = np.ones(len(logprobs), bool)
    order = np.argsort(-logprobs)
    if sampling.top_k > 0:
        keep[order[sampling.top_k :]] = False
    if sampling.top_p < 1.0:
        before = np.cumsum(np.exp(logprobs[order])) - np.exp(logprobs[order])
        keep[order[before > sampling.top_p]] = False
    if sampling.min_p > 0.0:
        keep &= logprobs >= logprobs.max() + np.log(sampling.min_p)
    if keep.all():
        return logprobs
    left = np.where(keep, logprobs, -1e30)
    return log_softmax(left)

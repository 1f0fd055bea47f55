"""Loads a reward model: a sequence-classification model of transformers with a trained head.

A model whose weights have no head would get a random one from transformers, with a warning. Here it is an error, as is
a model that generates text. Each model is loaded once in a process, and kept.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, field
from typing import Any

from rollouts.chat.format import ChatFormat, load_chat_format
from rollouts.errors import ConfigError, ModelError, first_line, near_misses
from rollouts.models.loading import (
    adapters_beneath,
    is_remote_code_allowed,
    load_config,
    load_tokenizer,
    one_at_a_time,
    resolve_device,
)
from rollouts.models.revisions import at_revision
from rollouts.plugins.loading import require_packages

DTYPES = ("float32", "bfloat16", "float16")
HEAD = "ForSequenceClassification"
FLAG = "--reward.reward_model"
POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
UNLIMITED = 10**6  # a tokenizer without a limit says 1e30


@dataclass(eq=False)
class RewardModel:
    """A loaded reward model. `label` is the column of its logits that is the score, and `most_tokens` the longest
    conversation that it reads (None: no limit is known). Threads use it one after another.
    """

    name: str
    model: Any
    chat: ChatFormat
    label: int
    probability: bool
    most_tokens: int | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    cut_count: int = 0
    scored_count: int = 0

    @property
    def device(self) -> Any:
        """Where the model is."""
        return self.model.device


def load_reward_model(
    name: str, *, label: str | int = "", probability: bool = False, device: str = "auto", dtype: str = "float32"
) -> RewardModel:
    """A reward model, from a folder or a hub name. A second call with the same arguments returns the same object.

    `label` is the name or the number of the label that is the score; a model with one label needs none. `probability`:
    the score is the label's probability, not its logit.

    Raises ModelError if there is no such model, it generates text, its weights have no head, or its tokenizer has no
    chat template; ConfigError for a label, a device or a dtype that cannot be used.
    """
    return _loaded(name, str(label), probability, resolve_device(device), dtype)


def check_model(name: str, label: str, max_tokens: int | None) -> None:
    """Raise ModelError or ConfigError for what can be seen without the weights."""
    config = _config_of(name)
    label_index(name, config, label)
    positions = _positions(config)
    if max_tokens is not None and positions is not None and max_tokens > positions:
        raise ConfigError(
            f"{FLAG}.max-tokens {max_tokens}: the reward model {name} has {positions} positions; type a smaller number"
        )


def label_index(name: str, config: Any, label: str) -> int:
    """The column of the logits that is the score. Raises ConfigError if the label is missing or unknown."""
    names = {str(text): int(number) for number, text in (config.id2label or {}).items()}
    count = int(config.num_labels)
    listed = ", ".join(f"{text} ({number})" for text, number in names.items())
    if not label:
        if count == 1:
            return 0
        raise ConfigError(f"the reward model {name} has {count} labels: {listed}\ntype: {FLAG}.label 0")
    if label in names:
        return names[label]
    if label.isdecimal() and int(label) < count:
        return int(label)
    near = near_misses(label, names)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"{FLAG}.label {label}: the labels of {name} are {listed}{hint}")


def _config_of(name: str) -> Any:
    """The configuration of a model that scores. Raises ModelError for a model of another kind."""
    whole, adapters = adapters_beneath(name)
    if adapters:
        raise ModelError(f"the reward model {name} is an adapter; merge it into its model, and give that folder")
    config = load_config(whole)
    kinds = [str(each) for each in config.architectures or ()]
    if kinds and not any(HEAD in kind for kind in kinds):
        raise ModelError(
            f"the model {name} is {', '.join(kinds)}, which has no head for scores; give a model that was saved "
            f"as ...{HEAD}\nto let a language model judge by a rubric: --reward judge"
        )
    return config


def _positions(config: Any) -> int | None:
    known = [getattr(config, name, None) for name in POSITIONS]
    found = next((each for each in known if isinstance(each, int)), None)
    behind = config.model_type in ("roberta", "xlm-roberta", "camembert")  # its positions begin behind the padding
    return found - 2 if found is not None and behind else found


@functools.lru_cache(maxsize=8)
def _loaded(name: str, label: str, probability: bool, device: str, dtype: str) -> RewardModel:
    require_packages(f"the reward model {name}")
    import torch
    from transformers import AutoModelForSequenceClassification

    if dtype not in DTYPES:
        raise ConfigError(f"{FLAG}.dtype {dtype}: expected one of {', '.join(DTYPES)}")
    config = _config_of(name)
    index = label_index(name, config, label)
    whole, _ = adapters_beneath(name)
    tokenizer = load_tokenizer(whole)
    with one_at_a_time():
        try:
            with at_revision(whole) as (found, revision):
                model, report = AutoModelForSequenceClassification.from_pretrained(
                    found,
                    config=config,
                    dtype=getattr(torch, dtype),
                    trust_remote_code=is_remote_code_allowed(),
                    output_loading_info=True,
                    **revision,
                )
        except Exception as error:  # transformers raises many kinds
            raise ModelError(f"the reward model {name} cannot be loaded: {first_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"the weights of {name} have no {missing[0]}, so that its scores would be random; give a model that was "
            f"trained and saved as ...{HEAD}"
        )
    longest = tokenizer.model_max_length if tokenizer.model_max_length < UNLIMITED else None
    limits = [each for each in (_positions(config), longest) if each]
    chat = load_chat_format(tokenizer)
    return RewardModel(name, model.eval().to(device), chat, index, probability, min(limits, default=None))

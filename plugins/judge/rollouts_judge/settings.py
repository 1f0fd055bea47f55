"""The settings of a judge, and their check before a run starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from rollouts.errors import ConfigError
from rollouts.spending import check_file, check_prices, price
from rollouts_judge.store import TABLE

OPENAI_URL = "https://api.openai.com/v1"
OWN_KEYS = ("messages", "model", "max_tokens", "max_completion_tokens", "n", "response_format", "stream", "temperature")
RUBRIC = "Grade how well the reply solves the task. If there is a reference answer, the reply must agree with it."


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """The settings of the reward `judge`.

    Args:
        model: the name of the judge, or a list of names: each model votes
        url: the URL before /chat/completions; it usually ends in /v1
        api_key_env: the environment variable with the key; empty: OPENAI_API_KEY for api.openai.com, else no key
        rubric: what the judge looks at, in words
        rubric_file: a file with the rubric, instead of `rubric`
        judged: the last reply, or the conversation with its tool calls
        reference: show the judge the answer of the task, if it has one
        scale: the verdict is pass or fail, a whole number, or a number
        lowest: the worst number; it becomes 0
        highest: the best number; it becomes 1
        samples: how often each model votes
        combine: how votes become one reward; a tied majority is no verdict
        quorum: the share of the votes that must be valid; with fewer the judge gives no verdict
        response_format: how the API is asked for JSON; none: by the prompt alone
        temperature: the sampling temperature; none: the server's own
        max_tokens: the most tokens of one reply
        max_tokens_name: the name under which the API takes `max_tokens`
        body: more keys of each request, such as reasoning_effort
        characters_max: a longer text is cut in its middle
        concurrency: requests in flight at the same time, in one process
        attempts: how often a request is sent if the API is busy or fails
        request_seconds: how long one attempt may take
        cache: a SQLite file for verdicts and spending, which processes and runs may share; empty: in memory
        prices: dollars for a million input tokens and a million output tokens, by model
        dollars_max: the budget in dollars
        tokens_max: the budget in tokens
        when_spent: what a spent budget does: end the run, or give no verdict
    """

    model: str | list[str] = ""
    url: str = OPENAI_URL
    api_key_env: str = ""
    rubric: str = RUBRIC
    rubric_file: str = ""
    judged: Literal["reply", "conversation"] = "reply"
    reference: bool = True
    scale: Literal["pass_fail", "integer", "number"] = "integer"
    lowest: float = 0.0
    highest: float = 10.0
    samples: Annotated[int, Meta(ge=1)] = 1
    combine: Literal["majority", "mean", "median"] = "mean"
    quorum: Annotated[float, Meta(gt=0, le=1)] = 0.5
    response_format: Literal["json_schema", "json_object", "none"] = "json_schema"
    temperature: float | None = None
    max_tokens: Annotated[int, Meta(ge=1)] = 1024
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    body: dict[str, Any] | None = None
    characters_max: Annotated[int, Meta(ge=100)] = 20_000
    concurrency: Annotated[int, Meta(ge=1)] = 16
    attempts: Annotated[int, Meta(ge=1)] = 5
    request_seconds: Annotated[float, Meta(gt=0)] = 60.0
    cache: str = ""
    prices: dict[str, tuple[float, float]] | None = None
    dollars_max: Annotated[float, Meta(ge=0)] | None = None
    tokens_max: Annotated[int, Meta(ge=0)] | None = None
    when_spent: Literal["stop", "none"] = "stop"

    @property
    def models(self) -> list[str]:
        """The models that vote."""
        return [self.model] if isinstance(self.model, str) else list(self.model)

    @property
    def bounds(self) -> tuple[float, float]:
        """The worst and the best verdict."""
        return (0.0, 1.0) if self.scale == "pass_fail" else (self.lowest, self.highest)

    @property
    def key_name(self) -> str:
        """The environment variable with the key; empty if there is no key."""
        return self.api_key_env or ("OPENAI_API_KEY" if self.url.startswith(OPENAI_URL) else "")

    def rubric_text(self) -> str:
        """The rubric. Raises ConfigError if its file cannot be read."""
        if not self.rubric_file:
            return self.rubric
        try:
            return Path(self.rubric_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(
                f"--reward.judge.rubric-file {self.rubric_file}: {why}; give the path of a text file"
            ) from error

    def price(self, model: str, input_tokens: int, output_tokens: int) -> float:
        """Dollars for this many tokens of a model; 0 if its price is not given."""
        return price(self.prices, model, input_tokens, output_tokens)


def check(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings with which a judge cannot work."""
    settings: JudgeSettings = values["settings"]
    require_model_and_key(settings)
    if not settings.rubric_text().strip():
        raise ConfigError("the rubric of the reward judge is empty; type --reward.judge.rubric 'what to look at'")
    if not settings.lowest < settings.highest:
        raise ConfigError(
            f"--reward.judge.lowest {settings.lowest:g}: expected less than highest, which is {settings.highest:g}"
        )
    if settings.scale == "integer" and not (settings.lowest.is_integer() and settings.highest.is_integer()):
        raise ConfigError(
            "--reward.judge.scale integer: lowest and highest must be whole; type --reward.judge.scale number"
        )
    for name in sorted(set(settings.body or {}).intersection(OWN_KEYS)):
        raise ConfigError(f"--reward.judge.body.{name}: the judge sets this key; leave it out")
    check_prices("--reward.judge", settings.models, settings.prices, settings.dollars_max)
    if settings.cache:
        check_file("--reward.judge.cache", settings.cache, TABLE)


def require_model_and_key(settings: JudgeSettings) -> None:
    """Raise ConfigError without a model, a URL or a key."""
    models = settings.models
    if not models or not all(models):
        raise ConfigError("the reward judge needs a model; type --reward.judge.model NAME, and --reward.judge.url URL")
    if len(set(models)) < len(models):
        raise ConfigError(f"--reward.judge.model {models}: a model is named twice; type --reward.judge.samples 2")
    if not settings.url.startswith(("http://", "https://")):
        raise ConfigError(f"--reward.judge.url {settings.url!r}: expected a URL such as http://127.0.0.1:8000/v1")
    if settings.key_name and not os.environ.get(settings.key_name, "").strip():
        raise ConfigError(
            f"the reward judge has no key: the environment variable {settings.key_name} is not set\n"
            f"type export {settings.key_name}=KEY, or name another server: --reward.judge.url http://127.0.0.1:8000/v1"
        )

"""The core's own settings: one dataclass, with a line of documentation, a default and bounds for each.

The same names are keys at the top level of a file and flags of the command (`prompts_per_step`, `--prompts-per-step`).
Anything else belongs to a component and is read from its signature; there is no class to write for it.
This module is light: `rollouts run --help` is made from it.
"""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

__all__ = [
    "AUTO",
    "COMPONENT_KINDS",
    "EVAL",
    "EVAL_DEFAULTS",
    "FILE_ONLY",
    "MULTIPLE",
    "OWN",
    "OWN_KEYS",
    "REPEATED",
    "SCHEDULED",
    "SFT",
    "SINGLE",
    "WEIGHTED",
    "SettingInfo",
    "Settings",
    "setting_infos",
]

COMPONENT_KINDS = {
    "env": "environments",
    "reward": "rewards",
    "mix": "mixers",
    "shaping": "shapings",
    "loss": "losses",
    "advantage": "advantages",
    "aggregation": "aggregations",
    "kl": "kl",
    "reference": "references",
    "correction": "corrections",
    "select": "selectors",
    "pairs": "pairings",
    "filter": "filters",
    "inference": "inference",
    "training": "training",
    "logger": "loggers",
}
"""The settings that name components, and the kind of plugin that each names."""

MULTIPLE = ("reward", "shaping", "filter", "logger")
"""Those that may name several, each with an alias."""

SINGLE = tuple(key for key in COMPONENT_KINDS if key not in MULTIPLE)
"""Those of which there is one. Of `env` there may be several too; each has an alias then, one alone has none."""

REPEATED = ("env", *MULTIPLE)
"""Those whose flag may be given more than once."""

WEIGHTED = ("env", "reward")
"""Those whose entries have a weight: `[alias=]name[:weight]`."""

OWN_KEYS = ("advantage", "aggregation", "kl", "mix", "select", "pairs")
"""Those for which naming none means the algorithm's own; settings that are given then are for that one."""

OWN = "algorithm"
"""The word of `shaping` and `filter` for the algorithm's own, as `env` is the word of `reward`."""

AUTO = "auto"
"""The word of `correction` for: as the engine needs it."""

SCHEDULED = ("loss", "advantage", "aggregation", "kl", "correction", "mix", "shaping", "select", "pairs")
"""What may change at a step: the keys of a `[[schedule]]` entry, besides its `step`."""

SFT = (
    "steps",
    "lr",
    "prompts_per_step",
    "loss",
    "aggregation",
    "env",
    "data",
    "system",
    "lora_rank",
    "inference",
    "training",
    "tokens_per_microbatch",
    "eval_every",
    "eval_tasks",
    "checkpoint_every",
    "checkpoint_seconds",
    "keep_checkpoints",
    "profile",
    "logger",
)
"""What the supervised phase of mode sft+rl may have otherwise than the run: the keys of `[sft]`."""

EVAL = (
    "mode",
    "env",
    "reward",
    "data",
    "system",
    "template",
    "model",
    "trust_remote_code",
    "inference",
    "samples_per_prompt",
    "max_tokens",
    "max_turns",
    "temperature",
    "on_invalid_reward",
    "concurrency",
    "episode_seconds",
    "setup_seconds",
    "tasks_seconds",
    "turn_seconds",
    "tool_seconds",
    "reward_seconds",
    "cleanup_seconds",
    "retries",
    "max_failures",
    "pass_env",
    "seed",
    "eval_tasks",
    "logger",
    "out",
)
"""What matters to an evaluation (mode eval). The rest is of training: left out of a file, refused as a flag."""

EVAL_DEFAULTS = {"samples_per_prompt": 1}
"""Defaults that are others in mode eval."""

FILE_ONLY = {
    "schedule": "[[schedule]] in FILE",
    "sft": "--sft.SETTING VALUE",
    "template": "--template.ARGUMENT VALUE",
}
"""Settings without a flag of their own, and how they are given."""


def _about(
    doc: str, group: str, *, minimum: float = -math.inf, above: float = -math.inf, shown: str = ""
) -> dict[str, Any]:
    """Metadata of a field: `minimum` is allowed, `above` is not; `shown` says a default that its value does not."""
    return {"doc": doc, "group": group, "minimum": minimum, "above": above, "shown": shown}


def _setting(default: Any, doc: str, group: str, **about: Any) -> Any:
    return field(default=default, metadata=_about(doc, group, **about))


@dataclass(frozen=True)
class Settings:
    """The core's own settings. Lists are tuples, so that two runs share nothing.

    `reward`, `shaping`, `filter` and `logger` are written as `alias=name:weight` where the parts differ from their
    defaults; the parsed form is in `Resolved.components`. The tables of `schedule` are plain data.
    """

    mode: Literal["rl", "sft", "sft+rl", "eval"] = _setting(
        "rl",
        "What to train by: reinforcement (rl), demonstrations (sft), or the one after the other (sft+rl); eval only "
        "evaluates.",
        "What",
    )
    sft: dict[str, Any] = field(
        default_factory=dict,
        metadata=_about("Mode sft+rl: settings of the supervised phase, where they differ: --sft.steps 50.", "What"),
    )
    env: str | tuple[str, ...] = _setting(
        "",
        "The environment: a name, dist/name or ./file.py:Name. Repeat it, as [alias=]name[:weight], to mix several.",
        "What",
        shown="none",
    )
    reward: tuple[str, ...] = _setting(
        ("env:1",),
        "A reward, as [alias=]name[:weight]; `env` is the environment's own. Repeat it to mix; "
        "flags replace the file's list.",
        "What",
    )
    data: str = _setting("", "A file of rows (.jsonl or .json) for the environment `prompts`.", "What", shown="none")
    system: str = _setting("", "A system prompt, put before every task.", "What", shown="none")
    template: dict[str, Any] = field(
        default_factory=dict,
        metadata=_about("Arguments of the chat template: --template.enable-thinking false.", "What"),
    )
    loss: str = _setting("grpo", "The loss or algorithm.", "Algorithm", shown="grpo; sft in mode sft")
    advantage: str = _setting("", "The advantage.", "Algorithm", shown="the algorithm's own")
    aggregation: str = _setting(
        "", "How a loss per token becomes one number.", "Algorithm", shown="the algorithm's own"
    )
    kl: str = _setting(
        "", "A KL term against a reference policy (rk3_loss, say).", "Algorithm", shown="the algorithm's own"
    )
    reference: str = _setting(
        "",
        "How the reference policy follows the policy, where something needs one.",
        "Algorithm",
        shown="frozen; adapter_off with LoRA",
    )
    correction: str = _setting(
        AUTO,
        "The weight of what another engine, or earlier weights, sampled; `auto` is truncated where one does; `none`.",
        "Algorithm",
    )
    mix: str = _setting(
        "",
        "How the parts of a reward become one number.",
        "Algorithm",
        shown="the algorithm's own, else a weighted sum",
    )
    shaping: tuple[str, ...] = _setting(
        (OWN,),
        "What is done to rewards before the advantage, as [alias=]name. Repeat it for more; `none`.",
        "Algorithm",
        shown="the algorithm's own",
    )
    select: str = _setting("", "Which rollouts are trained on.", "Algorithm", shown="the algorithm's own, else all")
    pairs: str = _setting("", "Which rollouts of a prompt are compared.", "Algorithm", shown="the algorithm's own")
    filter: tuple[str, ...] = _setting(
        (OWN,),
        "A filter of groups, as [alias=]name. Repeat it for more; `none`.",
        "Algorithm",
        shown="the algorithm's own",
    )
    minibatches: int = _setting(1, "Optimizer steps a batch.", "Algorithm", minimum=1)
    schedule: tuple[dict[str, Any], ...] = _setting(
        (), "Other parts of the algorithm from a step on: tables with `step` and what changes.", "Algorithm"
    )
    model: str = _setting(
        "tiny", "The model: a path, a name on the hub, or `tiny`, which comes with the core.", "Model"
    )
    trust_remote_code: bool = _setting(
        False, "Run Python code that comes with the models of this run: true or false.", "Model"
    )
    lora_rank: int = _setting(0, "The rank of LoRA adapters; 0 trains every weight.", "Model", minimum=0)
    inference: str = _setting("hf", "The inference backend.", "Model")
    training: str = _setting("torch", "The training backend.", "Model")
    critic: str = _setting(
        "", "A critic: `head` on the policy, or a model of its own (a path or a name).", "Model", shown="none"
    )
    teacher: str = _setting("", "A teacher to distil from: a path or a name on the hub.", "Model", shown="none")
    teacher_top_k: int = _setting(32, "How many of the teacher's likeliest tokens a loss is given.", "Model", minimum=1)
    prompts_per_step: int = _setting(8, "Prompts a step.", "Sampling", minimum=1)
    samples_per_prompt: int = _setting(8, "Rollouts of each prompt: the size of a group.", "Sampling", minimum=1)
    over_sampling: float = _setting(
        1.0,
        "Groups under way for each one that a step needs. Above 1 no step waits for the slowest: they are carried over "
        "to the next.",
        "Sampling",
        minimum=1,
    )
    refill: int = _setting(
        0, "Rounds of new groups in place of those that filters dropped (dynamic sampling).", "Sampling", minimum=0
    )
    staleness: int = _setting(
        0,
        "Steps sampled ahead of the one that is trained on, side by side with it; older tokens are not trained on. "
        "0: sample, train, sync.",
        "Sampling",
        minimum=0,
    )
    max_tokens: int = _setting(256, "Tokens that the model may sample in one episode.", "Sampling", minimum=1)
    max_turns: int = _setting(8, "Times that the model may speak in one episode.", "Sampling", minimum=1)
    temperature: float = _setting(1.0, "The temperature of sampling.", "Sampling", above=0)
    on_invalid_reward: Literal["drop", "zero", "raise"] = _setting(
        "drop", "What to do with a rollout that a reward could not judge.", "Sampling"
    )
    concurrency: int = _setting(256, "Episodes that may be alive at once.", "Time and failure", minimum=1)
    episode_seconds: float = _setting(600.0, "How long an episode may take.", "Time and failure", above=0)
    setup_seconds: float = _setting(
        300.0, "How long building an environment and its `setup` may take.", "Time and failure", above=0
    )
    tasks_seconds: float = _setting(
        1800.0, "How long an environment's `tasks` may take to give one.", "Time and failure", above=0
    )
    turn_seconds: float | None = _setting(
        None, "How long the model may take for one turn.", "Time and failure", above=0, shown="the episode's"
    )
    tool_seconds: float | None = _setting(
        None, "A bound on the deadlines of all tools.", "Time and failure", above=0, shown="each tool's own"
    )
    reward_seconds: float = _setting(30.0, "How long a reward or metric may take.", "Time and failure", above=0)
    cleanup_seconds: float = _setting(10.0, "How long an environment's `close` may take.", "Time and failure", above=0)
    retries: int = _setting(
        1,
        "How often a rollout that failed of the engine, or before its first turn, is played again.",
        "Time and failure",
        minimum=0,
    )
    max_failures: int | float | None = _setting(
        None,
        "The run stops at so many failed rollouts; a share such as 0.5: of the last 200.",
        "Time and failure",
        above=0,
        shown="only a step in which all failed stops it",
    )
    pass_env: str = _setting(
        "",
        "Environment variables that isolated tools and launched servers get besides the usual ones: names, or patterns "
        "such as AWS_*, separated by commas.",
        "Time and failure",
        shown="none",
    )
    steps: int = _setting(120, "Training steps: a batch of rollouts (or demonstrations) each.", "Training", minimum=0)
    lr: float | None = _setting(
        None,
        "The learning rate.",
        "Training",
        above=0,
        shown="3e-4 for tiny, else 1e-6 (sft 1e-5); ten times that with LoRA",
    )
    critic_lr: float | None = _setting(
        None, "The learning rate of the critic.", "Training", above=0, shown="ten times the learning rate"
    )
    tokens_per_microbatch: int = _setting(
        16384, "Tokens at most in one forward pass of training.", "Training", minimum=1
    )
    seed: int = _setting(0, "One seed, one result.", "Training", minimum=0)
    sync_every: int = _setting(
        1,
        "Steps between updates of the engine's weights, where it has its own; an evaluation updates them too.",
        "Training",
        minimum=1,
    )
    eval_every: int = _setting(0, "Steps between evaluations; 0: only before and after.", "Watching", minimum=0)
    eval_tasks: int = _setting(512, "Held-out tasks of an evaluation.", "Watching", minimum=0)
    checkpoint_every: int = _setting(0, "Steps between checkpoints; 0: by the clock.", "Watching", minimum=0)
    checkpoint_seconds: float = _setting(
        600.0,
        "Seconds between checkpoints, where no number of steps is given. 0: only at the end.",
        "Watching",
        minimum=0,
    )
    keep_checkpoints: int = _setting(
        0,
        "How many of the last checkpoints to keep, besides the best. 0: all of --checkpoint-every, one by the clock.",
        "Watching",
        minimum=0,
    )
    resume: Literal["never", "auto"] = _setting(
        "never", "`auto`: go on with the run in the folder --out, if there is one.", "Watching"
    )
    profile: int = _setting(
        0, "Steps to profile, after the first one, into the run's folder; 0: none.", "Watching", minimum=0
    )
    logger: tuple[str, ...] = _setting(("jsonl",), "A logger, as [alias=]name. Repeat it for more.", "Watching")
    out: str = _setting("", "The folder of the run.", "Watching", shown="runs/<time>-<env>-<loss>")


class SettingInfo(NamedTuple):
    """What is known of one core setting without resolving its type: for help, files and bounds."""

    name: str
    default: Any
    doc: str
    group: str
    minimum: float
    above: float
    shown: str
    choices: tuple[str, ...]

    @property
    def flag(self) -> str:
        """The flag that sets it."""
        return "--" + self.name.replace("_", "-")

    @property
    def default_text(self) -> str:
        """The default in words."""
        if self.shown:
            return self.shown
        if isinstance(self.default, tuple | dict):
            return " ".join(map(str, self.default)) or "none"
        return str(self.default)


def setting_infos() -> tuple[SettingInfo, ...]:
    """Every core setting, in the order in which help and files show them."""
    defaults, hints = Settings(), typing.get_type_hints(Settings)
    about = SettingInfo._fields[2:-1]
    return tuple(
        SettingInfo(
            f.name,
            getattr(defaults, f.name),
            **{key: f.metadata[key] for key in about},
            choices=typing.get_args(hints[f.name]) if typing.get_origin(hints[f.name]) is Literal else (),
        )
        for f in fields(Settings)
    )

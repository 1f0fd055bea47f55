"""The core's own settings, and the description of any setting.

Each field of `Settings` has a default, bounds and a line of documentation. Its name is a key of a settings file and a
flag of the command (`prompts_per_step`, `--prompts-per-step`). All other settings belong to components and are read
from their signatures.

`rollouts run --help` reads this module, so it imports nothing heavy.
"""

from __future__ import annotations

import enum
import functools
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, NamedTuple

from rollouts.config.hints import argument_docs

COMPONENT_KINDS = {
    "env": "environments",
    "tool": "tools",
    "tool_parser": "tool_parsers",
    "sandbox": "sandboxes",
    "reward": "rewards",
    "data": "datasets",
    "sampler": "samplers",
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
    "optimizer": "optimizers",
    "logger": "loggers",
    "eval_inference": "inference",
}
"""The settings that name components, with the kind of component."""

MULTIPLE = ("tool", "reward", "shaping", "filter", "logger")
"""The settings that may name several components, each with an alias."""

SINGLE = tuple(key for key in COMPONENT_KINDS if key not in MULTIPLE)
"""The settings that name one component. `env` may also name several; each of those has an alias."""

REPEATED = ("env", "worker", *MULTIPLE, "from_run", "stop_when")
"""The settings whose flag may be repeated."""

WEIGHTED = ("env", "reward")
"""The settings whose components may have a weight: `[alias=]name[:weight]`."""

OWN_KEYS = ("advantage", "aggregation", "kl", "mix", "select", "pairs")
"""The settings that default to the component of the algorithm. Its settings can be given without its name."""

OWN = "algorithm"
"""In `shaping` and `filter`, this word means the components of the algorithm."""

AUTO = "auto"
"""In `correction`, this word means: a correction if the engine needs one. In `tool_parser`: by the chat template."""

SCHEDULED = ("loss", "advantage", "aggregation", "kl", "correction", "mix", "shaping", "select", "pairs")
"""The keys of a `[[schedule]]` table besides `step`: the settings that may change at a step."""

SFT = tuple(
    """
    steps lr prompts_per_step loss aggregation env data system lora_rank inference training optimizer
    tokens_per_microbatch eval_every eval_tasks checkpoint_every checkpoint_seconds keep_checkpoints
    keep_best profile logger
    """.split()
)
"""The keys of `[sft]`: the settings that may differ in the supervised phase of mode sft+rl."""

EVAL = tuple(
    """
    mode env worker role tool tool_parser sandbox reward data system template model trust_remote_code inference
    samples_per_prompt
    max_tokens max_turns temperature on_invalid_reward concurrency episode_seconds setup_seconds tasks_seconds
    turn_seconds tool_seconds reward_seconds cleanup_seconds retries max_failures pass_env seed eval_tasks tasks
    reduce answer_pattern logger out
    """.split()
)
"""The settings of an evaluation (mode eval). It ignores other settings in a file, and refuses them as flags."""

EVAL_ONLY = ("tasks", "reduce", "answer_pattern")
"""The settings that only an evaluation has."""

EVAL_DEFAULTS = {"samples_per_prompt": 1}
"""Different defaults in mode eval."""

SAMPLING = ("samples_per_prompt", "temperature")
"""How a training run samples its training rollouts. Its own evaluations do not use these settings."""

FILE_ONLY = {
    "schedule": "[[schedule]] in FILE",
    "sft": "--sft.SETTING VALUE",
    "template": "--template.ARGUMENT VALUE",
    "role": "--role.NAME.model MODEL",
}
"""Settings without their own flag, and how to give them."""


FLAGS = {"from_run": "--from"}
"""The flags that are not the name of their setting. `from` is a keyword of Python."""

GROUPS = {
    "mode": "What",
    "loss": "Algorithm",
    "model": "Model",
    "prompts_per_step": "Sampling",
    "concurrency": "Time and failure",
    "steps": "Training",
    "eval_every": "Evaluation, checkpoints and logs",
}
"""The groups of settings in help and files, by the first setting of each group."""


class Required(enum.Enum):
    """The type of REQUIRED."""

    REQUIRED = "required"

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = Required.REQUIRED
"""The `default` of a setting that has no default."""


class Setting(NamedTuple):
    """The description of one setting, of the core or of a component: its type (Any if unknown), its default or
    REQUIRED, and a line of documentation.

    A setting of the core also has a `group` for help, bounds (at least `minimum`, more than `above`), and `shown`: the
    default in words, if its value does not explain itself.
    """

    name: str
    type: Any
    default: Any
    doc: str
    group: str = ""
    shown: str = ""
    minimum: float = -math.inf
    above: float = -math.inf

    @property
    def is_required(self) -> bool:
        """Whether the setting has no default."""
        return self.default is REQUIRED

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words; empty if every value of its type is allowed."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    @property
    def flag(self) -> str:
        """The flag of a core setting."""
        return FLAGS.get(self.name) or "--" + self.name.replace("_", "-")

    @property
    def default_text(self) -> str:
        """The default of a core setting in words."""
        if self.shown:
            return self.shown
        if isinstance(self.default, tuple | dict):
            return " ".join(map(str, self.default)) or "none"
        return str(self.default)


def _bounded(default: Any, **bound: float) -> Any:
    """A field with a bound: at least `minimum`, or more than `above`."""
    return field(default=default, metadata=bound)


@dataclass(frozen=True)
class Settings:
    """The core's own settings.

    `reward`, `shaping`, `filter` and `logger` hold texts such as `alias=name:weight`. `Resolved.components` holds the
    parsed components. Lists are tuples, so that two runs do not share them.

    Settings:
        mode: How to train: reinforcement (rl), demonstrations (sft), or demonstrations first and then reinforcement
            (sft+rl). eval trains nothing and only evaluates.
        sft: Mode sft+rl: settings of the supervised phase that differ from the run's: --sft.steps 50.
        env: The environment: a name, dist/name or ./file.py:Name. To mix several, repeat the flag, as
            [alias=]name[:weight]. Default: none.
        worker: Where the environment runs: `inline` in the process of the run, `process` in another one, `venv` in the
            virtual environment of `rollouts env install`, or the ws:// address of `rollouts env serve`. For one of
            several environments: ALIAS=KIND. Default: inline.
        role: Another model for a role of the environment, which is then not trained: --role.NAME.model MODEL, or an API
            with --role.NAME.inference openai --role.NAME.url URL.
        tool: A tool for the model besides those of the environment, as [alias=]name. The model sees the alias. Repeat
            the flag for more. Default: none.
        tool_parser: How tool calls are read out of the model's text. `auto`: by the model's chat template.
        sandbox: Where tools run commands that the model wrote, for environments that ask for a sandbox: subprocess, or
            one of a package, such as bubblewrap, podman or docker.
        reward: A reward, as [alias=]name[:weight]. `env` means the rewards in the environment's class. To mix several,
            repeat the flag. Flags replace the file's list.
        data: Rows: a file (.jsonl, .json, .csv, .parquet), a folder, OWNER/NAME of a hub, or LOADER:SOURCE. They are
            the tasks of the environment `prompts`, and in mode sft the conversations to learn from. Settings:
            --data.prompt COLUMN. Default: none.
        from_run: Train on the trajectories that a run saved, not on new ones: the folder of the run. Repeat the flag
            for more. Default: none.
        system: A system prompt that comes before every task. Default: none.
        template: Arguments of the chat template: --template.enable-thinking false.
        loss: The loss or algorithm. Default: grpo; sft in mode sft.
        advantage: The advantage. Default: the algorithm's own.
        aggregation: How token losses become one number. Default: the algorithm's own.
        kl: A KL term against a reference policy, such as rk3_loss. Default: the algorithm's own.
        reference: How the reference policy follows the policy. Default: frozen; adapter_off with LoRA.
        correction: Weights for tokens that another engine, or earlier weights, sampled. `auto` uses `truncated` if the
            run has such tokens; `none` turns corrections off.
        mix: How several rewards become one number. Default: the algorithm's own, else a weighted sum.
        shaping: A change to rewards before the advantage is computed, as [alias=]name. Repeat the flag for more; `none`
            for no change. Default: the algorithm's own.
        select: Which rollouts are trained on. Default: the algorithm's own, else all.
        pairs: Which rollouts of a prompt are compared. Default: the algorithm's own.
        filter: A filter that drops groups of rollouts, as [alias=]name. Repeat the flag for more; `none` for no filter.
            Default: the algorithm's own.
        sampler: Which task is next, by what earlier groups earned: `uniform` visits all of them in order, `difficulty`
            retires those that earn all or nothing.
        minibatches: Optimizer steps per batch.
        schedule: Changes to the algorithm at given steps: tables with `step` and the settings that change.
        model: The model: a path, a name on the hub, also with a branch, a tag or a commit (NAME@REVISION), or `tiny`,
            which is part of the package.
        trust_remote_code: Run Python code that comes with the models of this run: true or false.
        lora_rank: The rank of LoRA adapters. 0 trains every weight.
        lora_per_role: Train an adapter of its own for each role of the environment: true or false.
        inference: The inference backend.
        training: The training backend.
        optimizer: The optimizer. Default: the training backend's own; of torch and fsdp it is adamw, or the one that
            --training.optimizer names.
        critic: A critic: `head` adds a layer to the policy; a path or a name loads a separate model. Default: none.
        teacher: A teacher to distill from: a path or a name on the hub. Default: none.
        teacher_top_k: How many of the teacher's likeliest tokens a loss receives.
        prompts_per_step: Prompts per step.
        samples_per_prompt: Rollouts per prompt: the size of a group.
        over_sampling: Groups to start for each group that a step needs. Above 1, a step does not wait for its slowest
            groups; the next step continues them.
        refill: How many times per step to sample new groups in place of those that filters dropped (dynamic sampling).
            0: train on fewer.
        staleness: How many steps sampling may be ahead of training. Tokens that are sampled more steps ahead are not
            trained on. 0: sample, train and sync in turn.
        max_tokens: How many tokens the model may sample in one episode.
        max_turns: How many turns the model has in one episode.
        temperature: The sampling temperature.
        on_invalid_reward: What to do with a rollout that a reward could not judge: leave it out, count it as 0, or end
            the run.
        concurrency: How many episodes may run at the same time.
        episode_seconds: Deadline of an episode. An episode that passes it fails with the status `timeout`, and is not
            trained on.
        setup_seconds: Deadline of an environment's constructor, and again of its `setup`. An episode that passes it
            fails with `timeout`.
        tasks_seconds: Deadline of an environment's `tasks` for each task. If it passes, the run ends.
        turn_seconds: Deadline of one turn of the model. An episode that passes it fails with `timeout`. Default: the
            episode's.
        tool_seconds: An upper bound for the deadlines of all tools. A call that passes its deadline returns an error
            message to the model. Default: each tool's own.
        reward_seconds: Deadline of a reward or metric. A reward that passes it could not judge the rollout.
        cleanup_seconds: Deadline of an environment's `close`. An episode that passes it fails with `environment_error`.
        retries: How many times to repeat an episode after a failure of the engine, the environment's constructor or its
            `setup`.
        max_failures: Stop the run at this many failed rollouts. A share such as 0.5: stop if more than half of the last
            200 failed. Default: stop only if all rollouts of a step failed.
        pass_env: More environment variables for isolated tools and launched servers: names, or patterns such as AWS_*,
            separated by commas. Default: none.
        steps: Training steps. Each uses one batch of rollouts or demonstrations.
        stop_when: End the run early when a metric of a step meets a rule, such as 'eval/reward_mean >= 0.95'. Repeat
            the flag for more rules: the run ends as soon as any of them is met. Default: none.
        max_hours: When this command has run for this many hours, finish the step in progress, evaluate, save a
            checkpoint and end the run. Default: none.
        lr: The learning rate. Default: 3e-4 for tiny and its checkpoints, else 1e-6 (sft 1e-5); ten times that with
            LoRA.
        critic_lr: The learning rate of the critic. Default: ten times the learning rate.
        tokens_per_microbatch: The largest number of tokens in one forward pass of training. A batch with more is split
            into several passes.
        seed: The seed of everything random.
        sync_every: Training steps between updates of the engine's weights, if the engine has its own copy. Evaluations
            update them too.
        eval_every: Training steps between evaluations. 0: only before the first step and after the last.
        eval_tasks: How many tasks to hold out for evaluation.
        tasks: The held-out tasks of an evaluation, if not all: numbers from 0, ranges and ids, such as `0-9,17,gsm-42`.
        eval_inference: Another inference backend, for the evaluations between steps: it serves the weights of its step
            while training goes on. Default: they use the run's own, and training waits.
        reduce: How the rewards of several samples of a task become one: their mean, the best, the worst, or that of the
            majority, which is the most common final answer.
        answer_pattern: What a final answer is: the last match of this regular expression in the last reply, or of its
            first group. Default: the whole reply.
        checkpoint_every: Training steps between checkpoints. 0: save by time, see checkpoint_seconds.
        checkpoint_seconds: Seconds between checkpoints, if `checkpoint_every` is 0. 0: save only at the end.
        keep_checkpoints: How many of the last checkpoints to keep, besides the best. 0: all of them with
            `checkpoint_every`, else the last.
        keep_best: The metric that makes a checkpoint the best, such as `eval/greedy_mean`, or `min:policy/kl_ref` if
            lower is better. Default: `eval/reward_mean` with `eval_every`, else `reward/mean`; in mode sft
            `min:policy/loss`.
        resume: `auto`: if the folder --out holds a run, continue it; else begin one. `never`: a folder --out that is
            not empty is an error.
        profile: How many steps to profile, after the first one. The profile is written into the run's folder. 0: none.
        record: `tokens`: also write the values of each trained token beside the trajectories, such as the trainer's
            logprob, the entropy and the advantage. `none`: only trajectories.
        keep_trajectories: How many of the last steps keep their trajectories on the disk, or `all`. Evaluations keep
            theirs.
        logger: A logger besides `jsonl`, which writes metrics.jsonl, as [alias=]name. Repeat the flag for more; `none`
            for no logger at all.
        out: The folder of the run. Default: runs/<time>-<env>-<loss>.
    """

    mode: Literal["rl", "sft", "sft+rl", "eval"] = "rl"
    sft: dict[str, Any] = field(default_factory=dict)
    env: str | tuple[str, ...] = ""
    worker: dict[str, Any] = field(default_factory=dict)
    role: dict[str, Any] = field(default_factory=dict)
    tool: tuple[str, ...] = ()
    tool_parser: str = AUTO
    sandbox: str = "subprocess"
    reward: tuple[str, ...] = ("env:1",)
    data: str = ""
    from_run: tuple[str, ...] = ()
    system: str = ""
    template: dict[str, Any] = field(default_factory=dict)
    loss: str = "grpo"
    advantage: str = ""
    aggregation: str = ""
    kl: str = ""
    reference: str = ""
    correction: str = AUTO
    mix: str = ""
    shaping: tuple[str, ...] = (OWN,)
    select: str = ""
    pairs: str = ""
    filter: tuple[str, ...] = (OWN,)
    sampler: str = "uniform"
    minibatches: int = _bounded(1, minimum=1)
    schedule: tuple[dict[str, Any], ...] = ()
    model: str = "tiny"
    trust_remote_code: bool = False
    lora_rank: int = _bounded(0, minimum=0)
    lora_per_role: bool = False
    inference: str = "hf"
    training: str = "torch"
    optimizer: str = ""
    critic: str = ""
    teacher: str = ""
    teacher_top_k: int = _bounded(32, minimum=1)
    prompts_per_step: int = _bounded(8, minimum=1)
    samples_per_prompt: int = _bounded(8, minimum=1)
    over_sampling: float = _bounded(1.0, minimum=1)
    refill: int = _bounded(0, minimum=0)
    staleness: int = _bounded(0, minimum=0)
    max_tokens: int = _bounded(256, minimum=1)
    max_turns: int = _bounded(8, minimum=1)
    temperature: float = _bounded(1.0, above=0)
    on_invalid_reward: Literal["drop", "zero", "raise"] = "drop"
    concurrency: int = _bounded(256, minimum=1)
    episode_seconds: float = _bounded(600.0, above=0)
    setup_seconds: float = _bounded(300.0, above=0)
    tasks_seconds: float = _bounded(1800.0, above=0)
    turn_seconds: float | None = _bounded(None, above=0)
    tool_seconds: float | None = _bounded(None, above=0)
    reward_seconds: float = _bounded(30.0, above=0)
    cleanup_seconds: float = _bounded(10.0, above=0)
    retries: int = _bounded(1, minimum=0)
    max_failures: int | float | None = _bounded(None, above=0)
    pass_env: str = ""
    steps: int = _bounded(120, minimum=0)
    stop_when: tuple[str, ...] = ()
    max_hours: float | None = _bounded(None, above=0)
    lr: float | None = _bounded(None, above=0)
    critic_lr: float | None = _bounded(None, above=0)
    tokens_per_microbatch: int = _bounded(16384, minimum=1)
    seed: int = _bounded(0, minimum=0)
    sync_every: int = _bounded(1, minimum=1)
    eval_every: int = _bounded(0, minimum=0)
    eval_tasks: int = _bounded(512, minimum=0)
    tasks: str = ""
    eval_inference: str = ""
    reduce: Literal["mean", "best", "worst", "majority"] = "mean"
    answer_pattern: str = ""
    checkpoint_every: int = _bounded(0, minimum=0)
    checkpoint_seconds: float = _bounded(600.0, minimum=0)
    keep_checkpoints: int = _bounded(0, minimum=0)
    keep_best: str = ""
    resume: Literal["never", "auto"] = "never"
    profile: int = _bounded(0, minimum=0)
    record: Literal["none", "tokens"] = "none"
    keep_trajectories: int | Literal["all"] = _bounded("all", minimum=1)
    logger: tuple[str, ...] = ("jsonl",)
    out: str = ""

    @property
    def samples(self) -> bool:
        """Whether the run trains on rollouts that it samples itself."""
        return self.mode == "rl" and not self.from_run


@functools.cache
def setting_infos() -> tuple[Setting, ...]:
    """Every core setting, in the order of help and files."""
    defaults, hints, docs = Settings(), typing.get_type_hints(Settings), argument_docs(Settings.__doc__)
    found: list[Setting] = []
    for each in fields(Settings):
        group = GROUPS.get(each.name) or found[-1].group
        doc, _, shown = docs.get(each.name, "").partition(" Default: ")
        default = getattr(defaults, each.name)
        found.append(
            Setting(each.name, hints[each.name], default, doc, group, shown.removesuffix("."), **each.metadata)
        )
    return tuple(found)


LEFT_OUT = "(a secret, left out)"
"""The text that is written in place of a secret."""

_KEYS = ("access", "account", "api", "auth", "encryption", "master", "private", "secret", "signing", "ssh")
"""After one of these words, `key` means a secret: `api_key`, but not `prompt_key`, `sort_key` or `public_key`."""

_TOKENS = ("bos", "cls", "eos", "mask", "pad", "sep", "stop", "unk")
"""After one of these words, `token` means a token of a tokenizer: `pad_token`."""


def is_secret(name: str) -> bool:
    """Whether the name of a component's setting means that its value is a secret.

    It does if its last word is `secret`, `password`, `passphrase`, `apikey`, `authorization` or `cookie`, if it is
    `key` or ends in a word of `_KEYS` and `key`, or if it ends in a word outside `_TOKENS` and `token`.

    >>> [is_secret(name) for name in ("key", "openai_api_key", "x-api-key", "client-secret", "password", "hf_token")]
    [True, True, True, True, True, True]
    >>> [is_secret(name) for name in ("prompt_key", "api_key_env", "monkey", "keys", "max_tokens", "pad_token")]
    [False, False, False, False, False, False]
    """
    *before, last = re.split(r"[^a-z0-9]+", name.lower())
    if last == "key":
        return not before or before[-1] in _KEYS
    if last == "token":
        return bool(before) and before[-1] not in _TOKENS
    return last in ("secret", "password", "passphrase", "apikey", "authorization", "cookie")


def without_secrets(settings: Any, name: str = "") -> Any:
    """A copy of a component's settings with LEFT_OUT in place of every secret. Empty values, None and booleans are
    kept.

    >>> without_secrets({"url": "http://h", "body": {"api_key": "sk-1", "max_tokens": 3}})
    {'url': 'http://h', 'body': {'api_key': '(a secret, left out)', 'max_tokens': 3}}
    """
    if is_secret(name) and not (settings is None or isinstance(settings, bool) or settings in ("", [], (), {})):
        return LEFT_OUT
    if isinstance(settings, Mapping):
        return {key: without_secrets(value, str(key)) for key, value in settings.items()}
    if isinstance(settings, list | tuple) and not hasattr(settings, "_fields"):
        return type(settings)(without_secrets(each) for each in settings)
    return settings

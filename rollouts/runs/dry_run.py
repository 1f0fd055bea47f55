"""Describes a plan without loading weights: the output of `--dry-run`. It shows every component, an estimate of memory,
and how much a run will play and write (upper bounds: every reply is as long as `--max-tokens` allows).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.author_code import unwrapped
from rollouts.config.render import to_toml
from rollouts.config.resolving import Resolved
from rollouts.config.settings import OWN, without_secrets
from rollouts.env.shared import shared_values
from rollouts.errors import ModelError, RolloutsError, counted, first_line, said_of
from rollouts.models.estimates import ModelSize, estimate_memory, how_estimated, model_size
from rollouts.models.loading import adapters_beneath, load_config, remote_code, resolve_dtype
from rollouts.models.revisions import pinned
from rollouts.plugins.loading import INSTALL_TORCH, absent_packages
from rollouts.plugins.signature import read_signature
from rollouts.runs.components import Chosen, takes_rows
from rollouts.runs.environments import chosen_tasks, few_held_out_notes
from rollouts.runs.folder import check_out
from rollouts.runs.held_objects import ranks_of
from rollouts.runs.jobs.saving import size_words
from rollouts.runs.jobs.sources import check_data
from rollouts.runs.manifest import known_revisions
from rollouts.runs.plan import Plan, make_plan
from rollouts.runs.rehearsal import rehearse
from rollouts.runs.resume import run_to_resume
from rollouts.runs.workers import worker_pools
from rollouts.training.algorithms.algorithm import Algorithm, active_terms, function_label, is_reward_placed
from rollouts.training.batches import AuxiliaryModels
from rollouts.training.datasets.mixing import shares_at
from rollouts.types import Task

TOKEN_BYTES = 24  # of a token in a file of trajectories: its id, logprob, mask and version, and its text
TASKS_FEWER = 64
_SHOWN_MIN = 0.01  # a fraction of the total; smaller parts are counted, but have no line
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def dry_run(resolved: Resolved, *more: str) -> str:
    """Describe the run of this configuration, as text; the last line is the verdict, and `more` lines come before it.
    Raises the first UserError that the run would raise.
    """
    settings, absent = resolved.settings, absent_packages()
    commits = pinned(known_revisions(run_to_resume(resolved), resolved.source))
    with shared_values(settings.cleanup_seconds), worker_pools(), remote_code(settings.trust_remote_code), commits:
        if settings.mode == "sft+rl":
            found = _describe_phases(resolved, absent)
        else:
            found = describe(make_plan(resolved, may_be_absent=bool(absent)), absent)
    return "\n".join([found.text, *more, "", *_verdict(found, settings.mode, absent)])


class Described(NamedTuple):
    """The description of a plan. `data` says how many conversations were tried; empty if all. `is_partial`: what needs
    torch or transformers was left out. `demonstrates`: an environment has demonstrations, which were not replayed.
    """

    text: str
    data: str
    is_partial: bool
    demonstrates: bool


def _verdict(found: Described, mode: str, absent: Sequence[str]) -> list[str]:
    """The last lines of a dry run."""
    if found.is_partial:
        left_out = "the model and the chat template" if mode == "eval" else "the model, the loss and the chat template"
        missing = f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed"
        return [f"ok, but not everything: {missing}, so {left_out} were not tried; to install:", INSTALL_TORCH]
    data = f", and of the data {found.data}" if found.data else ""
    not_done = "the model was not asked" if mode == "eval" else "no model was loaded"
    not_done += ", no demonstration was replayed (`rollouts check` does it)" if found.demonstrates else ""
    return [f"ok: everything was checked{data}; {not_done}, and nothing was written"]


def _describe_phases(resolved: Resolved, absent: Sequence[str]) -> Described:
    """Describe both phases of mode sft+rl."""
    from rollouts.runs.sft_then_rl import RL, SFT, SUPERVISED, compose_phases

    if resolved.settings.out:
        check_out(resolved.settings.out)
    plans = compose_phases(resolved, may_be_absent=bool(absent))
    with said_of(SUPERVISED):
        first = describe(plans.sft, absent)
    second = describe(plans.rl, absent)
    text = (
        f"# The supervised phase, in OUT/{SFT}\n{first.text}\n\n# Reinforcement, in OUT/{RL}; its model is the last "
        f"checkpoint of the supervised phase\n{second.text}"
    )
    demonstrates = first.demonstrates or second.demonstrates
    return second._replace(text=text, data=first.data, demonstrates=demonstrates)


def describe(plan: Plan, absent: Sequence[str] = ()) -> Described:
    """Describe settings, components with their distributions, and tasks; for a training run also the loss and its
    inputs, and an estimate of memory. `absent` are packages that are not installed; what needs them is left out.

    Draws the first tasks, reads the model's configuration, and tries the components out (`rehearsal`). Raises the first
    UserError that the run would raise there.
    """
    settings, trains = plan.settings, plan.settings.mode != "eval"
    if settings.out and not (trains and run_to_resume(plan.resolved)):
        check_out(settings.out)
    held_out = plan.eval_tasks()
    chosen = len(chosen_tasks(settings.tasks, held_out))
    check_data(plan, held_out)
    is_partial = bool(absent) and not plan.is_chat
    tried, of_data = rehearse(plan, held_out, without_model=is_partial)
    lines = [
        to_toml(plan.resolved.without_secrets()).rstrip(),
        "",
        "# Composed",
        *_component_lines(plan),
        *_task_lines(plan, held_out, chosen),
        *(_training_lines(plan, absent) if trains else ()),
        *amount_lines(plan, held_out, chosen),
        *(f"note: {note}" for note in (*plan.notes, *few_held_out_notes(plan.environments, held_out, settings))),
        "",
        "# Tried out",
        *tried,
    ]
    has_own = trains and not takes_rows(settings.mode, plan.chosen)
    demonstrates = has_own and any(hasattr(env.make_checked(), "demonstrations") for env in plan.environments)
    return Described("\n".join(lines), of_data, is_partial, demonstrates)


def _component_lines(plan: Plan) -> Iterator[str]:
    """Every component with its distribution. Several environments have their shares, at the first step, and at the last
    one if they change. Of later stages, the components that the first stage does not have.
    """
    weights = {env.alias: env.weight for env in plan.environments}
    ends = [shares_at(weights, step) for step in (0, max(0, plan.settings.steps - 1))] if weights else [[], []]
    for env, chosen, first, last in zip(plan.environments, plan.chosen["env"], *ends, strict=True):
        line = _component_line("env", chosen)
        if env.alias and plan.settings.mode != "eval":
            line = f"env {env.alias}{line.removeprefix('env')}, share {first:.3g}"
            line += "" if first == last else f" to {last:.3g}, of the whole run {env.share:.3g}"
            line += "" if env.curriculum is None else f" ({_component_line('curriculum', env.curriculum)})"
        yield line
    others = [(key, each) for key, several in plan.chosen.items() for each in several if key != "env"]
    yield from (_component_line(key, each) for key, each in others if each.component != ())
    known = {each.ref for several in plan.chosen.values() for each in several} | {None}
    for stage, parts in zip(plan.schedule[1:], plan.stages_chosen, strict=True):
        new = [(key, each) for key, several in parts.items() for each in several if each.ref not in known]
        yield from (f"from step {stage.step}: {_component_line(key, each)}" for key, each in new)


def _component_line(key: str, chosen: Chosen) -> str:
    if chosen.ref is None:
        return f"{key}: {'the algorithm’s own' if chosen.name in ('', OWN) else chosen.name}"
    origin = f"{chosen.ref.distribution} {chosen.ref.version}".strip() or chosen.ref.value
    return f"{key}: {chosen.name} ({origin})"


def _task_lines(plan: Plan, held_out: Sequence[Task], chosen: int) -> Iterator[str]:
    """The tools of each environment, and the held-out tasks, of which an evaluation plays `chosen`."""
    settings = plan.settings
    for env in plan.environments:
        names = ", ".join(tool.name for tool in env.all_tools()) or "none"
        by_task = "; tools(task) chooses those of each task" if env.chooses_tools else ""
        yield f"tools{env.alias and f' of {env.alias}'}: {names}{by_task}"
    counts = Counter(task.env for task in held_out)
    shares = ", ".join(f"{env.alias} {counts[env.alias]}" for env in plan.environments if env.alias)
    words = f"held-out tasks: {len(held_out)}" + (f" ({shares})" if shares else "")
    words += f", of which --tasks chooses {chosen}" if settings.tasks else ""
    if settings.mode != "eval":
        yield words
        return
    times = "once" if settings.samples_per_prompt == 1 else f"{settings.samples_per_prompt} times"
    yield f"{words}, each played {times}"
    yield f"the engine takes {'messages: no tokenizer, no chat template' if plan.is_chat else 'token ids'}"


def _training_lines(plan: Plan, absent: Sequence[str]) -> Iterator[str]:
    for stage in plan.schedule:
        begin = f"objective from step {stage.step}" if stage.step else "objective"
        yield f"{begin}: {objective_words(stage.algorithm, correction_auto=stage.correction_auto)}"
    yield f"the loss needs: {', '.join(plan.needs)}"
    if beside := plan.auxiliary_models:
        yield from [f"reference: {_call_words(beside.reference)}"] if beside.reference is not None else []
        yield from [f"critic: {beside.critic}, learning rate {beside.critic_lr:g}"] if beside.critic else []
        of_teacher = f"{beside.teacher}, {beside.teacher_top_k} likeliest tokens where a loss asks for them"
        yield from [f"teacher: {of_teacher}"] if beside.teacher else []
    yield f"learning rate: {plan.lr:g}"
    yield from [f"memory: not estimated: it needs {' and '.join(absent)}"] if absent else memory_lines(plan)


def objective_words(algorithm: Algorithm, *, correction_auto: bool = False) -> str:
    """The objective in one line: terms with their coefficients, then each part that is used.

    >>> from rollouts.training.algorithms.recipes import GRPO
    >>> objective_words(GRPO)
    'ppo_clip; advantage group_norm; aggregation token_mean'
    """
    terms = [f"{_times(term.coefficient)}{_call_words(term.function)}" for term in active_terms(algorithm)]
    kl, notes = algorithm.kl, []
    if kl is not None:
        off = is_reward_placed(kl.function)
        words = f"{_times(kl.coefficient)}{_call_words(kl.function)} {'off the advantages' if off else 'in the loss'}"
        words += f", cut at {kl.threshold:g}" if kl.threshold is not None else ""
        notes.append(f"KL {words}" + (f", steered to {kl.target:g} nats a token" if kl.target is not None else ""))
    compared = algorithm.pairs is not None
    if not compared:
        notes.append(f"advantage {_call_words(algorithm.advantage)}")
    notes.append(f"aggregation {_call_words(algorithm.aggregation)}")
    named = {"mix": algorithm.mix, "select": algorithm.select, "pairs": algorithm.pairs}
    notes += [f"{key} {_call_words(function)}" for key, function in named.items() if function is not None]
    if algorithm.shaping:
        notes.append(f"shaping {', '.join(map(_call_words, algorithm.shaping))}")
    if algorithm.correction is not None:
        where = " where another engine samples" if correction_auto else ""
        notes.append(f"correction {_call_words(algorithm.correction)}{where}")
    return "; ".join([" + ".join(terms), *notes])


def _times(coefficient: float) -> str:
    return "" if coefficient == 1 else f"{coefficient:g} * "


def _call_words(function: Any) -> str:
    """A function with its bound settings that differ from the defaults: `ema(decay=0.9)`."""
    if isinstance(function, str):
        return function
    defaults = {setting.name: setting.default for setting in read_signature(unwrapped(function), "").settings}
    bound = {setting.name: setting.default for setting in read_signature(function, "").settings}
    shown = [f"{name}={value}" for name, value in without_secrets(bound).items() if defaults[name] != value]
    return function_label(function) + (f"({', '.join(shown)})" if shown else "")


class _NotKnown(Exception):
    """There is no estimate. The message is the reason."""


def memory_lines(plan: Plan) -> list[str]:
    """Parameters and memory per rank, part by part, from the models' configurations alone; if they cannot be estimated,
    one line with the reason. docs/memory-and-speed.md has the formulas.

    It makes no requests to the hub, so it is fast. Raises ModelError and ConfigError if the run would.
    """
    training, inference, settings = plan.one("training"), plan.one("inference"), plan.settings
    how, given = how_estimated(training.component), training.settings
    if not how:
        return [f"memory: not estimated: how the training backend {training.name} keeps a model is its own affair"]
    dtype = resolve_dtype(str(given.get("dtype", "auto")), str(given.get("device", "auto")))
    if dtype not in _DTYPES:
        raise ModelError(f"unknown dtype {dtype!r} (choices: {', '.join(_DTYPES)})")
    sharded = how == "sharded"
    ranks = ranks_of(training) if sharded else 1
    optimizer = next((each.name for each in plan.chosen["optimizer"]), str(given.get("optimizer", "adamw")))
    beside = plan.auxiliary_models or AuxiliaryModels()
    rank = settings.lora_rank * (len(plan.lora_roles) or 1)  # as many numbers as the adapters of all roles
    try:
        size, positions = _size_of(settings.model, rank, str(given.get("lora_targets", "all-linear")))
        # A head is much smaller than a model, so it is not counted.
        critic = None if beside.critic in ("", "head") else _size_of(beside.critic)[0]
        teacher = _size_of(beside.teacher)[0] if beside.teacher else None
    except _NotKnown as why:
        return [f"memory: cannot be estimated: {why}"]
    has_engine = how_estimated(inference.component) == "embedded"
    parts = estimate_memory(
        size,
        tokens=settings.tokens_per_microbatch,
        # Sharded weights that are trained are float32, whatever the compute dtype is; an untrained base model is not.
        dtype="float32" if sharded and not size.lora else dtype,
        compute_dtype=dtype,
        optimizer=optimizer,
        shards=max(1, ranks // int(given.get("replicas", 1) or 1)),
        sharded=sharded,
        gradient_checkpointing=bool(given.get("gradient_checkpointing", False)),
        reference=beside.reference is not None,
        critic=critic,
        teacher=teacher,
        engine_copy=sharded and has_engine,
        whole_logits="logits" in plan.needs,
        cache_bytes=_cache_bytes(plan, size, positions, dtype) if has_engine else 0.0,
    )
    words = {
        "optimizer": f"moments of {optimizer}",
        "reference": "reference policy",
        "critic": f"critic ({_count(critic.parameters)})" if critic is not None else "",
        "teacher": f"teacher ({_count(teacher.parameters)})" if teacher is not None else "",
        "activations": f"activations of {settings.tokens_per_microbatch} tokens",
        "logits": "logits" if "logits" in plan.needs else "logits, a chunk",
        "unsharded": "layers put together",
        "engine copy": "the engine's copy",
        "kv cache": "keys and values, at most",
    }
    trained = f"{_count(size.trained)} of them trained" if size.lora else "all of them trained"
    return [f"parameters: {_count(size.parameters)}, {trained}", *_table(parts, words, ranks)]


def _table(parts: dict[str, float], words: dict[str, str], ranks: int) -> list[str]:
    """The total, and below it every part that is more than a hundredth of it."""
    total = sum(parts.values())
    digits = 2 if total >= 2**30 else 4
    shown = [(words.get(name, name), number) for name, number in parts.items() if number > _SHOWN_MIN * total]
    width = max(len(label) for label, _ in shown)
    of = f" of {ranks}" if ranks > 1 else ""
    return [
        f"memory per rank{of} (an estimate): {total / 2**30:.{digits}f} GiB",
        *(f"  {label:<{width}}  {number / 2**30:.{digits}f} GiB" for label, number in shown),
    ]


def _size_of(name: str, lora_rank: int = 0, lora_targets: str = "all-linear") -> tuple[ModelSize, int]:
    """The model's size, and its longest context in tokens (0: unknown). Raises _NotKnown, and ModelError for a folder
    without a causal language model.
    """
    whole, _ = adapters_beneath(name)
    try:
        config: Any = load_config(whole, local_files_only=True)
    except ModelError as error:
        if not Path(whole).is_dir() and "--trust-remote-code" not in str(error):
            raise _NotKnown(
                f"the configuration of {whole} is not on this machine, and a dry run asks no hub; "
                f"`hf download {whole} config.json` fetches it"
            ) from error
        raise
    try:
        size = model_size(config, lora_rank=lora_rank, lora_targets=lora_targets)
    except RolloutsError:
        raise
    except ValueError as error:
        raise ModelError(f"{name} is no causal language model: {first_line(error)}") from error
    except Exception as error:  # a model's own code may raise anything if it is built without memory
        raise _NotKnown(f"{name} cannot be built without weights: {first_line(error)}") from error
    return size, int(getattr(config.get_text_config(decoder=True), "max_position_embeddings", 0) or 0)


def _cache_bytes(plan: Plan, size: ModelSize, positions: int, dtype: str) -> float:
    """The cache of the embedded engine in bytes: keys and values of decoding rows, and of sessions between turns. Each
    is limited by `cache_gib`, and by the largest possible number of rows.
    """
    settings, engine = plan.settings, plan.one("inference").settings
    most = float(engine.get("cache_gib", 4.0)) * 2**30
    live = max(settings.prompts_per_step * settings.samples_per_prompt, settings.eval_tasks)
    context = int(engine.get("context_tokens", 0) or 0)
    columns = min(context or positions, positions or context)
    if not columns:
        return 2 * most
    number = {"float64": 8, "float32": 4}.get(dtype, 2)
    row = columns * 2 * size.layers * size.kv_width * number
    return min(most, min(live, int(engine.get("rows_max", 256))) * row) + min(most, live * row)


def _count(parameters: int) -> str:
    """
    >>> _count(355_712), _count(72_703_307_776)
    ('0.36 M', '72.70 B')
    """
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


# --- how much is played and written ---


def amount_lines(plan: Plan, held_out: Sequence[Task], chosen: int) -> list[str]:
    """The lines for a run with these held-out tasks, of which an evaluation (mode eval) plays `chosen`."""
    settings = plan.settings
    is_evaluation = settings.mode == "eval"
    if is_evaluation:
        times, episodes = 1, chosen * settings.samples_per_prompt
        what = f"the evaluation: {counted(episodes, 'episode')}"
    else:
        between = (settings.steps - 1) // settings.eval_every if settings.eval_every and settings.steps else 0
        times, episodes = 2 + between, 2 * len(held_out) if plan.rewards else 0
        when = f"before step 1, {f'{between} times between steps' if between else 'not between steps'}, and at the end"
        tasks = f"{counted(len(held_out), 'task')}, sampled and greedy"
        what = f"evaluations: {times} ({when}) of {tasks}: {episodes:,} episodes each"
    steps = settings.steps * settings.prompts_per_step * settings.samples_per_prompt if settings.samples else 0
    lines = []
    if episodes:
        tokens = episodes * settings.max_tokens
        lines.append(f"{what}, at most {tokens:,} tokens")
        if times * episodes > steps and len(held_out) > TASKS_FEWER and not is_evaluation and settings.samples:
            more = f"  the evaluations play more episodes than the training ({steps:,})"
            lines.append(f"{more}; to play fewer, type --eval-tasks {TASKS_FEWER}")
    kept = settings.steps if settings.keep_trajectories == "all" else min(settings.steps, settings.keep_trajectories)
    written = times * episodes + (steps // max(1, settings.steps)) * kept
    if written:
        disk = size_words(written * settings.max_tokens * TOKEN_BYTES)
        lines.append(f"trajectories: {written:,} episodes, at most about {disk} on the disk, without their prompts")
    return lines

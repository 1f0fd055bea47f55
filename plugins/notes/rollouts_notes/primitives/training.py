"""Training: one step, one iteration, a whole training; its logs and its checkpoints.

    state = TrainingState(model, tokenizer, create_adamw_optimizer(model, lr=3e-4))
    state, stats = training_step(state, rollouts, config)                            # rollouts that you have
    state, stats = training_iteration(state, prompts, gen_config, config, reward)    # samples them first
    state = train(state, prompt_loader, 100, gen_config, config, reward)             # many iterations

A state goes in, and the next state comes out. The model and the optimizer inside are changed in place, because copies
of them would not fit into memory. The rest is new. Everything random depends on seeds and on `state.iteration`, so a
training that continues from a checkpoint gives the numbers that it would have given.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.agent.records import turn_seed
from rollouts.author_code import shown
from rollouts.errors import ConfigError, TrainingError
from rollouts.models.loading import bundled
from rollouts.plugins import find_component, load_component
from rollouts.training.algorithms.algorithm import needs
from rollouts.types import Task
from rollouts_notes.primitives import algorithms
from rollouts_notes.primitives.algorithms import AlgorithmConfig, create_algorithm_config
from rollouts_notes.primitives.generation import Prompt, call_given, load_model, load_tokenizer
from rollouts_notes.primitives.rollouts import create_batch_rollouts
from rollouts_notes.primitives.scoring import (
    UpdateFn,
    create_batch,
    create_reference_model,
    group_numbers,
    ids_at,
    to_device,
    update_reference_model,
)
from rollouts_notes.primitives.types import GenerationConfig, Rollout, TrainingState, TrainingStats
from rollouts_notes.primitives.utilities import RewardFns, create_prompt_loader, reward_of

if TYPE_CHECKING:
    from rollouts_notes.pytorch_factory import TorchObjects

PromptLoader = Callable[[int], Sequence[Prompt]]
OptimizerStepFn = Callable[[Any, Any], "Mapping[str, float] | None"]
GRAD_NORM_MAX = 1.0
_CHECKPOINTS = "checkpoints"


# --- steps ------------------------------------------------------------------------------------------------------------


def training_step(
    state: TrainingState,
    rollouts: Sequence[Rollout],
    algorithm_config: AlgorithmConfig,
    *,
    temperature: float | None = None,
    train_truncated: bool = False,
    tokens_per_microbatch: int = 16384,
    optimizer_step_fn: OptimizerStepFn | None = None,
) -> tuple[TrainingState, TrainingStats]:
    """One optimizer step on these rollouts. Returns the next state, and the numbers of the step.

    The gradient is that of `compute_loss_by_algorithm` over all rollouts, whatever the size of a microbatch. If nothing
    can be trained, the weights do not change, and the metric `optim/skipped` is 1. Raises TrainingError if the loss or
    the gradient is not finite; the weights are then unchanged.

    >>> from rollouts.primitives import create_batch_rollouts
    >>> from rollouts.training import create_adamw_optimizer
    >>> model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    >>> state = TrainingState(model, tokenizer, create_adamw_optimizer(model, lr=3e-4))
    >>> rollouts = create_batch_rollouts(
    ...     model, tokenizer, ["2 + 3 ="], GenerationConfig(max_tokens=4), samples_per_prompt=2,
    ...     reward_fn=lambda rollout: rollout.generation.logprobs[0],
    ... )
    >>> state, stats = training_step(state, rollouts, create_algorithm_config("grpo"), train_truncated=True)
    >>> state.iteration, stats.grad_norm > 0
    (1, True)

    Args:
        temperature: the sampling temperature; None: that of the rollouts. Raises TrainingError for another one
        train_truncated: also train replies that were cut off at `max_tokens`
        tokens_per_microbatch: how many tokens run at the same time; groups of rollouts stay together
        optimizer_step_fn: `optimizer_step_fn(model, optimizer)` replaces clipping the gradient's norm to 1 and
            `optimizer.step()`; it may return metrics
    """
    import torch

    algorithms.check_config(algorithm_config)
    whole = create_batch(None, rollouts, train_truncated=train_truncated)
    whole = to_device(whole, state.model.get_input_embeddings().weight.device)
    whole, targets = algorithms.prepare_targets(whole, algorithm_config)
    total = denominator = 0.0
    state.optimizer.zero_grad(set_to_none=True)
    try:
        for numbers in _microbatches(rollouts, tokens_per_microbatch):
            places = torch.isin(whole.rollout_index, torch.tensor(numbers, device=whole.rollout_index.device))
            scored = create_batch(state.model, [rollouts[number] for number in numbers], temperature=temperature)
            part = ids_at(whole, places)._replace(
                logprobs=scored.logprobs, entropy=scored.entropy, old_logprobs=scored.old_logprobs
            )
            loss, share = algorithms.loss_sum(part, algorithm_config, _part_of(targets, places, numbers))
            total, denominator = total + float(loss.detach()), denominator + share
            if share and not loss.requires_grad:
                what = f"the loss of {algorithm_config.name} has no gradient, so nothing can be learned"
                advice = (
                    "compute it from `logprobs` or `entropy`, without .detach() and torch.no_grad(), and train a model"
                )
                raise TrainingError(f"{what}; {advice} whose parameters require a gradient")
            if share:
                torch.autograd.backward(loss)
        grad_norm, metrics = _step(state, denominator, optimizer_step_fn)
    finally:
        state.optimizer.zero_grad(set_to_none=True)
    stats = _statistics(state.iteration, rollouts, total / (denominator or 1.0), grad_norm, metrics)
    return state._replace(iteration=state.iteration + 1), stats


def training_iteration(
    state: TrainingState,
    prompts: Sequence[Prompt],
    gen_config: GenerationConfig,
    algorithm_config: AlgorithmConfig,
    reward_fn: RewardFns,
    *,
    samples_per_prompt: int = 8,
    **options: Any,
) -> tuple[TrainingState, TrainingStats]:
    """Sample rollouts of these prompts, reward them, and take one optimizer step. Returns the next state and numbers.

    The samples depend on `gen_config.seed` and `state.iteration`. The KL to `state.ref_model` is measured if there is
    one. Raises like `create_batch_rollouts` and `training_step`.

    >>> from rollouts.training import create_adamw_optimizer
    >>> model = load_model("tiny")
    >>> state = TrainingState(model, load_tokenizer("tiny"), create_adamw_optimizer(model, lr=3e-4))
    >>> state, stats = training_iteration(
    ...     state, [Task("What is 2 + 3?")], GenerationConfig(max_tokens=4), create_algorithm_config("grpo"),
    ...     lambda rollout: len(rollout.generation.tokens), samples_per_prompt=2,
    ... )
    >>> state.iteration, stats.metrics["rollouts/count"], 1 <= stats.mean_reward <= 4
    (1, 2.0, True)

    Args:
        options: `train_truncated`, `tokens_per_microbatch` and `optimizer_step_fn` of `training_step`; and other
            arguments of `create_batch_rollouts`, such as `tools`, `tool_executor`, `stop_condition` and `generator`
    """
    names = ("train_truncated", "tokens_per_microbatch", "optimizer_step_fn")
    of_step = {name: options.pop(name) for name in names if name in options}
    sampled = gen_config._replace(seed=turn_seed(gen_config.seed, state.iteration, 0, 0, 0))
    options |= {"samples_per_prompt": samples_per_prompt, "ref_model": state.ref_model, "reward_fn": reward_fn}
    rollouts = create_batch_rollouts(state.model, state.tokenizer, prompts, sampled, **options)
    return training_step(state, rollouts, algorithm_config, **of_step)


def train(
    initial_state: TrainingState,
    prompt_loader: PromptLoader | Sequence[Prompt],
    num_iterations: int,
    gen_config: GenerationConfig,
    algorithm_config: AlgorithmConfig | Callable[[int], AlgorithmConfig],
    reward_fn: RewardFns,
    ref_model_update_fn: UpdateFn | None = None,
    checkpoint_fn: Callable[[TrainingState], Any] | None = None,
    eval_fn: Callable[[TrainingState], float | Mapping[str, float]] | None = None,
    logger: Callable[[TrainingStats], Any] | None = None,
    **options: Any,
) -> TrainingState:
    """Train until `num_iterations` iterations are done. Returns the last state.

    A state from a checkpoint continues where it was. Each iteration trains, updates the reference, evaluates, logs and
    writes a checkpoint, in this order. Raises ConfigError for arguments that cannot be used, and what the functions
    raise.

    >>> from rollouts.training import create_adamw_optimizer
    >>> model = load_model("tiny")
    >>> state = train(
    ...     TrainingState(model, load_tokenizer("tiny"), create_adamw_optimizer(model, lr=3e-4)),
    ...     [Task("What is 2 + 3?")], 2, GenerationConfig(max_tokens=4),
    ...     lambda iteration: create_algorithm_config("grpo" if iteration == 0 else "rloo"),
    ...     lambda rollout: len(rollout.generation.tokens), samples_per_prompt=2,
    ... )
    >>> state.iteration
    2

    Args:
        prompt_loader: `prompt_loader(iteration)` returns the prompts of an iteration (`create_prompt_loader`); a list
            is used in each iteration
        algorithm_config: an algorithm, or a function from the iteration to an algorithm
        ref_model_update_fn: `update(ref_model, model)` returns the reference after each iteration
        checkpoint_fn: `checkpoint_fn(state)`, such as `save_checkpoint`, every `checkpoint_every` iterations and at
            the end
        eval_fn: `eval_fn(state)` returns a number, logged as `eval/score`, or a dict of numbers; every `eval_every`
            iterations and at the end
        logger: `logger(stats)` after each iteration, such as `log_to_console`
        options: `checkpoint_every` (10) and `eval_every` (10); and other arguments of `training_iteration`, such as
            `samples_per_prompt`, `optimizer_step_fn` and `tools`
    """
    every = {"checkpoint_every": options.pop("checkpoint_every", 10), "eval_every": options.pop("eval_every", 10)}
    for name, value in {"num_iterations": num_iterations, **every}.items():
        least = int(name in every)
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} is {shown(value)}; expected a whole number of {least} or more")
    state = initial_state
    for iteration in range(state.iteration, num_iterations):
        config = _of_iteration("algorithm_config(iteration)", algorithm_config, iteration)
        algorithms.check_config(config)
        if "ref_logprobs" in needs(config.algorithm) and state.ref_model is None:
            what = f"the algorithm {config.name} compares with a reference in iteration {iteration}, and there is none"
            raise ConfigError(f"{what}; give TrainingState(..., ref_model=create_reference_model(model))")
        prompts = _of_iteration("prompt_loader(iteration)", prompt_loader, iteration)
        state, stats = training_iteration(state, prompts, gen_config, config, reward_fn, **options)
        done, is_last = iteration + 1, iteration + 1 == num_iterations
        if ref_model_update_fn is not None and state.ref_model is not None:
            reference = update_reference_model(
                state.ref_model, state.model, update_fn=ref_model_update_fn, iteration=done
            )
            state = state._replace(ref_model=reference)
        if eval_fn is not None and (done % every["eval_every"] == 0 or is_last):
            stats = stats._replace(metrics={**stats.metrics, **_evaluated(eval_fn, state)})
        if logger is not None:
            call_given("logger(stats)", logger, stats)
        if checkpoint_fn is not None and (done % every["checkpoint_every"] == 0 or is_last):
            call_given("checkpoint_fn(state)", checkpoint_fn, state)
    return state


def quick_start_training(
    model_name: str,
    prompts: Sequence[Prompt],
    reward_fn: RewardFns,
    num_iterations: int = 100,
    *,
    algorithm: str = "grpo",
    settings: Mapping[str, Any] | None = None,
    lr: float | None = None,
    prompts_per_iteration: int = 8,
    gen_config: GenerationConfig | None = None,
    logger: Callable[[TrainingStats], Any] | None = None,
    **train_options: Any,
) -> TrainingState:
    """Load a model, and train it on these prompts with usual settings. Returns the last state.

    A text is a message of the user, if the tokenizer has a chat template. Replies have at most 256 ids. Prints a line
    for each iteration. Raises ConfigError, ModelError, and what the reward function raises.

    >>> state = quick_start_training(
    ...     "tiny", ["What is 2 + 3?"], lambda rollout: "5" in rollout.generation.text, num_iterations=1,
    ...     gen_config=GenerationConfig(max_tokens=4), samples_per_prompt=2, logger=lambda stats: None,
    ... )
    >>> state.iteration
    1

    Args:
        algorithm: `create_algorithm_config(algorithm, settings)`; "dapo" is DPO on pairs
        lr: None: the learning rate of `rollouts run` for this model
        prompts_per_iteration: the prompts of an iteration, each with `samples_per_prompt` (8) rollouts
        logger: `logger(stats)`; None: `log_to_console`
        train_options: other arguments of `train`, such as `samples_per_prompt`, `tools` and `checkpoint_fn`
    """
    from rollouts.runs.plan import LR_RL
    from rollouts_notes.pytorch_factory import create_adamw_optimizer

    config = create_algorithm_config(algorithm, settings)
    if isinstance(prompts, str) or not prompts:
        raise ConfigError(f"prompts is {shown(prompts)}; expected a list of prompts")
    model, tokenizer, known = load_model(model_name), load_tokenizer(model_name), bundled(model_name)
    if lr is None:
        lr = LR_RL if known is None else known.lr
    if getattr(tokenizer, "chat_template", None):
        prompts = [Task(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    reference = create_reference_model(model) if "ref_logprobs" in needs(config.algorithm) else None
    state = TrainingState(model, tokenizer, create_adamw_optimizer(model, lr), reference)
    loader = create_prompt_loader(prompts, min(prompts_per_iteration, len(prompts)))
    train_options |= {"logger": logger or log_to_console}
    return train(state, loader, num_iterations, gen_config or GenerationConfig(), config, reward_fn, **train_options)


def _of_iteration(form: str, given: Any, iteration: int) -> Any:
    """What a function of the iteration returns; anything else is the same in each iteration."""
    return call_given(form, given, iteration) if callable(given) else given


def _evaluated(eval_fn: Callable[[TrainingState], Any], state: TrainingState) -> dict[str, float]:
    found = call_given("eval_fn(state)", eval_fn, state)
    scores = found if isinstance(found, Mapping) else {"score": found}
    try:
        return {f"eval/{name}": float(value) for name, value in scores.items()}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"eval_fn returned {shown(found)}; expected a number, or a dict of numbers") from error


def _microbatches(rollouts: Sequence[Rollout], tokens_max: int) -> Iterator[list[int]]:
    """The numbers of rollouts that run at the same time: groups with at most `tokens_max` tokens, or one group."""
    groups: dict[int, list[int]] = {}
    for number, group in enumerate(group_numbers(rollouts)):
        groups.setdefault(group, []).append(number)
    filled: list[int] = []
    tokens = 0
    for members in groups.values():
        lasts = [rollouts[number].all_turns[-1] for number in members]
        cost = sum(len(last.prompt_tokens) + len(last.tokens) for last in lasts)
        if filled and tokens + cost > tokens_max:
            yield sorted(filled)
            filled, tokens = [], 0
        filled += members
        tokens += cost
    yield sorted(filled)


def _part_of(targets: Any, places: Any, numbers: Sequence[int]) -> Any:
    """The targets of a part of the batch."""
    if isinstance(targets, algorithms.PPOAdvantages):
        return algorithms.PPOAdvantages(*(each[places] for each in targets))
    return [pair for pair in targets if pair[0] in numbers] if isinstance(targets, list) else targets


def _step(
    state: TrainingState, denominator: float, optimizer_step_fn: OptimizerStepFn | None
) -> tuple[float, dict[str, float]]:
    """Divide the gradient, and step. Returns its norm before clipping, and metrics."""
    import torch

    parameters = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients or not denominator:
        return 0.0, {"optim/skipped": 1.0}
    torch._foreach_div_(gradients, denominator)
    norm = float(torch.nn.utils.get_total_norm(gradients))
    if not math.isfinite(norm):
        raise TrainingError(f"the gradient's norm is {norm}; the weights are unchanged. Try a smaller learning rate")
    metrics = {"optim/skipped": 0.0, "optim/lr": float(state.optimizer.param_groups[0]["lr"])}
    if optimizer_step_fn is None:
        torch._foreach_mul_(gradients, min(1.0, GRAD_NORM_MAX / (norm + 1e-6)))
        state.optimizer.step()
        return norm, metrics
    form = "optimizer_step_fn(model, optimizer)"
    reported: Any = call_given(form, optimizer_step_fn, state.model, state.optimizer)
    if reported is not None and not isinstance(reported, Mapping):
        raise ConfigError(f"the optimizer_step_fn returned {shown(reported)}; expected a dict of metrics, or None")
    return norm, metrics | dict(reported or {})


def _statistics(
    iteration: int, rollouts: Sequence[Rollout], loss: float, grad_norm: float, metrics: dict[str, float]
) -> TrainingStats:
    rewards = [reward for rollout in rollouts if (reward := reward_of(rollout)) is not None]
    divergences = [rollout.kl_divergence for rollout in rollouts if rollout.kl_divergence is not None]
    sampled = [sum(len(turn.tokens) for turn in rollout.all_turns) for rollout in rollouts]
    mean_reward, kl = (statistics.fmean(values) if values else math.nan for values in (rewards, divergences))
    of_rollouts = {
        "rollouts/count": float(len(rollouts)),
        "rollouts/tokens": statistics.fmean(sampled),
        "rollouts/truncated": statistics.fmean(rollout.is_cut_off for rollout in rollouts),
        "rollouts/tool_calls": statistics.fmean(len(rollout.tool_calls) for rollout in rollouts),
        "rollouts/reward_std": statistics.pstdev(rewards) if rewards else math.nan,
    }
    return TrainingStats(iteration, loss, mean_reward, kl, grad_norm, of_rollouts | metrics)


# --- logs -------------------------------------------------------------------------------------------------------------


def log_to_console(stats: TrainingStats) -> None:
    """Print the numbers of an iteration in one line, and say so if nothing was trained.

    >>> log_to_console(TrainingStats(3, loss=0.0125, mean_reward=0.5, grad_norm=1.25, metrics={"eval/score": 0.75}))
    iteration 3  reward 0.500  loss +0.0125  grad_norm 1.25  eval/score 0.750
    """
    words = [f"iteration {stats.iteration}", f"reward {stats.mean_reward:.3f}", f"loss {stats.loss:+.4f}"]
    words += [] if math.isnan(stats.kl) else [f"kl {stats.kl:.4f}"]
    words += [] if math.isnan(stats.grad_norm) else [f"grad_norm {stats.grad_norm:.2f}"]
    words += [f"{name} {value:.3f}" for name, value in stats.metrics.items() if name.startswith("eval/")]
    if stats.metrics.get("optim/skipped"):
        cut_off = stats.metrics.get("rollouts/truncated", 0.0)
        words.append(f"nothing was trained: {cut_off:.0%} of the replies were cut off (max_tokens, train_truncated)")
    print("  ".join(words))


def log_to_wandb(
    stats: TrainingStats, *, folder: str | Path | None = None, project: str = "", run_name: str = ""
) -> None:
    """Log the numbers of an iteration to Weights & Biases, with the package rollouts-wandb.

    All calls of a process with the same arguments go to one W&B run; bind arguments with `functools.partial`. Raises
    UserError without the package, with the line to install it, and if W&B cannot start a run.

    >>> logger = functools.partial(log_to_wandb, project="mine")  # for train(..., logger=logger)

    Args:
        folder: where W&B writes its files, and the id with which a later process continues the run; None: a new one
        project: None: WANDB_PROJECT, else rollouts
        run_name: None: WANDB_NAME, else the name of the folder
    """
    values = {name: getattr(stats, name) for name in ("loss", "mean_reward", "kl", "grad_norm")}
    own = {f"train/{name}": value for name, value in values.items() if not math.isnan(value)}
    _wandb(None if folder is None else str(folder), project, run_name).log(own | dict(stats.metrics), stats.iteration)


@functools.lru_cache(maxsize=8)
def _wandb(folder: str | None, project: str, run_name: str) -> Any:
    """The logger of a W&B run."""
    where = Path("wandb") / time.strftime("primitives-%Y%m%d-%H%M%S") if folder is None else Path(folder)
    create = load_component(find_component("loggers", "wandb"))
    where.mkdir(parents=True, exist_ok=True)
    return create(where, {}, 0, project=project, run_name=run_name)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save_checkpoint(state: TrainingState, folder: str | Path = _CHECKPOINTS) -> Path:
    """Write `folder`/step_000010 (the number of finished iterations), complete or not at all. Returns its path.

    The folder has the weights and the tokenizer in the format of transformers, so you can load it as a model. It also
    has the optimizer with its parameters outside of the model (a value function), the reference, and the number of
    iterations. Raises CheckpointError.

    >>> import tempfile, torch
    >>> module = torch.nn.Linear(1, 1)  # in place of a language model
    >>> state = TrainingState(module, None, torch.optim.SGD(module.parameters(), lr=0.1), iteration=10)
    >>> save_checkpoint(state, tempfile.mkdtemp()).name
    'step_000010'
    """
    path = Path(folder) / f"step_{state.iteration:06d}"
    _objects(state).save(path, state.iteration, {"iteration": state.iteration})
    return path


def load_checkpoint(state: TrainingState, path: str | Path = _CHECKPOINTS) -> TrainingState:
    """Read a checkpoint of `save_checkpoint` into the model, the optimizer and the reference of `state`.

    `path` is one checkpoint, or a folder of them, of which the last one is read. Give a state with the same model and a
    new optimizer; with a reference if the training had one. The next iteration gives the same numbers as without the
    break. Raises ConfigError if there is no such checkpoint, and ModelError or TrainingError for another model.

    >>> import tempfile, torch
    >>> module, folder = torch.nn.Linear(1, 1), tempfile.mkdtemp()
    >>> state = TrainingState(module, None, torch.optim.SGD(module.parameters(), lr=0.1))
    >>> path = save_checkpoint(state._replace(iteration=10), folder)
    >>> load_checkpoint(state, folder).iteration
    10
    """
    from rollouts.training.weights.store import newest_checkpoint

    found = newest_checkpoint(Path(path)) or Path(path)
    return state._replace(iteration=int(_objects(state).load(found, "iteration")["iteration"]))


def _objects(state: TrainingState) -> TorchObjects:
    from rollouts_notes.pytorch_factory import TorchObjects

    modules = {} if state.ref_model is None else {"reference": state.ref_model}
    return TorchObjects(state.model, state.optimizer, tokenizer=state.tokenizer, modules=modules)

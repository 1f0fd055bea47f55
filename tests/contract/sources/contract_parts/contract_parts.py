"""Parts of an algorithm, a logger, tools and hooks."""

from pathlib import Path

from rollouts import hookimpl, tool

EVENTS: list[str] = []
"""The hooks that were called, for a test that reads them."""


def bounded(logprobs, old_logprobs, advantages, mask, step, *, cap: float = 2.0):
    """A policy gradient with bounded weights, and a metric."""
    ratio = (logprobs - old_logprobs).detach().exp()
    return -ratio.clamp(max=cap) * advantages * logprobs, {"contract/tokens": (mask > 0).sum(), "contract/step": step}


def above_mean(rewards, lengths, turn_rewards):
    """Compared with the mean of the group."""
    assert len(rewards) == len(lengths) == len(turn_rewards)
    return rewards - rewards.mean()


def judged(rewards, samples, trajectories, step, *, at_least: int = 1):
    """Groups with enough judged rollouts."""
    assert len(rewards) == len(trajectories) <= len(samples) and step >= 0
    known = sum(reward is not None for reward in rewards)
    return True if known >= at_least else "too_few_judged"


def without_cut(rewards, truncated, lengths, *, penalty: float = 0.25):
    """A price for replies that were cut off."""
    return rewards - penalty * truncated + 0.001 * lengths


def weighted(parts, weights):
    """The weighted sum."""
    return parts @ weights


def growing(step, *, until: int = 10) -> float:
    """A weight that grows."""
    return 1.0 + step / until


class Lines:
    """A line for each step in a file of the run."""

    def __init__(self, folder, settings, first_step, *, file: str = "contract.txt"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.stream = (Path(folder) / file).open("a", encoding="utf-8")
        self.stream.write(f"begins at {first_step}, {settings['samples_per_prompt']} samples\n")

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.stream.write(f"step {step}: {'contract/tokens' in metrics}\n")

    def close(self) -> None:
        self.stream.close()


def clock(zone: str = "UTC", *, hour: int = 12) -> str:
    """What time it is.

    Args:
        zone: the time zone
    """
    return f"{hour}:00 {zone}"


class Notes:
    """Notes that last for an episode."""

    def __init__(self, *, kept_max: int = 3):
        self.kept_max, self.notes = kept_max, []

    def setup(self, task):
        self.notes.append(task.key)

    @tool
    def remember(self, text: str) -> int:
        """Keep a note. Returns the number of notes."""
        self.notes = [*self.notes, text][-self.kept_max :]
        return len(self.notes)

    def close(self):
        self.notes.clear()


@hookimpl
def rollouts_find_component(kind, name):
    return brevity_of(name) if kind == "rewards" and name.startswith("contract/") else None


@hookimpl
def rollouts_list_components(kind):
    return {"contract/short": "Short replies."} if kind == "rewards" else None


@hookimpl
def rollouts_run_start(folder):
    EVENTS.append("start")


@hookimpl
def rollouts_samples(samples, step):
    EVENTS.append(f"samples {step} {len(samples) > 0}")


@hookimpl
def rollouts_step_end(metrics, step):
    EVENTS.append(f"step {step} {'reward/mean' in metrics}")


@hookimpl
def rollouts_run_end(summary):
    EVENTS.append(f"end {summary['steps']}")


def brevity_of(name):
    """The reward of a name."""

    def short(trajectory, *, target_tokens: int = 20) -> float:
        return float(trajectory.sampled_count <= target_tokens)

    return short if name == "contract/short" else None

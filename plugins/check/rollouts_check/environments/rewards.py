"""Checks of rewards: an expert earns the maximum, idle agents do not, and a verdict is a finite number each time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rollouts.author_code import message_of, place_of_function, shown
from rollouts.config.settings import Settings
from rollouts.encoding import encode
from rollouts.env.authoring import metrics_of, of_role, rewards_of
from rollouts.env.mixing import RETURNED_NONE, RewardTerm
from rollouts.errors import RolloutsError, counted
from rollouts.types import Message, Score, Task, Trajectory
from rollouts_check.environments import agents, traces
from rollouts_check.environments.subject import Demonstration, Subject
from rollouts_check.report import Attempt, FailedError, Passed
from rollouts_check.runner import once

LEFT = "an episode left something that a later one sees; keep its state on `self`, not in the class, a module or a file"
SET_UP_SECONDS = 5.0  # how long other tasks are set up
WRONG = ("0", "1", "?", "2")  # replies that are probably wrong, so that an episode lasts longer than an expert's
SLACK = 1e-6  # rounding of a reward
JUNK_REPLIES = ("", "?", "I do not know.", "0", "-1", "nan", "x" * 20_000, "é 👩‍🚀 \u202e", "[[]] {} ()", "\n\n\n")


class First(NamedTuple):
    """One of the first episodes that a subject plays."""

    words: str
    task: Task
    script: list[Message]
    played: agents.Played

    def play(self, subject: Subject) -> agents.Played:
        """The episode once more."""
        return agents.play_each(subject, [self.task], [agents.says(*self.script)], turns=len(self.script))[0]


def episode(subject: Subject) -> Passed:
    """An episode runs to its end, with a call of each tool, and keeps its task and its trajectory. Other tasks can be
    set up. A note says if `reply` never ends it.

    Advice: do not change the task: in `setup`, copy what an episode changes
    """
    first_episodes(subject)
    task = subject.tasks[0]
    script = agents.example_script(subject)
    judged: list[bytes] = []

    def record(task: Task) -> float:
        judged.append(encode(task))
        return 0.0

    term = RewardTerm("rollouts_task", record, 0.0, {}, ("task",))
    watch = agents.Watch()
    (played,) = agents.play_each(
        subject, [task], [agents.says(*script)], turns=len(script), rewards=(term,), watch=watch
    )
    attempt = subject.attempt("play an episode with a call of each tool, then a text", "setup")
    require_end(played, attempt.tried)
    difference = next((path for each in judged if (path := traces.first_difference(encode(task), each))), "")
    attempt.require(not difference, f"the task changed: {difference}")
    notes = []
    if subject.has("reply"):
        agents.play_each(subject, [task], [agents.says(*WRONG)], turns=len(WRONG), rewards=(), watch=watch)
        attempt = subject.attempt(
            "play an episode", "reply", change="return messages from `reply`, and change no trajectory"
        )
        attempt.require(not watch.changed, "the trajectory was another one after `reply`")
        turns = len(script) - 1 + Settings.max_turns
        (endless,) = agents.play_each(subject, [task], [agents.says(*script)], turns=turns, rewards=())
        if "turn_limit" in endless.trajectory.metrics:
            ended = f"it ended at --max-turns {Settings.max_turns}. Return None to end it{subject.at('reply')}"
            notes = [f"`reply` never ended the episode; {ended}"]
    count = _set_up_each(subject)
    remark = f"{counted(len(played.trajectory.messages), 'message')}, {played.episode.status.value}"
    return Passed(f"{remark}; {counted(count, 'task')} set up" if count else remark, notes)


def _set_up_each(subject: Subject) -> int:
    """Run `setup`, `tools` and `close` for each drawn task, for a few seconds. Returns the number of tasks. Raises
    FailedError for the first task that fails.
    """
    if not (subject.has("setup") or subject.has("tools")):
        return 0
    tasks = list({task.key: task for task in subject.drawn}.values())
    deadline = time.monotonic() + SET_UP_SECONDS

    async def each() -> int:
        for number, task in enumerate(tasks, start=1):
            try:
                async with agents.ready(subject, task):
                    pass
            except RolloutsError as error:
                change = "correct `setup` or `tools`; they must work for every task"
                raise FailedError(f"set up the task {shown(task.key)}", message_of(error), change) from error
            if time.monotonic() > deadline:
                return number
        return len(tasks)

    return agents.in_trio(each)


@once
def first_episodes(subject: Subject) -> list[First]:
    """A call of each tool, an idle agent, and the experts, before the subject plays anything else. `repeatable` plays
    them again after other episodes.
    """
    subject.kept["before"] = traces.kept_by_author(subject)
    found, subject.kept["blocked"] = _play_first(subject)
    return found


def _play_first(subject: Subject) -> tuple[list[First], traces.Blocked]:
    async def play_all() -> list[First]:
        return [
            First(words, task, script, await agents.play(subject, task, agents.says(*script), turns=len(script)))
            for words, task, script in first_scripts(subject)
        ]

    with traces.Blocked(str(getattr(subject.component, "__module__", "")).partition(".")[0]) as blocked:
        return agents.in_trio(play_all), blocked


def event_loop(subject: Subject) -> str:
    """Async methods do not block the event loop, which all episodes share: no `time.sleep`, no program, no request.

    Advice: await what takes time (trio.sleep, an async client), or leave `async` out: it then gets a thread
    """
    first_episodes(subject)
    blocked: traces.Blocked = subject.kept["blocked"]
    seen = [*blocked.calls]
    if blocked.idle and not seen:  # the first time, it may have loaded something
        seen = [*_play_first(subject)[1].idle]
    for line in seen:
        raise FailedError("play episodes, and watch the event loop", f"an async method blocks it: {line}")
    return counted(len(first_scripts(subject)), "episode")


def first_scripts(subject: Subject) -> list[tuple[str, Task, list[Message]]]:
    """The first episodes before they are played: words for each, its task, and what the agent says."""
    scripts = [("a call of each tool, then a text", subject.tasks[0], agents.example_script(subject))]
    scripts += [("an empty text", subject.tasks[0], [Message("assistant", "")])]
    scripts += [(f"the demonstration of {shown(each.task.key)}", each.task, each.replies) for each in subject.expert]
    return scripts


def repeatable(subject: Subject) -> str:
    """The same task and replies give the same messages and reward, also after other episodes, and nothing is kept."""
    known = first_episodes(subject)
    for each in known:
        again = [each.play(subject), each.play(subject)]
        if difference := difference_of(each.played, again[0]) or difference_of(*again):
            raise _not_repeatable(subject, each, difference, again)
    for each in (known[0], known[-1]):
        states = []
        for _ in range(3):
            each.play(subject)
            states.append(traces.kept_by_author(subject))
        if names := traces.grown(states):  # a list or a mapping of the class, the module or `shared`
            raise FailedError(f"play {each.words} three times", "; ".join(names[:2]), LEFT)
    return counted(len(known), "episode")


def _not_repeatable(subject: Subject, first: First, difference: str, again: Sequence[agents.Played]) -> FailedError:
    """The failure with its probable cause: what other episodes left, or something random."""
    tried = f"play {first.words} to the same task again, after other episodes"
    is_steady = not difference_of(*again)
    before = subject.kept["before"] if is_steady else traces.kept_by_author(subject)
    first.play(subject)
    left = traces.changes(before, traces.kept_by_author(subject))
    if left or is_steady:
        return FailedError(tried, "; ".join([difference, *left[:2]]), LEFT)
    change = "keep the state of an episode on `self`, and draw from a generator that `setup` makes from the task"
    if sources := traces.random_sources(subject, with_episode=True):
        change = "decide it from the task, or with a generator that `setup` makes from it: random.Random(task.key)"
    return FailedError(tried, "; ".join([difference, *sources]), change)


def oracle(subject: Subject) -> Passed:
    """An expert earns the maximum: the demonstrations, replayed with the real tools."""
    subject.require_rewards()
    highest = subject.reward_range[1] if subject.reward_range else None
    for demonstration, played in zip(subject.demonstrations, _experts(subject), strict=True):
        wanted = f"{highest:g}, the end of reward_range" if highest is not None else "more than 0"
        change = f"let the expert earn {wanted}: correct the demonstration or the reward"
        tried = f"replay the demonstration of the task {shown(demonstration.task.key)}"
        require_end(played, tried)
        for failure in played.trajectory.tool_errors.values():
            raise FailedError(tried, failure, "correct the demonstration's call, or the tool")
        value, why = played.reward, f": {played.episode.score.why}" if played.episode.score.why else ""
        is_enough = value is not None and (value > 0 if highest is None else value >= highest - SLACK)
        last = shown(played.trajectory.last_text)
        seen = f"the reward was {_number(value)}{why}; the last message was {last}"
        Attempt(tried, *judges(subject), change=change).require(is_enough, seen)
    remark = f"{counted(len(subject.demonstrations), 'demonstration')}, reward {_number(_experts(subject)[0].reward)}"
    return Passed(remark, list(_other_results(subject))[:1])


def _other_results(subject: Subject) -> Iterator[str]:
    """Notes on demonstrations that show another result of a tool than the real one."""
    for each, played in zip(subject.demonstrations, _experts(subject), strict=True):
        both = (each.messages, played.trajectory.messages)
        results = [[message.text for message in messages if message.role == "tool"] for messages in both]
        for one, other in zip(*results, strict=False):
            if one != other:
                words = f"a demonstration shows the result {shown(one)}, and the tool gave {shown(other)}"
                advice = f"a model that learns from it expects the wrong result{subject.at('demonstrations')}"
                yield f"{words}; {advice}"


def no_op(subject: Subject) -> str:
    """An agent that does nothing earns less than the expert.

    Advice: judge whether the task was solved, not whether the episode ended
    """
    return _below(subject, "reply with an empty text", lambda each: "")


def echo(subject: Subject) -> str:
    """An agent that repeats the prompt earns less than the expert.

    Advice: compare one answer: a text that only contains the answer somewhere is no answer
    """
    return _below(subject, "reply with the text of the prompt", lambda each: each.task.messages[-1].text)


def rewards(subject: Subject) -> str:
    """Each verdict and each metric is a finite number, in the declared range, and the same when it is given again."""
    subject.require_rewards()
    declared = _declared_range(subject)
    task, example = subject.tasks[0], agents.example_script(subject)
    pairs: list[tuple[Task, Sequence[Message]]] = [(each.task, each.replies) for each in subject.expert]
    pairs += [(task, example), *((task, [Message("assistant", text)]) for text in JUNK_REPLIES)]
    scripts = [*(each.replies for each in subject.expert[:1]), example]
    pairs += [(task, script[:1]) for script in scripts if script[0].tool_calls]  # cut off after the call
    again = tuple(term._replace(alias=f"again_{term.alias}") for term in subject.rewards)

    async def judged() -> list[tuple[agents.Played, agents.Played]]:
        found = []
        for task, script in pairs:
            turns = len(script)
            first = await agents.play(subject, task, agents.says(*script), turns=turns)
            if not first.fault:
                await _require_unchanged(subject, task, script)
            twice = await agents.play(
                subject, task, agents.says(*script), turns=turns, rewards=(*subject.rewards, *again)
            )
            found.append((first, twice))
        return found

    for (_, script), (first, twice) in zip(pairs, agents.in_trio(judged), strict=True):
        tried = f"judge an episode whose last reply is {shown(script[-1].text, 60)}"
        attempt = Attempt(tried, *judges(subject), change="correct the reward, or the class attribute reward_range")
        if first.fault:
            raise FailedError(tried, first.fault, "return a finite number, or None if the reward cannot judge")
        _require_metrics(subject, first, tried)
        for why in "; ".join(each.score.why for each in first.episode.by_role).split("; "):
            if " could not judge: " in why and f": {RETURNED_NONE}" not in why:
                raise FailedError(tried, why, "let the reward return a number for any reply: 0 if it is no answer")
        for (name, value), (_, second) in (pair for each in twice.episode.by_role for pair in _pairs(each.score)):
            if value != second:
                sources = "".join(f"; {each}" for each in traces.random_sources(subject, with_episode=True))
                change = "judge the episode alone: change nothing in a reward, draw nothing, and ask for no clock"
                raise attempt.failed(f"{name} was {_number(value)}, then {_number(second)}{sources}", change)
        if declared and (value := first.reward) is not None:
            is_inside = declared[0] - SLACK <= value <= declared[1] + SLACK
            attempt.require(is_inside, f"the reward was {value:g}, and reward_range is {declared}")
    within = f", in {declared}" if declared else ""
    return f"{counted(len(pairs), 'episode')}{within}"


def _require_metrics(subject: Subject, played: agents.Played, tried: str) -> None:
    """Raise FailedError if a metric raised, or returned no finite number."""
    for each in played.episode.by_role:
        if each.metrics.get("metric_failures"):
            own = of_role(metrics_of(subject.component), each.role)
            lost = [metric for metric in own if f"metric/{metric.name}" not in each.metrics]
            places = [f"{metric.name} ({place_of_function(metric.function)})" for metric in lost]
            change = "let a metric return a finite number for any episode, also for one without a tool call"
            raise FailedError(tried, f"a metric raised, or returned no finite number: {'; '.join(places)}", change)


async def _require_unchanged(subject: Subject, task: Task, script: Sequence[Message]) -> None:
    """Play an episode. Raises FailedError if its rewards or metrics changed its trajectory."""
    before: dict[str, bytes] = {}

    def record(trajectory: Trajectory) -> float:
        before[trajectory.role] = encode(trajectory)
        return 0.0

    first = RewardTerm("rollouts_before", record, 0.0, {}, ("trajectory",))
    played = await agents.play(
        subject, task, agents.says(*script), turns=len(script), rewards=(first, *subject.rewards)
    )
    if played.fault or played.episode.status.is_infrastructure:
        return  # other checks report it
    change = "do not change the trajectory or its task in a reward or a metric"
    attempt = Attempt(
        "compare the trajectory of an episode before and after its rewards", *judges(subject), change=change
    )
    for each in played.episode.by_role:
        attempt.require(encode(each.trajectory) == before[each.role], "it was another one afterwards")


def _pairs(score: Score) -> Iterator[tuple[tuple[str, float | None], tuple[str, float | None]]]:
    """Each reward and each part of the first judgment, with that of the second. A score has its rewards first."""
    found, count = list(score.parts.items()), len(score.weights)
    for several in (found[:count], found[count:]):
        half = len(several) // 2
        yield from zip(several[:half], several[half:], strict=False)


def require_end(played: agents.Played, tried: str) -> None:
    """Raise FailedError if the environment failed."""
    status = played.trajectory.status
    attempt = Attempt(tried, change="correct the method that raised, or that took too long")
    attempt.require(not status.is_infrastructure, f"it ended as {status.value}: {played.trajectory.error}")


def difference_of(first: agents.Played, second: agents.Played) -> str:
    """The first difference of two episodes in messages, status or reward; empty if they are equal."""
    for both in zip(first.episode.trajectories, second.episode.trajectories, strict=False):
        for number, (one, other) in enumerate(zip(*(each.messages for each in both), strict=False), start=1):
            if one != other:
                return f"message {number} ({one.role}) was {shown(one.text)}, and then {shown(other.text)}"
        counts = [len(each.messages) for each in both]
        if counts[0] != counts[1]:
            return f"one episode had {counted(counts[0], 'message')}, the other {counts[1]}"
        if both[0].status != both[1].status:
            statuses = [f"{each.status.value} {each.error or ''}".strip() for each in both]
            return f"one episode ended as {statuses[0]}, the other as {statuses[1]}"
    counts = [len(each.episode.trajectories) for each in (first, second)]
    if counts[0] != counts[1]:
        return f"one episode had {counted(counts[0], 'conversation')}, the other {counts[1]}"
    ours, theirs = (
        [
            f"{each.role}/{name} {value!r}".lstrip("/")
            for each in played.episode.by_role
            for name, value in each.score.parts.items()
        ]
        for played in (first, second)
    )
    return "" if ours == theirs else f"the rewards were {', '.join(ours)}, and then {', '.join(theirs)}"


def judged_demonstrations(subject: Subject) -> list[Demonstration]:
    """The demonstrations; without them, replies with the tasks' answers if these earn the largest reward. Raises
    SkippedError if there are neither.
    """
    subject.require_rewards()
    return [each for each, _ in judged(subject)] or subject.demonstrations


def expert_messages(subject: Subject) -> list[list[Message]]:
    """The messages of each expert's episode, with those of the real tools. None without demonstrations."""
    return [played.trajectory.messages for played in _experts(subject)]


@once
def judged(subject: Subject) -> list[tuple[Demonstration, float]]:
    """The demonstrations and what they earn; without them, replies with the tasks' answers if these earn the most."""
    found = [(each, played.reward or 0.0) for each, played in zip(subject.expert, _experts(subject), strict=True)]
    return found or _invented(subject)


def _invented(subject: Subject) -> list[tuple[Demonstration, float]]:
    """Replies with the tasks' answers, if all of them earn the largest reward (the end of `reward_range`, else 1), and
    if the answers of other tasks earn less.
    """
    tasks = [task for task in subject.tasks if isinstance(task.answer, str | int | float) and str(task.answer).strip()]
    if len(tasks) < len(subject.tasks) or not subject.is_judged:
        return []
    highest = subject.reward_range[1] if subject.reward_range else 1.0
    replies = [Message("assistant", str(task.answer)) for task in tasks]

    def earned(texts: Sequence[Message]) -> list[bool]:
        played = agents.play_each(subject, tasks, [agents.says(each) for each in texts])
        return [each.reward is not None and each.reward >= highest - SLACK for each in played]

    if not all(earned(replies)) or any(earned([*replies[1:], Message("assistant", "rollouts")])):
        return []
    return [(Demonstration(task, [reply]), highest) for task, reply in zip(tasks, replies, strict=True)]


def _experts(subject: Subject) -> list[agents.Played]:
    """The replayed demonstrations, played once for all checks."""
    return [each.played for each in first_episodes(subject)[2:]]


def _below(subject: Subject, tried: str, reply: Callable[[Demonstration], str]) -> str:
    known = judged_demonstrations(subject)
    played = agents.play_each(subject, [each.task for each in known], [agents.says(reply(each)) for each in known])
    attempt = Attempt(tried, *judges(subject))
    for (_, expert), each in zip(judged(subject), played, strict=True):
        is_less = each.reward is None or each.reward < expert - SLACK
        attempt.require(is_less, f"the reward was {_number(each.reward)}, and the expert earns {expert:g}")
    values = [each.reward for each in played if each.reward is not None]
    return f"reward at most {max(values):g}" if values else "could not be judged"


def _declared_range(subject: Subject) -> tuple[float, float] | None:
    """The declared range. Raises FailedError if it is none."""
    declared: Any = getattr(subject.component, "reward_range", None)
    if declared is None:
        return None
    is_pair = isinstance(declared, tuple | list) and len(declared) == 2
    is_range = is_pair and all(isinstance(each, int | float) for each in declared) and declared[0] < declared[1]
    attempt = Attempt("read the declared range", change="write two numbers, such as reward_range = (0.0, 1.0)")
    attempt.require(is_range, f"reward_range is {shown(declared)}")
    return subject.reward_range


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def judges(subject: Subject) -> tuple[Any, ...]:
    """The functions of all rewards."""
    own = [each.function for each in rewards_of(subject.component)]
    return (*own, *(term.function for term in subject.rewards))

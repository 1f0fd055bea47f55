"""Loggers, tools, sandboxes, backends and the like with one mistake each: exactly the expected check finds it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
import types
from pathlib import Path

import click
import psutil
import pytest
import torch
import trio
import trio.lowlevel
from rollouts_check import check_component
from rollouts_check.components.table import FAMILIES

from rollouts import Message, ToolCall, hookimpl
from rollouts.child_environment import child_environment
from rollouts.env.workers.process import Options, ProcessConnector
from rollouts.errors import ConfigError, UserError
from rollouts.inference.base import Capabilities, Generation, Health, VersionSpan
from rollouts.inference.chatting import ChatReply, evaluation_only
from rollouts.loggers import SampleSettings
from rollouts.plugins.index import HOOKS
from rollouts.sandboxes import Result, SubprocessSandboxes
from rollouts.training.backends.torch import create_torch_backend

OF_PACKAGE = ("imports", "wheel")
FAULTS = []


def fault(kind, expected):
    """Mark a component of this kind, which the expected check finds."""

    def mark(component):
        FAULTS.append((kind, component, expected))
        return component

    return mark


# --- samplers ---------------------------------------------------------------------------------------------------------


class GoodSampler:
    """The best task so far, or a random one."""

    def __init__(self, tasks):
        self.means = dict.fromkeys(tasks, 0.0)

    def choose(self, step, rng):
        return max(self.means, key=self.means.get) if rng.random() < 0.5 else rng.choice(list(self.means))

    def finished(self, task, rewards, step):
        judged = [reward for reward in rewards if reward is not None]
        if judged and task in self.means:
            self.means[task] = sum(judged) / len(judged)

    def metrics(self):
        return {"best": max(self.means.values())}

    def state(self):
        return self.means

    def restore(self, state):
        self.means.update({task: mean for task, mean in state.items() if task in self.means})


@fault("samplers", "chooses")
class AnUnknownTask(GoodSampler):
    def choose(self, step, rng):
        return "task-0"


@fault("samplers", "chooses")
class WithoutMetrics(GoodSampler):
    metrics = None


@fault("samplers", "any-outcome")
class TakesTheMeanOfAll(GoodSampler):
    def finished(self, task, rewards, step):
        super().finished(task, [sum(rewards)], step)


@fault("samplers", "restored")
class ForgetsItsState(GoodSampler):
    def restore(self, state):
        pass


@fault("samplers", "other-tasks")
class KeepsEveryTask(GoodSampler):
    def restore(self, state):
        self.means = dict(state)


# --- references and optimizers ----------------------------------------------------------------------------------------


@fault("references", "updates")
def replaced(reference, policy, version):
    return [new.clone() for new in policy]


@fault("references", "policy-unchanged")
def swapped(reference, policy, version):
    for old, new in zip(reference, policy, strict=True):
        new.copy_(old)


@fault("references", "precisions")
def one_precision(reference, policy, version):
    torch._foreach_lerp_(reference, policy, 0.5)


@fault("optimizers", "steps")
def some_parameters(params, lr):
    return torch.optim.SGD(params[0]["params"][:1], lr=lr)


class _Own(torch.optim.Optimizer):
    """Gradient descent whose parts a subclass replaces."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, group["lr"])

    def move(self, parameter, lr):
        parameter.sub_(parameter.grad, alpha=lr)


@fault("optimizers", "descends")
def ascends(params, lr):
    class Ascends(_Own):
        def move(self, parameter, lr):
            parameter.add_(parameter.grad, alpha=lr)

    return Ascends(params, lr)


@fault("optimizers", "learning-rates")
def one_rate(params, lr):
    class OneRate(_Own):
        def move(self, parameter, lr):
            parameter.sub_(parameter.grad, alpha=1e-3)

    return OneRate(params, lr)


@fault("optimizers", "steps")
def divides(params, lr):
    class Divides(_Own):
        def move(self, parameter, lr):
            parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=lr)

    return Divides(params, lr)


@fault("optimizers", "restored")
def forgets(params, lr):
    class Forgets(_Own):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            super().step()

        def move(self, parameter, lr):
            parameter.sub_(parameter.grad, alpha=lr / self.steps)

    return Forgets(params, lr)


# --- loggers ----------------------------------------------------------------------------------------------------------


class GoodLogger:
    """Writes lines."""

    def __init__(self, folder):
        self.stream = open(f"{folder}/lines.txt", "a")

    def log(self, metrics, step):
        self.stream.write(f"{step} {metrics}\n")

    def close(self):
        self.stream.close()


@fault("loggers", "opens")
class WithoutClose:
    def log(self, metrics, step):
        pass


@fault("loggers", "logs")
class OneStepOnly(GoodLogger):
    def log(self, metrics, step):
        assert step == 0, f"step {step}"


@fault("loggers", "any-metric")
class WholeNumbers(GoodLogger):
    def log(self, metrics, step):
        self.stream.write(str([round(value) for value in metrics.values()]))


@fault("loggers", "metrics-unchanged")
class AddsTheStep(GoodLogger):
    def log(self, metrics, step):
        metrics["step"] = step


class GoodTables(GoodLogger):
    """Writes rollouts too."""

    sample_settings = SampleSettings()

    def log_samples(self, name, rows, step):
        self.stream.writelines(f"{name} {step} {dict(row)!r}\n".encode().decode("ascii", "ignore") for row in rows)


@fault("loggers", "samples")
class WithoutSettings(GoodLogger):
    def log_samples(self, name, rows, step):
        pass


@fault("loggers", "samples")
class EightRollouts(GoodTables):
    sample_settings = 8


@fault("loggers", "samples")
class RewardsAreThere(GoodTables):
    def log_samples(self, name, rows, step):
        sum(row["reward"] for row in rows)


@fault("loggers", "samples")
class ChangesRows(GoodTables):
    def log_samples(self, name, rows, step):
        for row in rows:
            row.pop("conversation")


@fault("loggers", "quick")
class Blocks(GoodLogger):
    def log(self, metrics, step):
        time.sleep(1.1 if step == 2 and "eval/reward_mean" not in metrics and len(metrics) == 4 else 0)


@fault("loggers", "closes")
class ClosesOnce(GoodLogger):
    def close(self):
        self.stream.write("")
        self.stream.close()


@fault("loggers", "closes")
class LeavesAThread(GoodLogger):
    def __init__(self, folder):
        super().__init__(folder)
        self.done = threading.Event()
        threading.Thread(target=self.done.wait, args=(8,), daemon=True, name="left").start()


@fault("loggers", "resumed")
class WrittenAnew(GoodLogger):
    def __init__(self, folder):
        self.stream = open(f"{folder}/lines.txt", "w")


@fault("loggers", "resumed")
class NewFile(GoodLogger):
    def __init__(self, folder):
        self.stream = open(f"{folder}/lines.txt", "x")


# --- tools and parsers ------------------------------------------------------------------------------------------------


@fault("tools", "tool-definition")
def no_docstring(query: str) -> str:
    return query


@fault("tools", "tool-results")
def an_object(query: str):
    """Search."""
    return object()


@fault("tools", "tool-schemas")
def a_name_that_has_more_characters_than_the_sixty_four_that_models_accept(query: str) -> str:
    """Search."""
    return query


@fault("tools", "tool-arguments")
def writes_anywhere(path: str) -> str:
    """Write a file."""
    if not path.startswith("/") or "\0" in path or os.path.isdir(path):
        raise ValueError("a path, please")
    with open(path, "w") as stream:
        stream.write("x")
    return "written"


@fault("tools", "event-loop")
async def sleeps(query: str) -> str:
    """Search."""
    time.sleep(0.001)  # noqa: ASYNC251
    return query


def good_parser(text, *, word: str = "CALL"):
    pattern = word + r" (\w+)\((\w+)=(.*?)\)"
    found = [ToolCall(name, {key: value}) for name, key, value in re.findall(pattern, text)]
    return found, re.sub(pattern, "", text).strip()


def _write(calls):
    return "\n".join(f"CALL {each.name}({key}={value})" for each in calls for key, value in each.arguments.items())


good_parser.write = _write


@fault("tool_parsers", "plain-text")
def every_word(text):
    return [ToolCall(word) for word in text.split()], ""


@fault("tool_parsers", "any-text")
def strict(text):
    calls = []
    for line in text.splitlines() if text.startswith("CALL") else ():
        name, _, rest = line.removeprefix("CALL ").partition("(")
        key, value = rest.rstrip(")").split("=")
        calls.append(ToolCall(name, {key: value}))
    return calls, "" if calls else text


def _one_by_one(calls):
    return "\n".join(_write([each]) for each in calls)


strict.write = _one_by_one


@fault("tool_parsers", "round-trip")
def other_format(text):
    return good_parser(text)


other_format.write = lambda calls: _write(calls).replace("CALL", "call")


@fault("tool_parsers", "quick")
def slow(text):
    if len(text) > 300_000:
        time.sleep(2.1)
    return good_parser(text)


@fault("tool_parsers", "round-trip")
def sets(text):
    calls, rest = good_parser(text)
    return [ToolCall(each.name, {"query": set(each.arguments)}) for each in calls], rest


sets.write = _write


# --- sandboxes --------------------------------------------------------------------------------------------------------


class _Wrapped:
    """A sandbox of `subprocess` with something replaced."""

    words, not_stopped = "plain processes", ("everything",)
    replaced = types.MappingProxyType({})

    def __init__(self):
        self.inner = SubprocessSandboxes()

    def check(self):
        self.inner.check()

    def open(self):
        return _Box(self.inner.open(), self.replaced)


class _Box:
    def __init__(self, inner, replaced):
        self.inner, self.replaced = inner, replaced

    def __getattr__(self, name):
        if name in self.replaced:
            return types.MethodType(self.replaced[name], self.inner)
        return getattr(self.inner, name)


def sandbox_fault(expected, **replaced):
    made = type(f"Replaced_{'_'.join(replaced)}", (_Wrapped,), {"replaced": replaced})
    return fault("sandboxes", expected)(made)


@fault("sandboxes", "protocol")
class WithoutWords(_Wrapped):
    words = ""


def _raises(box, command, **options):
    result = box.exec(command, **options)
    if result.exit_code == 127:
        raise FileNotFoundError(command)
    return result


def _never_late(box, command, *, seconds=20.0, **options):
    late = seconds == 1.0
    return box.exec("echo begun" if late else command, seconds=seconds, **options)


def _reads_anything(box, path):
    return Path(path).read_bytes() if path.startswith("/") else box.read(path)


def _no_limits(box, command, *, output_kib=64, memory_gb=None, **options):
    return box.exec(command, **options)


sandbox_fault("commands", exec=_raises)
sandbox_fault("files", write=lambda box, path, data: box.write(path, str(data)))
sandbox_fault("outside", read=_reads_anything)
sandbox_fault("late", exec=_never_late)
sandbox_fault("limits", exec=_no_limits)
del sandbox_fault


# --- inference and training backends ----------------------------------------------------------------------------------


class GoodEngine:
    """Ids by the seed."""

    capabilities = Capabilities()
    context_tokens_max, vocabulary_size, version = 1000, 100, 0
    opened = 0

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        pass

    def open_session(self, order):
        self.opened += 1
        return f"{order}-{self.opened}"

    def close_session(self, session):
        pass

    async def generate(self, request):
        return Generation([request.seed + 1] * 2, [-0.5, -0.5], "stop", [VersionSpan(0, 0, 2)])

    async def score(self, tokens, temperature=1.0):
        return [0.0, *[-0.5] * (len(tokens) - 1)]

    async def update_weights(self, update):
        pass

    async def health(self):
        return Health(True, 0)


@fault("inference", "protocol")
class WithoutScore(GoodEngine):
    score = property(lambda self: (_ for _ in ()).throw(AttributeError))


@fault("inference", "protocol")
class UndeclaredChat(GoodEngine):
    async def chat(self, request):
        return ChatReply(Message("assistant", "hello"), "stop")


@fault("inference", "absent")
class RawError(GoodEngine):
    capabilities = Capabilities(checks=True)

    async def check(self):
        raise ConnectionRefusedError("127.0.0.1")


@fault("inference", "replies")
class WithoutSeed(GoodEngine):
    async def generate(self, request):
        self.__class__.opened += 1
        return Generation([self.opened % 90], [-0.5], "stop", [VersionSpan(0, 0, 1)])


@fault("inference", "replies")
class PositiveLogprobs(GoodEngine):
    async def generate(self, request):
        return Generation([1], [0.5], "stop", [VersionSpan(0, 0, 1)])


@fault("inference", "scores")
class OtherScores(GoodEngine):
    async def score(self, tokens, temperature=1.0):
        return [0.0, *[-0.7] * (len(tokens) - 1)]


@fault("inference", "sessions")
class OneSession(GoodEngine):
    def open_session(self, order):
        return "session"


@evaluation_only
@fault("inference", "replies")
class ChatsAsUser(GoodEngine):
    capabilities = Capabilities(trainable=False, checks=True, chats=True)

    async def check(self, tools=(), temperature=1.0):
        await trio.lowlevel.checkpoint()

    async def chat(self, request):
        return ChatReply(Message("user", "hello"), "stop")


def trained_by(**replaced):
    """A factory of the core's backend, with methods replaced."""

    def make(model, seed, steps, lr, lora_rank, tokens_per_microbatch, algorithms, auxiliary_models):
        backend = create_torch_backend(
            model, seed, steps, lr, lora_rank, tokens_per_microbatch, algorithms, auxiliary_models
        )
        for name, function in replaced.items():
            setattr(backend, name, types.MethodType(function, backend))
        return backend

    make.__name__ = f"trained_by_{'_'.join(replaced) or 'torch'}"
    return make


def _twice(backend, batch):
    negative = [setattr(row, "advantages", [-each for each in row.advantages]) for row in batch.rows]
    assert negative
    return type(backend).forward_backward(backend, batch)


async def _nothing(*arguments):
    return {}


fault("training", "step")(trained_by(forward_backward=_twice))
fault("training", "weights")(trained_by(load_weights=_nothing))
fault("training", "checkpoint")(trained_by(load=_nothing))


# --- workers ----------------------------------------------------------------------------------------------------------


class GoodWorker:
    """The core's process."""

    def __init__(self, options: Options):
        self.processes = ProcessConnector(child_environment(), options)

    async def open(self, log):
        return await self.processes.open(log)


@fault("workers", "connects")
class NoConnector:
    """It has no `open`."""


@fault("workers", "leaves-nothing")
class LeavesAProcess(GoodWorker):
    def __init__(self, options: Options):
        super().__init__(options)
        LEFT.append(os.posix_spawnp("sleep", ["sleep", "60"], os.environ))


# --- commands and hooks -----------------------------------------------------------------------------------------------


@fault("commands", "command")
def no_command():
    """A plain function."""


@fault("commands", "help-text")
@click.command()
@click.option("--metric")
def no_help(metric):
    """Print a metric."""


@fault("commands", "wrong-usage")
@click.command()
@click.argument("run", type=click.Path())
def raw_error(run):
    """Print a file."""
    click.echo(open(run).read())


def hook_plugin(expected, **functions):
    """A module with hooks."""
    module = types.ModuleType(f"hooks_{expected.replace('-', '_')}_{len(FAULTS)}")
    vars(module).update(functions)
    fault(HOOKS, expected)(module)


@hookimpl
def _raises_an_event(metrics):
    raise KeyError("reward/mean")


@hookimpl
def _changes_metrics(metrics):
    metrics.clear()


@hookimpl
def _lists(kind):
    return ["mine/one"] if kind == "environments" else None


@hookimpl
def _finds_nothing(kind, name):
    return None


@hookimpl
def _finds_everything(kind, name):
    return dict


def _unmarked(metrics, step):
    pass


hook_plugin("hooks", rollouts_step_end=_unmarked)
hook_plugin("hooks")
hook_plugin("events", rollouts_step_end=_raises_an_event)
hook_plugin("events", rollouts_step_end=_changes_metrics)
hook_plugin("components", rollouts_list_components=_lists, rollouts_find_component=_finds_nothing)
hook_plugin("components", rollouts_find_component=_finds_everything)


LEFT = []


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    while LEFT:
        pid = LEFT.pop()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# --- tests ------------------------------------------------------------------------------------------------------------


def name_of(value):
    return value if isinstance(value, str) else getattr(value, "__name__", None) or getattr(value, "name", "object")


def failed(kind, component, **options):
    """The names of the failed checks, and the message."""
    try:
        check_component(component, kind, skip=OF_PACKAGE, **options)
    except AssertionError as error:
        lines = [line for line in str(error).splitlines() if " FAILED" in line]
        return [line.split()[0] for line in lines], str(error)
    return [], ""


SLOW = ("sandboxes", "training", "workers")  # they start processes, and load a model


def marked(*row):
    """One fault of each of these kinds is in the ordinary run. Checks of time wait for seconds."""
    is_costly = row[0] in SLOW and row[-1] not in ("step", "connects", "outside")
    if row[-1] in ("quick", "closes"):
        return pytest.param(*row, marks=pytest.mark.slow)
    return pytest.param(*row, marks=pytest.mark.nightly) if is_costly else row


@pytest.mark.parametrize(("kind", "component", "expected"), [marked(*row) for row in FAULTS], ids=name_of)
def test_exactly_the_expected_check_finds_a_fault(kind, component, expected):
    found, message = failed(kind, component)
    assert found == [expected], message
    assert all(f"\n    {word} " in message for word in ("tried", "seen", "change"))


@pytest.mark.parametrize(
    ("kind", "component"),
    [
        ("samplers", GoodSampler),
        ("loggers", GoodLogger),
        ("loggers", GoodTables),
        ("tool_parsers", good_parser),
        marked("sandboxes", _Wrapped),
        ("inference", GoodEngine),
        marked("workers", GoodWorker),
        marked("training", trained_by()),
    ],
    ids=name_of,
)
def test_a_component_without_a_mistake_passes(kind, component):
    assert failed(kind, component) == ([], "")


def test_every_family_has_two_faults():
    kinds = [kind for kind, _, _ in FAULTS]
    functions = {kind for kind, family in FAMILIES.items() if family.trial is not None}
    others = {"optimizers", "references", "samplers", "tool_parsers"}
    assert set(kinds) == (set(FAMILIES) - functions) | others  # test_faults_of_functions.py has those of functions
    assert all(kinds.count(kind) >= 2 for kind in set(kinds))


class NeedsAService:
    """A logger whose service is not here."""

    def __init__(self, folder, *, address: str = ""):
        if not address:
            raise UserError("the service has no address; type --logger.address HOST")
        raise ConfigError(f"nothing listens at {address}")

    def log(self, metrics, step):
        raise AssertionError

    close = log


def test_what_cannot_be_tried_here_is_skipped_with_the_reason():
    report = check_component(NeedsAService, "logger", skip=OF_PACKAGE, address="nowhere")
    reasons = [result.remark for result in report.results if result.status == "skipped"]
    assert reasons[0] == "it cannot be made with these settings: nothing listens at nowhere"
    assert set(reasons[1:]) == {"for the same reason"} and len(reasons) == 8


def test_nothing_of_a_sandbox_is_left():
    """The checks close what they open, also of a sandbox that fails them."""
    before = keepers()
    assert failed("sandboxes", WithoutWords)[0] == ["protocol"]
    assert isinstance(SubprocessSandboxes().open().close(), type(None)) and Result(0, "", "").text == ""
    deadline = time.monotonic() + 60
    while keepers() - before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def keepers():
    """The keepers of sandboxes, below this process."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found |= {child} if "keeper.py" in " ".join(child.cmdline()) else set()
    return found

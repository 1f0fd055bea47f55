"""`--optimizer`: the core's own by name, and one of a file, whose state is part of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rollouts.cli import main
from rollouts.config.resolving import resolve
from rollouts.errors import ConfigError, SignatureError
from rollouts.runs.plan import make_plan
from rollouts.training.backends.optimizer import TrainerSettings, make_optimizer

OPTIMIZERS = '''\
import torch


class Sign(torch.optim.Optimizer):
    """State of every sort: a tensor, a number of a parameter, a number that a group changes."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["scale"] = group.get("scale", 1.0) * 0.9
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(parameter)
                    state["count"] = torch.zeros((), dtype=torch.int64)
                state["count"] += 1
                state["mean"].lerp_(parameter.grad, 1 - group["beta"])
                size = group["lr"] * group["scale"] / state["steps"] / int(state["count"])
                parameter.sub_(state["mean"].sign(), alpha=size)


def sign(params, lr, *, beta: float = 0.5):
    """Steps by the sign."""
    return Sign(params, {"lr": lr, "beta": beta})


def split(params, lr):
    """Two groups in place of one, the second at a tenth of the rate."""
    (group,) = params
    half = len(group["params"]) // 2
    first, second = group["params"][:half], group["params"][half:]
    return torch.optim.SGD([{"params": first, "lr": lr}, {"params": second, "lr": lr / 10}])


def raising(params, lr):
    raise ValueError("no lion")


def nothing(params, lr):
    return None


def part(params, lr):
    return torch.optim.SGD(params[0]["params"][:1], lr=lr)


def closure(params, lr):
    return torch.optim.LBFGS(params[0]["params"], lr=lr)


def positional(params, lr=1e-3): ...


def late(params, lr):
    """Fails in a run only."""
    made = torch.optim.SGD(params, lr=lr)
    inner = made.step

    def step(closure=None):
        if params[0]["params"][0].numel() > 100:
            raise RuntimeError("the lion sleeps")
        return inner()

    made.step = step
    return made


class Backend:
    pass


def own(model): return Backend()
'''

SMALL = ["--env", "calculator", "--prompts-per-step", "2", "--eval-tasks", "0"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OPTIMIZERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(folder: str, *flags: str, command: str = "sft") -> list[dict[str, float]]:
    """The metrics of the steps of a run, without times."""
    given = ["resume", folder] if command == "resume" else [command, *SMALL, "--out", folder]
    assert main([*given, *flags]) == 0
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if "loss" in line or "optim/lr" in line]
    timed = ("time/", "perf/", "sync/", "rollout/latency", "memory/")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in steps]


def plan(**settings):
    return make_plan(resolve({"env": "calculator"} | settings))


@pytest.mark.parametrize(
    ("named", "older"),
    [
        ("adamw", {}),
        ({"betas": [0.5, 0.6], "eps": 1e-3}, {"betas": [0.5, 0.6], "eps": 1e-3}),
        ({"name": "sgd", "momentum": 0.5}, {"optimizer": "sgd", "betas": [0.5, 0.9]}),
        ({"name": "adafactor", "weight_decay": 0.1}, {"optimizer": "adafactor", "weight_decay": 0.1}),
    ],
    ids=["adamw", "betas", "sgd", "adafactor"],
)
def test_the_core_s_own_step_alike_by_either_setting(named, older):
    chosen, of_backend = plan(optimizer=named), plan(training={"name": "torch", **older})
    assert of_backend.make_optimizer is None
    stepped = []
    for each in (chosen, of_backend):
        torch.manual_seed(0)
        network = torch.nn.Linear(3, 4)
        settings = each.one("training").settings
        known = {name: settings[name] for name in ("optimizer", "betas", "eps", "weight_decay")}
        made = make_optimizer(
            [(list(network.parameters()), 0.1)], TrainerSettings(lr=0.1, **known), each.make_optimizer
        )
        for _ in range(3):
            network(torch.ones(2, 3)).square().sum().backward()
            made.step()
        stepped.append(network.weight)
    assert torch.equal(*stepped)


def test_a_run_with_the_usual_one_by_name_is_bit_equal():
    one = trained("named", "--optimizer.weight-decay", "0.1", "--steps", "2")
    other = trained("older", "--training.weight-decay", "0.1", "--steps", "2")
    assert len(one) == 2 and one == other


def test_an_optimizer_of_a_file_resumes_with_its_whole_state():
    flags = ["--optimizer", "./mine.py:sign", "--optimizer.beta", "0.8", "--lr", "1e-3", "--training.warmup-steps", "0"]
    whole = trained("whole", *flags, "--steps", "4")
    trained("parts", *flags, "--steps", "2")
    state = json.loads(Path("parts/checkpoints/step_000002/state.json").read_text())["backend"]["optimizer"]
    assert state["class"] == "Sign" and state["groups"] == [{"scale": pytest.approx(0.81)}]
    assert {each["steps"] for each in state["values"].values()} == {2}
    assert trained("parts", "--steps", "4", command="resume") == whole
    assert len(whole) == 4
    config = Path("parts/config.toml").read_text()
    assert '[optimizer]\nname = "./mine.py:sign"\nbeta = 0.8' in config


def test_the_rate_of_each_group_is_kept():
    import torch

    from rollouts.training.backends.optimizer import TrainerSettings, make_optimizer

    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    made = make_optimizer(
        [(parameters, 0.5)], TrainerSettings(lr=0.5), plan(optimizer="./mine.py:split").make_optimizer
    )
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.05]
    assert trained("split", "--optimizer", "./mine.py:split", "--steps", "1")


def test_another_optimizer_s_checkpoint_is_refused(capsys):
    trained("run", "--optimizer", "./mine.py:sign", "--steps", "1")
    text = Path("run/config.toml").read_text()
    Path("run/config.toml").write_text(text.replace('name = "./mine.py:sign"\nbeta = 0.5', 'name = "sgd"'))
    assert main(["resume", "run", "--steps", "2"]) == 2
    assert "has the state of the optimizer Sign, and this run uses SGD" in capsys.readouterr().err


def test_a_step_that_fails_in_a_run_names_the_line(capsys):
    assert (
        main(["sft", "--env", "calculator", "--optimizer", "./mine.py:late", "--steps", "1", "--eval-tasks", "0"]) == 1
    )
    said = capsys.readouterr().err
    assert "the step of the optimizer failed: RuntimeError: the lion sleeps" in said and "mine.py, line" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"optimizer": "./mine.py:raising"}, ConfigError, ["cannot be made", "no lion", "mine.py, line"]),
        ({"optimizer": "./mine.py:nothing"}, ConfigError, ["returned NoneType"]),
        ({"optimizer": "./mine.py:part"}, ConfigError, ["leaves out some of the parameters"]),
        ({"optimizer": "./mine.py:closure"}, ConfigError, ["a step failed", "closure"]),
        ({"optimizer": {"name": "adamw", "eps": 0.0}}, ConfigError, ["NaN", "--optimizer.eps 1e-8"]),
        ({"optimizer": "./mine.py:positional"}, SignatureError, ["'lr' is positional and has a default"]),
        ({"optimizer": {"name": "sgd", "betas": [0.9, 0.9]}}, ConfigError, ["no setting 'betas'", "momentum"]),
        ({"optimizer": "sgd", "training": {"name": "torch", "weight_decay": 0.1}},
         ConfigError, ["--training.weight-decay 0.1", "type --optimizer.weight-decay"]),
        ({"optimizer": "sgd", "training": {"name": "torch", "optimizer": "sgd"}}, ConfigError, ["leave one out"]),
        ({"optimizer": "adafactor", "training": "fsdp"}, ConfigError, ["--optimizer adafactor", "--training torch"]),
        ({"optimizer": "sgd", "training": "./mine.py:own"}, ConfigError, ["chooses its optimizer itself"]),
    ],
)  # fmt: skip
def test_bad_optimizers_are_refused_before_a_model_loads(given, error, words):
    with pytest.raises(error) as caught:
        plan(**given)
    for word in words:
        assert word in str(caught.value)

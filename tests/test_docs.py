"""The documentation holds: examples run, settings resolve, commands parse, tables are those of the code."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import re
import runpy
import shlex
import shutil
import sys
import textwrap
import tomllib
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rollouts.chat import preflight
from rollouts.cli import main
from rollouts.config.resolving import resolve
from rollouts.config.settings import SFT
from rollouts.plugins import KINDS, VOCABULARY, hookspecs
from rollouts.plugins.index import installed_components
from rollouts.plugins.signature import check_signature
from rollouts.runs.plan import make_plan
from rollouts.training.algorithms import Algorithm, recipes
from rollouts.training.algorithms.aggregation import AGGREGATIONS, Masks, aggregate
from rollouts.training.algorithms.algorithm import (
    algorithm_settings,
    as_algorithm,
    bind,
    bind_algorithm,
    function_label,
    is_reward_placed,
)
from rollouts.training.algorithms.calls import (
    batch_advantages,
    group_advantages,
    mixed_rewards,
    paired,
    selected,
    shaped_rewards,
)
from rollouts.training.algorithms.checks import GROUP_ADVANTAGE_AVAILABLE, available_names
from rollouts.training.algorithms.kl import KL_SETTINGS
from rollouts.training.algorithms.losses import cispo, dpo, reinforce
from rollouts.training.algorithms.objective import evaluate_objective
from rollouts.training.algorithms.token_advantages import gae

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


class Block(NamedTuple):
    """A fenced block: where it begins, its language, the HTML comment on the line before it, and its content."""

    page: Path
    line: int
    language: str
    marker: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    start, language, marker, lines = 0, "", "", [""]
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.startswith("```"):
            lines.append(line)
        elif start:
            found.append(Block(page, start, language, marker, "\n".join(lines) + "\n"))
            start, lines = 0, [""]
        else:
            comment = re.fullmatch(r"<!-- (.*) -->", lines[-1])
            start, language, marker, lines = number, line[3:], comment[1] if comment else "", []
    assert not start, f"{page.name}: the block that begins on line {start} does not end"
    return found


def section_of(page: str, title: str) -> str:
    """The text below a heading, up to the next one."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    match = re.search(rf"^#+ {re.escape(title)}$\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, f"docs/{page} has no heading {title!r}"
    return match[1]


def rows_of(section: str) -> dict[str, str]:
    """The first table of a section: the name in its first column, and its second column."""
    rows = re.findall(r"^\| `([^`|]+)` \| (.*?) \|", section, re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a name stands twice"
    return dict(rows)


def commands_of(block: Block) -> list[str]:
    """The `rollouts ...` lines of a shell block, continued lines joined, comments and prompts removed."""
    lines = block.text.replace("\\\n", " ").splitlines()
    stripped = (line.strip().removeprefix("$ ") for line in lines)
    return [part.strip() for line in stripped for part in line.split("&&") if part.strip().startswith("rollouts ")]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python" and block.marker != "no-run"]
TOML = [block for block in BLOCKS if block.language == "toml"]
COMMANDS = [
    pytest.param(command, id=f"{block}-{number}")
    for block in BLOCKS
    if block.language in ("bash", "console", "sh")
    for number, command in enumerate(commands_of(block))
]


def test_a_fence_names_only_its_language():
    """The site does not accept a second word there: it would show the fence as text. Markers are comments above it."""
    assert [str(block) for block in BLOCKS if not re.fullmatch(r"[\w+-]*", block.language)] == []
    assert {block.marker for block in BLOCKS} == {"", "no-run", "settings"}


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("rollouts_docs_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    code = compile("\n" * block.line + block.text, str(block.page), "exec")
    exec(code, module.__dict__)


@pytest.mark.parametrize("block", TOML, ids=str)
def test_toml_parses(block):
    tree = tomllib.loads(block.text)
    if block.marker == "settings":
        resolve(tree)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command, tmp_path, monkeypatch, capsys):
    """`run`, `sft` and `eval` are read to the end, and what they would run is not; other commands must exist."""
    seen = []
    composed = types.ModuleType("rollouts.runs")
    composed.run = lambda resolved, observer: seen.append(resolved)  # type: ignore[attr-defined]
    composed.__path__ = [str(ROOT / "rollouts" / "runs")]  # its modules are those that there are
    monkeypatch.setattr("rollouts.cli.several._run", seen.append)
    described = types.ModuleType("rollouts.runs.dry_run")
    described.dry_run = seen.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rollouts.runs.dry_run", described)
    monkeypatch.setitem(sys.modules, "rollouts.runs", composed)
    monkeypatch.chdir(tmp_path)
    argv = shlex.split(command.partition(" #")[0].partition(" > ")[0])[1:]
    if argv[0] in ("run", "sft", "eval"):
        files = [argument for argument in argv[1:] if argument.endswith(".toml")]
        files += [f"{run}/config.toml" for flag, run in itertools.pairwise(argv) if flag == "--from"]
        evaluated = re.match(r"runs/\w+", argv[1]) if argv[0] == "eval" else None  # a run's folder, or a part of it
        if evaluated:
            Path(argv[1]).mkdir(parents=True, exist_ok=True)
            files.append(f"{evaluated[0]}/config.toml")
        for file in dict.fromkeys(files):
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "configs" / "calculator_tiny.toml", file)
        is_help = "--help" in argv
        assert main(argv) == 0, capsys.readouterr().err
        assert is_help or len(seen) == 1
    else:
        assert main([*argv, "--help"]) == 0, capsys.readouterr().err


def test_a_wrong_command_would_be_seen(tmp_path, monkeypatch, capsys):
    for command in ("rollouts run --no-such-flag 3", "rollouts plugins lost", "rollouts run --steps many"):
        with pytest.raises(AssertionError, match="error: "):
            test_commands_parse(command, tmp_path, monkeypatch, capsys)


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        found = page.parent / file if file else page
        assert found.exists(), target
        assert not anchor or anchor in anchors_of(found), f"{target}: {found.name} has no such heading"


def test_every_page_is_in_the_index():
    """A reader of the README finds the index, and there every page."""
    assert "docs/index.md" in (ROOT / "README.md").read_text(encoding="utf-8")
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = [page.name for page in PAGES if page.parent.name == "docs" and page.name != "index.md"]
    assert [name for name in pages if f"]({name})" not in text] == []


def test_the_learning_curve_is_small_and_readable_in_dark_mode(tmp_path):
    """Text is text, nothing is filled with white or black, and the script draws such a picture from runs' folders."""
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [f'{{"step": {step}, "reward/mean": {step / 9}}}' for step in range(10)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "summary.json").write_text('{"evaluation": {"before": {"reward_mean": 0}, "after": {"reward_mean": 1}}}')
    drawn = tmp_path / "curve.svg"
    main = runpy.run_path(str(ROOT / "scripts" / "learning_curve.py"))["main"]
    main(["--runs", str(folder), str(folder), "--out", str(drawn)])
    for picture in (drawn, ROOT / "docs" / "learning-curve.svg"):
        text = picture.read_text(encoding="utf-8")
        assert len(text) < 40_000 and "optimizer step</text>" in text and "held-out" in text
        assert set(re.findall(r"#[0-9a-f]{6}\b", text)) == {"#7d8590", "#3b82f6", "#f97316"}


def test_the_rewards_of_a_run_are_drawn(tmp_path):
    """The script draws such a picture as docs/reward-parts.svg from a run's folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [
        f'{{"step": {n}, "reward/mean": 1.1, "reward_part/correct": 1.0, "reward_part/short": 0.5}}' for n in range(9)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    weights = '{"evaluation": {"after": {"weights": {"correct": 1.0, "short": 0.2}}}}'
    (folder / "summary.json").write_text(weights)
    drawn = tmp_path / "parts.svg"
    main = runpy.run_path(str(ROOT / "scripts" / "learning_curve.py"))["main"]
    main(["--parts", str(folder), "--out", str(drawn)])
    assert "0.2 × short</text>" in drawn.read_text(encoding="utf-8")
    for picture in (drawn, ROOT / "docs" / "reward-parts.svg"):
        text = picture.read_text(encoding="utf-8")
        assert len(text) < 40_000 and "optimizer step</text>" in text and "sum</text>" in text
        assert "#ffffff" not in text and "#000000" not in text


def test_pages_say_no_machine_s_paths():
    for page in PAGES:
        found = re.findall(r"(?:/work/|/root/|/home/|/tmp/)\S*", page.read_text(encoding="utf-8"))
        assert found == [], f"{page.name}: {found}"


@pytest.mark.parametrize("kind", VOCABULARY)
def test_the_vocabulary_is_the_code_s(kind):
    assert rows_of(section_of("plugins.md", kind)) == VOCABULARY[kind]


NEEDS = {
    "a reference": {"reference": True},
    "a critic": {"critic": True},
    "a teacher": {"teacher": True},
    "pairs": {"pairs": True},
}


@pytest.mark.parametrize("kind", ["losses", "advantages"])
def test_what_a_run_must_have_is_marked(kind):
    marks = dict(re.findall(r"^\| `([^`|]+)` \| .*? \| ?([^|]*?) ?\|$", section_of("plugins.md", kind), re.MULTILINE))
    assert set(marks) == set(VOCABULARY[kind])
    always = available_names(reference=False)
    of = {word: available_names(**{"reference": False, **have}) - always for word, have in NEEDS.items()}
    for name, mark in marks.items():
        if mark == "later":
            assert kind == "advantages" and name not in GROUP_ADVANTAGE_AVAILABLE
        else:
            assert mark == next((word for word, names in of.items() if name in names), "")
    assert "critic" in str(marks.values())


def test_every_kind_is_documented():
    assert list(rows_of(section_of("plugins.md", "Kinds"))) == list(KINDS)


def test_every_hook_is_documented_with_its_signature():
    hooks = [name for name in vars(hookspecs) if name.startswith("rollouts_")]
    section = section_of("plugins.md", "Hooks")
    for name in hooks:
        signature = str(inspect.signature(getattr(hookspecs, name))).replace("'", "")
        assert f"def {name}{signature}: ..." in section
        assert f"- `{name}`: " in section


def every_row_of(page: str, title: str) -> dict[str, str]:
    """As `rows_of`, also where a section has several tables."""
    return dict(re.findall(r"^\| `([^`|]+)` \| (.*?) \|", section_of(page, title), re.MULTILINE))


def test_every_word_of_a_loss_has_its_shape_and_needs():
    rows = re.findall(
        r"^\| `(\w+)` \| (\S.*?) \| .*? \| ?([^|]*?) ?\|$",
        section_of("losses.md", "What a loss may name"),
        re.MULTILINE,
    )
    assert [name for name, _, _ in rows] == list(VOCABULARY["losses"])
    always = available_names(reference=False)
    for name, shape, need in rows:
        words = VOCABULARY["losses"][name]
        assert shape == "int" or words.startswith(shape.removesuffix(" int64")), name
        assert bool(need) == (name not in always), name


# The page of each kind, and the title under which the words that it may name stand.
PLACES = {
    "advantages": ("advantages.md", ("For one group", "For the whole batch")),
    "aggregations": ("aggregations.md", ("Your own",)),
    "kl": ("kl-and-references.md", ("Your own estimator",)),
    "references": ("kl-and-references.md", ("References",)),
    "corrections": ("corrections.md", ("Your own",)),
    "mixers": ("shaping.md", ("Mixing",)),
    "shapings": ("shaping.md", ("Shaping",)),
    "selectors": ("selection.md", ("Selectors",)),
    "pairings": ("selection.md", ("Pairs",)),
}


@pytest.mark.parametrize("kind", PLACES)
def test_every_word_of_a_kind_is_on_its_page(kind):
    page, titles = PLACES[kind]
    found = {name for title in titles for name in every_row_of(page, title)}
    assert set(VOCABULARY[kind]) <= found
    assert found <= set(VOCABULARY[kind]) | {ref.name for ref in installed_components(kind)}


def core_names(kind: str) -> set[str]:
    return {ref.name for ref in installed_components(kind) if ref.distribution == "rollouts-rl"}


@pytest.mark.parametrize("kind", [*PLACES, "losses", "filters"])
def test_every_component_is_on_its_page(kind):
    page = PLACES[kind][0] if kind in PLACES else f"{kind}.md"
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert core_names(kind)
    assert [name for name in sorted(core_names(kind)) if not re.search(rf"^\| `{name}` \|", text, re.MULTILINE)] == []


FORMULAS = {
    "advantages": "advantage",
    "aggregations": "aggregation",
    "corrections": "correction",
    "kl": "KL",
    "mixers": "mixer",
    "pairings": "pairs",
    "references": "reference",
    "selectors": "selector",
    "shapings": "shaping",
}


def test_every_component_has_a_formula():
    text = (ROOT / "docs" / "formulas.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| `?(\w+)`? \| (.+?) \| ?([^|]*?) ?\|$", text, re.MULTILINE)
    named = {word: {name for kind, name, _, _ in rows if kind == word} for word, _, _, _ in rows}
    for kind, word in FORMULAS.items():
        assert named[word] - {"steered"} == core_names(kind)
    algorithms = [each for each in vars(recipes).values() if isinstance(each, Algorithm)]
    functions = {function_label(term.function) for algorithm in algorithms for term in algorithm.terms}
    assert named["loss"] == functions | {"distill_topk"}


def test_the_table_of_algorithms_is_the_code_s():
    rows = re.findall(
        r"^\| `(\w+)` \| (.*?) \| (.*?) \| `(\w+)` \| (.*?) \|$", section_of("losses.md", "An algorithm"), re.MULTILINE
    )
    named = {ref.name: ref.value for ref in installed_components("losses") if ref.distribution == "rollouts-rl"}
    assert {name for name, *_ in rows} == set(named)
    for name, terms, advantage, aggregation, rest in rows:
        if not named[name].startswith(recipes.__name__):
            continue
        algorithm: Algorithm = getattr(recipes, named[name].partition(":")[2])
        own = [term for term in algorithm.terms if function_label(term.function) != "entropy_bonus"]
        written = [word for word in re.findall(r"`(\w+)`", terms) if not word.endswith("_coef") and word != "clip_high"]
        assert written == [function_label(term.function) for term in own]
        defaults = {setting.name: setting.default for setting in algorithm_settings(algorithm)}
        for setting, value in re.findall(r"`(\w+_coef|clip_high)` ([0-9.]+)", terms):
            assert defaults[setting] == float(value)
        assert aggregation == function_label(algorithm.aggregation)
        assert advantage in ("none", f"`{function_label(algorithm.advantage)}`")
        parts = [*algorithm.shaping, *algorithm.filters, algorithm.select, algorithm.pairs]
        brought = {function_label(part) for part in parts if part is not None}
        assert set(re.findall(r"`(\w+)`", rest)) - {"rollouts"} == brought
        has_entropy = any(term.name == "entropy" and term.coefficient == 0 for term in algorithm.terms)
        assert has_entropy == (name not in ("sft", "dpo")) and algorithm.kl is None


def test_every_aggregation_is_documented():
    assert (
        set(rows_of(section_of("aggregations.md", "The core's own"))) == set(AGGREGATIONS) == core_names("aggregations")
    )


def test_the_settings_of_a_kl_term_are_the_code_s():
    section = section_of("kl-and-references.md", "Settings of every KL term")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE)
    assert rows == [(s.name, "none" if s.default is None else str(s.default)) for s in KL_SETTINGS]


ALGORITHM_PAGES = (
    "losses.md",
    "advantages.md",
    "aggregations.md",
    "kl-and-references.md",
    "corrections.md",
    "shaping.md",
    "selection.md",
    "critics-and-teachers.md",
    "schedules.md",
    "filters.md",
)


def files_of(page: str) -> dict[str, str]:
    """The files that a page gives whole: a line with the name, and the block below it."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    found = {}
    for block in blocks_of(ROOT / "docs" / page):
        above = [line for line in lines[: block.line - 1] if line.strip() and not line.startswith("<!--")]
        match = re.fullmatch(r"`([\w.]+)`:", above[-1])
        if match:
            found[match[1]] = block.text
    return found


COMPOSED = [
    pytest.param(page, command, id=f"{page}-{number}")
    for page in ALGORITHM_PAGES
    for block in blocks_of(ROOT / "docs" / page)
    if block.language == "bash"
    for number, command in enumerate(commands_of(block), start=block.line)
    if command.startswith("rollouts run") and not re.search(r" acme_", command)  # these run in tests/packages
]


@pytest.mark.parametrize(("page", "command"), COMPOSED)
def test_commands_compose(page, command, tmp_path, monkeypatch, capsys):
    """Not only read: found, told its settings, checked. No model loads. A component of a file on the page is called."""
    monkeypatch.chdir(tmp_path)
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text)
    if not any(name in command for name in files_of(page)):
        monkeypatch.setattr("rollouts.runs.dry_run.dry_run", lambda resolved, *more: str(make_plan(resolved)))
    argv = [word for word in shlex.split(command)[1:] if word != "--dry-run"]
    assert main([*argv, "--dry-run"]) == 0, capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == sorted(files_of(page))


def test_a_command_that_does_not_compose_would_be_seen(tmp_path, monkeypatch, capsys):
    with pytest.raises(AssertionError, match="critic"):
        test_commands_compose("losses.md", "rollouts run --env calculator --loss ppo", tmp_path, monkeypatch, capsys)


def example(page: str, file: str, name: str, kind: str):
    """A component as a page gives it, its signature checked."""
    namespace: dict[str, object] = {"__name__": file.removesuffix(".py")}
    exec(compile(files_of(page)[file], f"docs/{page}:{file}", "exec"), namespace)
    component = namespace[name]
    if not isinstance(component, Algorithm):
        check_signature(component, kind, name)
    return component


def test_the_documented_loss_is_the_packaged_one():
    folder = ROOT / "tests" / "packages" / "sources" / "acme_cispo"
    assert files_of("losses.md")["acme_cispo.py"] == (folder / "acme_cispo.py").read_text()
    assert files_of("losses.md")["pyproject.toml"] == (folder / "pyproject.toml").read_text()


@pytest.mark.parametrize("settings", [{}, {"clip_low": 0.2, "clip_high": 0.3}, {"clip_high": 1.5}], ids=str)
def test_the_documented_loss_gives_the_core_s_numbers(settings):
    torch.manual_seed(0)
    old = -torch.rand(64).mul(4)
    given = {"old_logprobs": old, "advantages": torch.randn(64), "mask": torch.ones(64)}
    results = []
    for function in (example("losses.md", "acme_cispo.py", "acme_cispo", "losses"), cispo):
        logprobs = (old + torch.randn(64, generator=torch.Generator().manual_seed(1))).requires_grad_()
        algorithm = bind_algorithm(as_algorithm(function), settings)
        found = evaluate_objective(algorithm, {**given, "logprobs": logprobs}, given["mask"])
        found.values.sum().backward()
        results.append((found, logprobs.grad))
    (own, own_gradient), (core, core_gradient) = results
    torch.testing.assert_close(own.values, core.values, rtol=0, atol=0)
    torch.testing.assert_close(own_gradient, core_gradient, rtol=0, atol=0)
    assert own.metrics["weight_max"].kind == "max" and 0 < float(own.metrics["capped_frac"].value) < 64
    bound = settings.get("clip_high", 4.0)
    assert float(own.metrics["weight_max"].value) == pytest.approx(1 + bound)


def test_one_value_a_rollout():
    sequence_loss = example("losses.md", "sequence_loss.py", "sequence_loss", "losses")
    logprobs = torch.tensor([-1.0, -2.0, math.nan, -3.0], requires_grad=True)
    mask, rollouts = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 4, 4, 4])
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0])
    values = sequence_loss(logprobs, advantages, mask, rollouts)
    torch.testing.assert_close(values, torch.tensor([1.0, -5.0]))
    masks = Masks([[1.0], [1.0, 0.0, 1.0]], [0, 4], [0, 0])
    assert aggregate("per_rollout", masks).denominator == len(values)


def test_the_composed_algorithm():
    cautious = example("losses.md", "my_algorithm.py", "CAUTIOUS", "losses")
    bound = bind_algorithm(cautious, {"entropy_coef": 0.0, "clip_high": 0.28})
    assert [term.coefficient for term in bound.terms] == [1.0, 0.0]
    assert cautious.kl is not None and not is_reward_placed(cautious.kl.function)


def test_the_advantages():
    best_of = example("advantages.md", "best_of.py", "best_of", "advantages")
    assert group_advantages(best_of, [1.0, None, 1.0, 0.0], lengths=[9, 1, 5, 2]) == [-1.0, 0.0, 1.0, -1.0]
    assert group_advantages(bind(best_of, {"margin": 1.0}), [1.0, 0.0], lengths=[3, 2]) == [-1.0, 1.0]
    batch_mean = example("advantages.md", "batch_mean.py", "batch_mean", "advantages")
    available = {
        "rewards": torch.tensor([1.0, math.nan, 0.0], dtype=torch.float64),
        "mask": torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]),
        "rollout_index": torch.tensor([0, 0, 0, 1, 2]),
    }
    advantages, returns = batch_advantages(bind(batch_mean, {"scale": 2.0}), available, 5)
    assert advantages.tolist() == [0.0, 1.0, 1.0, 0.0, -1.0] and returns is None


def test_the_aggregation():
    sqrt_length = example("aggregations.md", "sqrt_length.py", "sqrt_length", "aggregations")
    batch = Masks([[0.0, 1.0, 1.0], [1.0, 1.0], [1.0], [0.0]], [0, 0, 1, 2], [0, 0, 0, 0])
    for power, name in ((0.0, "token_mean"), (1.0, "rollout_mean")):
        assert aggregate(bind(sqrt_length, {"power": power}), batch) == aggregate(name, batch)
    found = aggregate(sqrt_length, batch)
    assert found.weights == [[0.0, 0.5, 0.5], [0.5, 0.5], [1.0], [0.0]] and found.denominator == 3.0


def test_the_kl_estimators():
    excess = example("kl-and-references.md", "my_kl.py", "excess", "kl")
    surprise = example("kl-and-references.md", "my_kl.py", "surprise", "kl")
    assert not is_reward_placed(excess) and is_reward_placed(surprise)
    logprobs = torch.tensor([-1.0, -1.0, -3.0], requires_grad=True)
    reference = torch.tensor([-1.0, -1.4, -1.0])
    excess(logprobs, reference).sum().backward()
    assert logprobs.grad.tolist() == [0.0, 0.0, -1.5]  # towards the reference, and only beyond what is free
    assert surprise(logprobs.detach(), reference).tolist() == pytest.approx([0.0, 0.4, 0.0])


def test_the_reference_rule():
    halfway = example("kl-and-references.md", "my_reference.py", "halfway", "references")
    reference, policy = [torch.zeros(2)], [torch.ones(2, dtype=torch.bfloat16)]
    for version, expected in ((0, 0.0), (49, 0.0), (50, 0.5), (51, 0.5), (100, 0.75)):
        halfway(reference, policy, version)
        assert reference[0].tolist() == [expected] * 2 and policy[0].tolist() == [1.0] * 2


def test_the_correction():
    close_only = example("corrections.md", "my_correction.py", "close_only", "corrections")
    assert close_only(torch.tensor([-1.0, -3.0]), torch.tensor([-1.5, -1.0])).tolist() == [1.0, 0.0]


def test_the_mixer_and_the_shaping():
    gated = example("shaping.md", "gated.py", "gated", "mixers")
    parts = [{"right": 1.0, "short": 2.0}, None, {"right": 0.0, "short": 2.0}]
    assert mixed_rewards(gated, parts, {"right": 1.0, "short": -0.1}) == pytest.approx([0.8, None, 0.0])
    patience = example("shaping.md", "patience.py", "patience", "shapings")
    given = {"lengths": [1, 2, 3], "truncated": [False, False, True], "max_tokens": 3}
    assert shaped_rewards(patience, [1.0, None, 1.0], **given, step=99) == [1.0, None, 1.0]
    assert shaped_rewards(patience, [1.0, None, 1.0], **given, step=100) == [1.0, None, 0.5]


def test_the_selector_and_the_pairs():
    short_and_good = example("selection.md", "short_and_good.py", "short_and_good", "selectors")
    eligible = [True, True, True, False, True]
    kept = selected(short_and_good, [1.0, 1.0, 0.0, 1.0, 1.0], eligible, lengths=[9, 5, 1, 1, 7])
    assert kept == [False, True, False, False, True]
    assert selected(short_and_good, [0.0, 0.5], [True, True], lengths=[1, 1]) == [False, False]
    neighbors = example("selection.md", "neighbors.py", "neighbors", "pairings")
    assert paired(neighbors, [0.0, 1.0, 0.5, 1.0], [True, True, True, False], lengths=[1] * 4) == [(1, 2), (2, 0)]
    assert paired(neighbors, [1.0, 1.0], [True, True], lengths=[1, 1]) == []


def test_the_loss_of_pairs():
    hinge = example("selection.md", "hinge.py", "hinge", "losses")
    assert as_algorithm(hinge).aggregation == "pair_mean"
    logprobs = torch.tensor([-1.0, -1.0, -2.0, -2.0], requires_grad=True)
    reference = torch.tensor([-1.0, -2.0, -2.0, -1.5])
    signs, pairs = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.tensor([3, 7, 3, 7])
    values = hinge(logprobs, reference, signs, pairs)
    assert values.tolist() == [1.0, 0.0]  # as far apart as the reference: the whole margin; 1.5 apart: enough
    assert values.shape == dpo(logprobs, reference, signs, pairs).shape
    values.sum().backward()
    assert logprobs.grad.tolist() == [-1.0, 0.0, 1.0, 0.0]


def test_the_critic_s_loss():
    actor_critic = example("critics-and-teachers.md", "my_critic_loss.py", "ACTOR_CRITIC", "losses")
    assert {"knee", "value_coef"} == {setting.name for setting in algorithm_settings(actor_critic)}
    assert actor_critic.advantage is gae and actor_critic.terms[0].function is reinforce
    values = torch.tensor([0.0, 0.0, 0.0], requires_grad=True)
    actor_critic.terms[1].function(values, torch.tensor([0.0, 0.2, 9.0])).sum().backward()
    assert values.grad.tolist() == pytest.approx([0.0, -0.2, -0.5])


def test_the_teacher_s_loss():
    reverse_topk = example("critics-and-teachers.md", "reverse_topk.py", "reverse_topk", "losses")
    student = torch.tensor([[-1.0, -2.0], [-3.0, -1.0]], requires_grad=True)
    teacher = torch.tensor([[-1.5, -2.5], [-1.0, -3.0]])
    values = reverse_topk(student, teacher)
    assert values[0].item() == pytest.approx(0.0, abs=1e-6) and values[1].item() > 1.0
    values.sum().backward()
    assert student.grad[1, 0] < 0 < student.grad[1, 1]  # what the teacher finds likelier becomes likelier


def test_the_documented_environment_is_the_tested_one():
    """The one that tests/packages runs for real; it has at most 25 lines."""
    source = (ROOT / "tests" / "packages" / "sources" / "my_env.py").read_text()
    assert source in [block.text for block in blocks_of(ROOT / "docs" / "environments.md")]
    assert sum(bool(line.strip()) for line in source.splitlines()) <= 25


@pytest.mark.slow
def test_the_documented_demonstrations_are_judged(tmp_path, monkeypatch, capsys):
    """The command below them composes, and the demonstrations earn 1, replayed with the real tools."""
    blocks = blocks_of(ROOT / "docs" / "environments.md")
    (cafe,) = (block.text for block in blocks if "class Cafe" in block.text)
    (method,) = (block.text for block in blocks if block.text.startswith("from rollouts import Message\nfrom"))
    imported, body = method.split("\n\n\n")
    (tmp_path / "cafe.py").write_text(f"{imported}\n{cafe}\n{textwrap.indent(body, ' ' * 4)}")
    (command,) = (each for block in blocks for each in commands_of(block) if "./cafe.py:Cafe" in each)
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(command)[1:], "--dry-run"]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main(["check", "./cafe.py:Cafe", "--only", "oracle", "--tasks", "2"]) == 0
    assert re.search(r"oracle +passed +\d+ demonstrations, reward 1\n", said := capsys.readouterr().out), said


def test_the_documented_readers_read_runs_of_both_modes(tmp_path, capsys):
    own: dict[str, Any] = {}
    for block in blocks_of(ROOT / "docs" / "run-folder.md"):
        if (block.language == "python" and "def read_run" in block.text) or "def show_episode" in block.text:
            exec(block.text, own)
    summary = {"status": "done", "steps": 1, "evaluation": {"before": None, "after": None}}
    episode = {"messages": [{"role": "user"}], "reward": 1, "parts": {}, "metrics": {}}
    for folder in (tmp_path / "one", tmp_path / "both" / "rl"):
        (folder / "trajectories").mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
        (folder / "trajectories" / "step_000000.jsonl").write_text(json.dumps(episode) + "\n")
    for name in ("one", "both"):
        assert own["read_run"](tmp_path / name) == [0.5]
        own["show_episode"](str(tmp_path / name))
    assert capsys.readouterr().out.count("user: \nreward 1") == 2


def test_the_words_of_the_preflight_are_the_code_s():
    source = inspect.getsource(preflight.TemplateReport.words)
    phrases = re.findall(r"^\| ((?:The|No|A) .*?) \|", section_of("chat.md", "Preflight"), re.MULTILINE)
    assert len(phrases) == source.count("lines.append(") + source.count("lines += [")
    assert [phrase for phrase in phrases if phrase not in source] == []


def test_core_components_are_documented():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(points["rollouts.losses"]) == set(rows_of(section_of("losses.md", "An algorithm")))
    assert set(points["rollouts.filters"]) == set(rows_of(section_of("filters.md", "The core's own")))
    assert set(points["rollouts.advantages"]) == set(rows_of(section_of("advantages.md", "The core's own")))


def test_every_setting_of_the_supervised_phase_is_documented():
    assert tuple(rows_of(section_of("sft-then-rl.md", "The settings of the supervised phase"))) == SFT

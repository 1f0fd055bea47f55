"""Print every component of the first-party packages as a markdown page: `docs/gallery.md`. A test compares them.

python scripts/gallery.py > docs/gallery.md

It reads the source tree, so the page does not depend on what is installed. The names of a pack, such as `gym/<id>`,
come from its upstream package: `gallery_packs.toml` has their number and examples, and a test of the adapters compares.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rollouts_check.descriptions import description

from rollouts.config.settings import COMPONENT_KINDS
from rollouts.plugins.index import KINDS, ComponentRef

ROOT = Path(__file__).resolve().parent.parent
PACKS = Path(__file__).with_name("gallery_packs.toml")
OWN_COMMANDS = {
    "inference": "rollouts eval --env calculator --inference {name}",
    "datasets": "rollouts sft --data {name}:SOURCE",
    "workers": "rollouts run --env calculator --worker {name}",
    "commands": "rollouts {name}",
}
"""The command of a kind, where it is not `rollouts run --env calculator --KEY NAME`."""

BEFORE = {"rewards": "--reward env:1 ", "pairings": "--loss dpo ", "references": "--kl rk3_loss "}
"""What the commands of a kind need besides the component."""

AFTER = {
    "environments/agent": "--env.command 'python my_agent.py' --data rows.jsonl --reward constant",
    "environments/prompts": "--data rows.jsonl --reward constant",
    "environments/openenv": "--env.url http://127.0.0.1:8000",
    "environments/harbor": "--env.path my-tasks --sandbox podman",
    "environments/nemo_gym": "--env.url http://127.0.0.1:8000 --env.data rows.jsonl",
    "environments/ors": "--env.url http://127.0.0.1:8080",
    "rewards/judge": "--reward.judge.model gpt-5-mini",
    "rewards/reward_model": "--reward.reward_model.model ./my-reward-model",
    "rewards/pattern": "--reward.pattern.regex 'Answer: .*'",
    "tools/mcp": "--tool.mcp.server 'npx -y @modelcontextprotocol/server-everything'",
    "losses/opd": "--teacher tiny",
    "losses/opd_topk": "--teacher tiny",
    "losses/ppo": "--critic head",
    "advantages/distill": "--teacher tiny",
    "advantages/gae": "--loss ppo --critic head",
    "aggregations/pair_mean": "--loss dpo",
    "aggregations/per_rollout": "--loss ./my_loss.py:my_loss",
    "references/adapter_off": "--lora-rank 16",
    "inference/openai": "--inference.url http://127.0.0.1:8000/v1 --model policy",
}
"""What the commands of some components need besides."""


class Package(NamedTuple):
    """A first-party package: its folder, and what its pyproject.toml says."""

    folder: Path
    name: str
    about: str
    entry_points: Mapping[str, Mapping[str, str]]


def packages() -> list[Package]:
    """The core first, then the environments, then the plugins."""
    files = [ROOT / "pyproject.toml"]
    for place in ("environments", "plugins"):
        files += sorted((ROOT / place).glob("*/pyproject.toml"))
    found = []
    for file in files:
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        points = {
            group: points for group, points in project.get("entry-points", {}).items() if group.startswith("rollouts")
        }
        found.append(Package(file.parent, project["name"], project["description"], points))
    return found


def packs() -> list[dict[str, Any]]:
    """The packs: package, prefix, count, examples and what they are."""
    return list(tomllib.loads(PACKS.read_text(encoding="utf-8"))["pack"])


def components(package: Package) -> Iterator[tuple[str, str, str]]:
    """The kind, the name and the description of each component, in the order of the kinds."""
    for kind in KINDS:
        for name, value in sorted(package.entry_points.get(f"rollouts.{kind}", {}).items()):
            yield kind, name, description(ComponentRef(kind, name, value, package.name))


def command(kind: str, name: str) -> str:
    """A command that uses a component."""
    after = f" {AFTER[f'{kind}/{name}']}" if f"{kind}/{name}" in AFTER else ""
    if kind in OWN_COMMANDS:
        return OWN_COMMANDS[kind].format(name=name) + after
    if kind == "environments":
        return f"rollouts run --env {name}{after}"
    key = next(key for key, each in COMPONENT_KINDS.items() if each == kind)
    before = BEFORE.get(kind, "")
    return f"rollouts run --env calculator {before}--{key.replace('_', '-')} {name}{after}"


def pack_command(pack: Mapping[str, Any]) -> str:
    """A command that uses the first example of a pack."""
    return " ".join(["rollouts run --env", pack["examples"][0], *([pack["after"]] if "after" in pack else [])])


def gallery() -> str:
    """The page."""
    found = packages()
    sys.path[:0] = [str(package.folder) for package in found]  # descriptions are read from the sources
    listed = {package.name: list(components(package)) for package in found}
    own = {package.name: [pack for pack in packs() if pack["package"] == package.name] for package in found}
    parts = sum(map(len, listed.values()))
    environments = sum(kind == "environments" for rows in listed.values() for kind, _, _ in rows)
    from_packs = sum(pack.get("count", 0) for pack in packs())
    lines = [
        "# Gallery",
        "Made from the packages of this repository: `python scripts/gallery.py > docs/gallery.md`. A test checks it.",
        f"{len(found)} packages bring {parts} components by a fixed name, {environments} of them environments, and "
        f"more than {from_packs:,} environments whose names come from upstream packages. `rollouts plugins list --all` "
        "shows what is installed, each with one line, and `rollouts plugins show NAME` what one takes.",
    ]
    for package in found:
        if listed[package.name] or own[package.name]:
            lines += [f"## {package.name}", package.about, *install(package), *section(listed, own, package)]
    return "\n\n".join(lines) + "\n"


def install(package: Package) -> list[str]:
    """How the package is installed, in a clone."""
    return [] if package.folder == ROOT else [f"`pip install ./{package.folder.relative_to(ROOT)}`"]


def section(
    listed: Mapping[str, list[tuple[str, str, str]]], own: Mapping[str, list[dict[str, Any]]], package: Package
) -> list[str]:
    """The tables of a package: one for its components, and one for its packs."""
    tables = []
    found = listed[package.name]
    rows = [f"| {kind} | `{name}` | {cell(about)} | `{command(kind, name)}` |" for kind, name, about in found]
    if rows:
        tables.append("\n".join(["| kind | name | what it is | command |", "|---|---|---|---|", *rows]))
    rows = [
        f"| `{pack['prefix']}<{pack['word']}>` | {pack.get('count', 'any')} | {cell(pack['about'])} | "
        f"{', '.join(f'`{each}`' for each in pack['examples'])} | `{pack_command(pack)}` |"
        for pack in own[package.name]
    ]
    if rows:
        head = ["| environments | number | what they are | examples | command |", "|---|---|---|---|---|"]
        tables.append("\n".join([*head, *rows]))
    return tables


def cell(text: str) -> str:
    """A text in a cell of a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(gallery())

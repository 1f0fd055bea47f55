"""`rollouts play NAME`: take the model's place in an environment, in the terminal or through a pipe."""

from __future__ import annotations

import contextlib
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from rollouts.bounds import call_arguments
from rollouts.cli.chat import append_lines, check_new_file, show_message, typed_line
from rollouts.cli.options import SettingsCommand, chosen_infos, given_settings
from rollouts.config.settings import EVAL
from rollouts.errors import ConfigError, UserError, in_lines, leaves_of, suggestion
from rollouts.inference.chatting import ChatReply, ChatRequest
from rollouts.terminal_text import print_table, visible
from rollouts.types import Episode, Message, ToolCall

if TYPE_CHECKING:
    from rollouts.runs.plan import Plan
    from rollouts.runs.play import Game, Reply

HIDDEN = (
    "mode env inference samples_per_prompt max_tokens temperature concurrency episode_seconds turn_seconds retries "
    "max_failures logger out tasks reduce answer_pattern"
).split()
"""The settings of an evaluation that have no flag here, because they belong to an engine or to many episodes."""

HELP = """\
a line                     your reply, a text
/tool NAME KEY=VALUE ...   your reply, a call of a tool; without KEY=, values are the parameters in their order
/call {"name": ..., "arguments": {...}}    a call as JSON
\"\"\"                        begins and ends a reply of several lines; // at its begin is one slash
/tools                     the tools with all parameters
/text                      the exact text that a model sees, from here to the end of the episode
/save FILE                 write the messages to FILE, as a row of demonstrations
/end                       end the episode now, and judge it; Ctrl-D ends it without
/help                      this list"""

_QUOTES = '"""'


def _play(
    name: str, task: int | None, agent: str, episodes: int, show_text: bool, file: str | None, **options: Any
) -> int:
    """Take the model's place in an environment.

    NAME is an environment: a name, dist/name or ./file.py:Name. You see the messages and tools that a model sees, and
    type its replies; at the end, each reward says its value. A line is a text, `/tool NAME KEY=VALUE` calls a tool, and
    /help lists what else you can type. Ctrl-D and Ctrl-C end the episode; the environment is closed.

    \b
    Examples:
      rollouts play calculator
      rollouts play ./my_env.py:MyEnv --env.digits 1 --task 3 --show-text
      rollouts play calculator --agent scripted --json demonstrations.jsonl
      rollouts play calculator --agent random --episodes 10
    """
    from rollouts.runs.play import games_of, play_plan

    if episodes < 1:
        raise ConfigError(f"--episodes {episodes}: expected 1 or more")
    given = given_settings({**options, "env": (name,)})
    if file is not None:
        check_new_file("--json", file)
    with play_plan(given) as plan:
        for note in plan.notes:
            click.echo(f"note: {note}", err=True)
        text = _text_of(plan) if show_text else None
        games = games_of(plan, task, episodes, demonstrated=agent == "scripted")
        played: list[Episode] = []
        for episode in _episodes(plan, games, agent, text):
            if file is not None:
                _write_rows(file, episode)
            played.append(episode)
        if len(games) > 1 and played:
            click.echo()
            _show_table(played)
    return int(any(episode.status.is_infrastructure for episode in played))


def _episodes(
    plan: Plan, games: Sequence[Game], agent: str, text: Callable[[ChatRequest], str] | None
) -> Iterator[Episode]:
    """Play the tasks, one after another, until the input ends. Raises KeyboardInterrupt."""
    from rollouts.runs.play import at_random, play_episode, scripted

    for number, game in enumerate(games):
        if len(games) > 1:
            click.secho(f"--- episode {number + 1} of {len(games)}", bold=True)
        reply = {"scripted": scripted(game.replies), "random": at_random}.get(agent)
        screen = _Screen(plan, text, reply)
        try:
            episode = play_episode(plan, game.task, number, screen, for_person=reply is None)
        except (KeyboardInterrupt, BaseExceptionGroup) as error:
            if not screen.is_left or not all(isinstance(leaf, KeyboardInterrupt) for leaf in leaves_of(error)):
                raise
            click.echo("(left: the environment is closed, and nothing was judged)", err=True)
            return
        screen.show_end(episode)
        yield episode


# --- the screen -------------------------------------------------------------------------------------------------------


class _Screen:
    """Shows what the model would see, and gets the replies: from `agent`, or from a person if it is None. `text` gives
    the exact text of a request; None: it is not shown.
    """

    def __init__(self, plan: Any, text: Callable[[ChatRequest], str] | None, agent: Reply | None) -> None:
        self._plan, self._text, self._agent = plan, text, agent
        self._seen: dict[str, list[Message]] = {}
        self._tools: dict[str, list[Any]] = {}
        self._role, self._shown_text = "", ""
        self.is_left = False

    def __call__(self, request: ChatRequest) -> ChatReply:
        """Show what is new, and return the reply. Raises KeyboardInterrupt at the end of the input."""
        self._show_new(request)
        reply = self._ask(request) if self._agent is None else self._agent(request)
        said = [reply.message] if reply.finish == "stop" else []
        if self._agent is not None or not sys.stdin.isatty():
            for message in said:
                show_message(message)
        self._seen[request.role] = [*request.messages, *said]
        return reply

    def show_end(self, episode: Episode) -> None:
        """The rest of the conversations, what each reward says, and the metrics."""
        for trajectory in episode.trajectories:
            known = self._seen.get(trajectory.role, [])
            if known and trajectory.messages[: len(known)] == known:
                for message in trajectory.messages[len(known) :]:
                    show_message(message)
        for each in episode.by_role:
            for line in result_lines(each):
                click.secho(visible(line), bold=not line.startswith(" "))

    def _show_new(self, request: ChatRequest) -> None:
        if request.role and request.role != self._role:
            click.secho(f"--- you are {request.role}", bold=True)
        self._role = request.role
        if request.tools != self._tools.get(request.role, []):
            for schema in request.tools:
                click.secho(f"tool: {visible(tool_line(schema))}", dim=True)
            self._tools[request.role] = request.tools
        known = self._seen.get(request.role, [])
        is_same = request.messages[: len(known)] == known
        if known and not is_same:
            click.secho("--- another conversation", bold=True)
        for message in request.messages[len(known) if is_same else 0 :]:
            show_message(message)
        if self._text is not None:
            self._show_text(self._text(request))

    def _show_text(self, text: str) -> None:
        """The exact text; only what is new, if it continues the text before."""
        new, self._shown_text = text.removeprefix(self._shown_text), text
        click.secho("\n".join(f"| {visible(line)}" for line in new.splitlines()), dim=True)

    def _ask(self, request: ChatRequest) -> ChatReply:
        """The reply that the person types."""
        while True:
            line = self._read()
            word, _, rest = line.partition(" ")
            try:
                if word == "/end":
                    return ChatReply(Message("assistant"), "context", detail="you ended the episode")
                if word in ("/tool", "/call") or not line.startswith("/") or line.startswith("//"):
                    return ChatReply(typed_reply(line, request), "stop")
                self._command(word, rest.strip(), request)
            except UserError as error:
                click.echo(f"({error})", err=True)

    def _command(self, word: str, rest: str, request: ChatRequest) -> None:
        """Run a command that is no reply. Raises UserError."""
        if word == "/help":
            click.echo(HELP)
        elif word == "/tools":
            for schema in request.tools:
                click.echo(json.dumps(schema["function"], indent=2, ensure_ascii=False))
            if not request.tools:
                click.echo("(there are no tools)")
        elif word == "/text":
            self._text = self._text or _text_of(self._plan)
            self._show_text(self._text(request))
        elif word == "/save":
            if not rest:
                raise ConfigError("/save needs a file\ntype: /save FILE.jsonl")
            _append_row(rest, {"messages": request.messages})
            click.echo(f"({len(request.messages)} messages are saved in {rest})", err=True)
        else:
            near = suggestion(word, ("/tool", "/call", "/tools", "/text", "/save", "/end", "/help"))
            known = f"there is no command {word}; /help lists them, and // begins a reply with a slash"
            raise ConfigError(in_lines(known, near))

    def _read(self) -> str:
        """The next reply or command. Raises KeyboardInterrupt at the end of the input."""
        lines: list[str] = []
        while True:
            line = typed_line("... " if lines else "> ")
            if line is None:
                self.is_left = True
                raise KeyboardInterrupt
            if line == _QUOTES and lines:
                return "\n".join(lines[1:])
            if line == _QUOTES or lines:
                lines.append(line)
            elif line.strip():
                return line.strip()


def typed_reply(line: str, request: ChatRequest) -> Message:
    """The assistant's message that a line means: a text, or a call of a tool. Raises UserError."""
    tools = {schema["function"]["name"]: schema["function"] for schema in request.tools}
    word, _, rest = line.partition(" ")
    if word == "/call":
        name, arguments = _json_call(rest)
        _check_tool(name, tools)
    elif word == "/tool":
        name, arguments = _typed_call(rest, tools)
    else:
        return Message("assistant", line.removeprefix("/") if line.startswith("//") else line)
    return Message("assistant", "", [ToolCall(name, arguments, f"call_{len(request.messages)}")])


def _json_call(text: str) -> tuple[str, dict[str, Any]]:
    """The call of `/call {"name": ..., "arguments": {...}}`. Raises ConfigError."""
    with contextlib.suppress(ValueError):
        call = json.loads(text)
        arguments = call_arguments(call.get("arguments")) if isinstance(call, dict) else ""
        if not isinstance(arguments, str) and isinstance(call.get("name"), str):
            return call["name"], arguments
    raise ConfigError(f'/call {text} is no call\ntype: /call {{"name": "TOOL", "arguments": {{"KEY": 1}}}}')


def _typed_call(text: str, tools: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The call of `/tool NAME KEY=VALUE ...`: a text stays as it is, other values are JSON. Raises ConfigError."""
    try:
        name, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise ConfigError(f"/tool {text}: {error}\ntype: /tool NAME KEY='a text' ...") from error
    _check_tool(name, tools)
    known = tools[name].get("parameters", {}).get("properties", {})
    arguments: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in known:
            key, value = next((key for key in known if key not in arguments), ""), word
            if not key:
                raise ConfigError(f"/tool {name}: {word!r} is one too many; it takes {', '.join(known) or 'none'}")
        arguments[key] = _value_of(value, known.get(key, {}))
    return name, arguments


def _check_tool(name: str, tools: Mapping[str, Any]) -> None:
    if name not in tools:
        raise ConfigError(f"there is no tool {name!r}; the tools are: {', '.join(tools) or 'none'}")


def _value_of(text: str, schema: Mapping[str, Any]) -> Any:
    """The value of an argument: as it is if the parameter is a text, else as JSON or as a flag is read."""
    from rollouts.config.flags import read_flag

    if schema.get("type") == "string" or (schema.get("enum") and text in schema["enum"]):
        return text
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return read_flag(text).value


# --- what is shown ----------------------------------------------------------------------------------------------------


def tool_line(schema: Mapping[str, Any]) -> str:
    """A tool in one line: `price(thing: string, [count: integer])  The price of some things.`"""
    from rollouts.env.schema import tool_label

    first = (schema["function"].get("description") or "").partition("\n")[0]
    return f"{tool_label(schema)}  {first}".rstrip()


def result_lines(episode: Episode) -> Iterator[str]:
    """How the episode of one agent ended, the rewards with their parts and reasons, and the metrics."""
    trajectory, score = episode.trajectory, episode.score
    of = f"{episode.role}: " if episode.role else ""
    yield f"{of}{trajectory.status.value}" + (f": {trajectory.error}" if trajectory.error else "")
    if score.parts or score.value is not None:
        yield f"{of}reward {_number(score.value)}"
    for name, value in score.parts.items():
        weight = (score.weights or {}).get(name, 1.0)
        yield f"  {name}: {_number(value)}" + ("" if weight == 1 else f", weight {weight:g}")
    if score.why:
        yield f"  why: {score.why}"
    metrics = {name.removeprefix("metric/"): value for name, value in _metrics_of(episode).items()}
    if metrics:
        yield f"  metrics: {', '.join(f'{name} {value:g}' for name, value in metrics.items())}"


def _show_table(episodes: Sequence[Episode]) -> None:
    """Print a table with a row for each episode, and the means."""
    names = list(dict.fromkeys(name for episode in episodes for name in episode.score.parts))
    numbers = [
        [each.metrics.get("turns", 0.0), each.metrics.get("tool_calls", 0.0), each.score.value]
        + [each.score.parts.get(name) for name in names]
        for each in episodes
    ]
    columns = ([value for value in column if value is not None] for column in zip(*numbers, strict=True))
    means = [statistics.fmean(column) if column else None for column in columns]
    rows = [[str(number), each.status.value] for number, each in enumerate(episodes, start=1)] + [["mean", ""]]
    cells = [[*row, *map(_number, values)] for row, values in zip(rows, [*numbers, means], strict=True)]
    print_table("", ["episode", "status", "turns", "tool calls", "reward", *names], cells)


def _metrics_of(episode: Episode) -> dict[str, float]:
    return {name: value for name, value in episode.metrics.items() if name != "latency_seconds"}


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _text_of(plan: Plan) -> Callable[[ChatRequest], str]:
    """The exact text of a request, in the chat template of the plan's model. Raises UserError without transformers."""
    from rollouts.runs.session import load_chat

    chat = load_chat(plan.settings, plan.environments, tool_parser=plan.tool_parser)
    return lambda request: chat.render(request.messages, request.tools, True)


# --- files ------------------------------------------------------------------------------------------------------------


def _write_rows(file: str, episode: Episode) -> None:
    """Add a row for each conversation of an episode. Raises OutputError."""
    for each in episode.by_role:
        row = {"messages": each.trajectory.messages, "tools": each.trajectory.tools, "role": each.role}
        task = {"answer": each.task.answer, "id": each.task.id}
        score = {"reward": each.score.value, "parts": each.score.parts, "why": each.score.why}
        _append_row(file, row | task | score | {"status": each.status.value, "metrics": _metrics_of(each)})


def _append_row(file: str, row: Mapping[str, Any]) -> None:
    append_lines(file, [{key: value for key, value in row.items() if value not in (None, "", [], {})}])


_DOCS = {
    "model": "The model whose chat template --show-text and /text use.",
    "max_turns": "How many turns you have. A reply that calls a tool is one turn.",
    "eval_tasks": "How many tasks are held out; --task counts them from 0.",
}

play = SettingsCommand(
    "play",
    callback=_play,
    infos=chosen_infos([name for name in EVAL if name not in HIDDEN], _DOCS),
    argument=click.Argument(["name"], metavar="NAME"),
    own=[
        click.Option(["--task"], type=int, metavar="N", help="Play held-out task N, from 0.  [default: 0]"),
        click.Option(
            ["--agent"],
            type=click.Choice(["person", "scripted", "random"]),
            default="person",
            help="Who replies: you; the demonstrations of the environment, else a call of each tool and a text; or "
            "random calls and texts from --seed.  [default: person]",
        ),
        click.Option(
            ["--episodes"], type=int, default=1, metavar="N", help="Play N tasks, one after another.  [default: 1]"
        ),
        click.Option(["--show-text"], is_flag=True, help="Show the exact text that a model sees."),
        click.Option(
            ["--json", "file"], metavar="FILE", help="Write the episodes to this new file: rows of demonstrations."
        ),
    ],
)

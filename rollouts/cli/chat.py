"""`rollouts chat RUN`: talk to a model in the terminal, or through a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollouts.author_code import shown
from rollouts.chat.tool_call_formats import EXAMPLE, UNREADABLE
from rollouts.cli.app import SIGNALS
from rollouts.cli.options import SettingsCommand, chosen_infos, given_settings
from rollouts.errors import OutputError
from rollouts.terminal_text import visible

if TYPE_CHECKING:
    from rollouts.runs.chat import Chat
    from rollouts.types import Message, Score

SHOWN = (
    "env worker tool tool_parser sandbox reward data system template inference max_tokens max_turns temperature seed "
    "turn_seconds tool_seconds trust_remote_code"
).split()
"""The settings that have a flag. All others come from the run."""

NEW = "/new"
"""The line that begins a new conversation."""


def _chat(model: str, task: int | None, role: str | None, out: str | None, **options: Any) -> int:
    """Talk to a run's model, with the tools of its environment.

    RUN is the folder of a run (its newest checkpoint is used), a checkpoint, or any other model. The environment,
    system prompt, template and engine are those of the run. Each line that you type is a message; the line /new begins
    a new conversation. The input may be a pipe. Ctrl-C stops a reply. Ctrl-D ends the conversation.

    \b
    Examples:
      rollouts chat runs/first
      rollouts chat runs/first --task 0 --temperature 0
      rollouts chat Qwen/Qwen3-0.6B --env calculator
      echo 'What is 12 * 7?' | rollouts chat runs/first --out talk.jsonl
    """
    from rollouts.runs.chat import SETTINGS, open_chat
    from rollouts.runs.run_model import model_plan

    context = click.get_current_context()
    given = given_settings(options)
    with contextlib.ExitStack() as stack:
        plan = stack.enter_context(model_plan(model, given, SETTINGS))
        if out is not None:
            check_new_file("--out", out)
        chat = stack.enter_context(open_chat(plan, task, _shown_once(), role))
        for note in chat.notes:
            click.echo(f"note: {note}", err=True)
        click.echo(f"{chat.title} · {NEW} forgets what was said, Ctrl-C stops a reply, Ctrl-D ends", err=True)
        _Talk(chat, out, context.meta[SIGNALS]).run()
    return 0


class _Talk:
    """A conversation of the input and the model. `signals` has the signal that ends the process, if one arrived."""

    def __init__(self, chat: Chat, out: str | None, signals: list[int]) -> None:
        self._chat, self._out, self._signals = chat, out, signals
        self._written = 0

    def run(self) -> None:
        """Read messages and print replies until the input ends. Raises KeyboardInterrupt."""
        self._play_task()
        while (text := self._read()) is not None:
            if text == NEW:
                self._chat.begin_anew()
                self._written = 0
                click.echo("(a new conversation)", err=True)
                self._play_task()
            elif text:
                self._exchange(self._chat.conversation.say, text)

    def _play_task(self) -> None:
        """Let the model answer the task that opens the conversation, if there is one."""
        chat = self._chat
        if chat.task is not None:
            for message in chat.task.messages:
                show_message(message)
            self._exchange(chat.conversation.play_task)

    def _exchange(self, ask: Callable[..., Awaitable[str]], *words: str) -> None:
        chat, before = self._chat, len(self._chat.conversation.messages)
        try:
            if note := chat.call(ask, *words):
                click.echo(f"({visible(note)})", err=True)
            messages = chat.conversation.messages
            if len(messages) > before and (score := chat.judge()) is not None:
                show_score(score)
        except KeyboardInterrupt:
            if self._signals:
                raise
            click.echo("\n(stopped; this exchange is not part of the conversation)", err=True)
            return
        if self._out is not None:
            append_lines(self._out, messages[self._written :])
            self._written = len(messages)

    def _read(self) -> str | None:
        """The next message; None at the end of the input."""
        for is_last in (False, True):
            try:
                line = typed_line("> ")
            except KeyboardInterrupt:
                if is_last or self._signals:
                    raise
                click.echo("\n(Ctrl-D ends the conversation; so does Ctrl-C, typed again)", err=True)
                continue
            text = None if line is None else line.strip()
            if text and text != NEW and not sys.stdin.isatty():
                click.echo(f"user: {visible(text)}")
            return text
        raise AssertionError("the second attempt returns or raises")


def typed_line(prompt: str) -> str | None:
    """The next line of the input, with a prompt in a terminal; None at its end."""
    if sys.stdin is None:
        return None
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 -- `input` edits lines with it
    try:
        return input(prompt)
    except EOFError:
        click.echo()
        return None


def show_message(message: Message) -> None:
    """One message as `role: text`; thoughts, calls and results are dimmed in a terminal. A call that was not
    run is one line: the reason, and what the model wrote.
    """
    unread = [call for call in message.tool_calls if call.error]
    if message.reasoning:
        click.secho(f"(thinks) {visible(message.reasoning.strip())}", dim=True)
    if message.role == "tool":
        click.secho(f"tool: {visible(message.text.strip())}", dim=True)
    elif (message.text.strip() and not unread) or not message.tool_calls:
        click.echo(f"{message.role}: {visible(message.text.strip())}")
    for call in message.tool_calls:
        arguments = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
        words = f"[{call.name}({arguments})]"
        if call.error:
            reason = call.error.partition("\n")[0].removeprefix(UNREADABLE).removesuffix(EXAMPLE)
            text = f" {shown(message.text.strip())}" if call is unread[0] and message.text.strip() else ""
            words = f"(a call that was not run: {reason}){text}"
        click.secho(f"{message.role}: {visible(words)}", dim=True)


def _shown_once() -> Callable[[Message], None]:
    """Shows the messages of a conversation, without the answers to unreadable calls: these repeat what is wrong, and
    tell the model how a call is written.
    """
    unread: set[str | None] = set()

    def show(message: Message) -> None:
        if message.role == "assistant":
            unread.clear()
            unread.update(call.id for call in message.tool_calls if call.error)
        if message.role != "tool" or message.tool_call_id not in unread:
            show_message(message)

    return show


def show_score(score: Score) -> None:
    """The reward and its parts in one line."""
    if not score.parts:  # the environment has no reward
        return
    parts = ", ".join(f"{name} {'–' if value is None else f'{value:g}'}" for name, value in score.parts.items())
    value = "–" if score.value is None else f"{score.value:g}"
    why = f": {visible(score.why)}" if score.why else ""
    click.secho(f"reward: {value} ({parts}){why}", bold=True)


def check_new_file(flag: str, file: str) -> None:
    """Raise OutputError if this file exists already, or cannot be written."""
    if Path(file).exists():
        raise OutputError(f"{flag} {file}: this file exists already and is not overwritten; give another name")
    append_lines(file, [])
    Path(file).unlink()


def append_lines(file: str, lines: Iterable[Any]) -> None:
    """Add lines of JSON to a file. Raises OutputError."""
    from rollouts.encoding import encode

    try:
        with open(file, "ab") as stream:
            stream.writelines(encode(line) + b"\n" for line in lines)
    except OSError as error:
        raise OutputError(f"{file} cannot be written: {error.strerror or error}") from error


_DOCS = {
    "max_tokens": "How many tokens the model may sample after each of your messages, in all its turns together.",
    "max_turns": "How many turns the model has after each of your messages. A reply that calls tools is one turn.",
    "temperature": "The sampling temperature. 0 is greedy.",
    "env": "The environment whose tools the model gets. A model that is no run has none without it.",
}

chat = SettingsCommand(
    "chat",
    callback=_chat,
    infos=chosen_infos(SHOWN, _DOCS, "that of the run"),
    argument=click.Argument(["model"], metavar="RUN"),
    own=[
        click.Option(
            ["--task"], type=int, metavar="N", help="Begin with held-out task N (from 0), and show its reward."
        ),
        click.Option(["--role"], metavar="NAME", help="The role of the model, in an environment with roles."),
        click.Option(["--out"], metavar="FILE", help="Write the messages to this new file, as JSON lines."),
    ],
)

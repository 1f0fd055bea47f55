"""Render only what is new in a conversation, or all of its prefixes at once, so that a turn costs its own text.

A chat template is a program. Its main loop writes one message after another. `IncrementalRenderer` compiles the
template a second time with a changed loop (`rollouts.chat.loop_rewriting`). This loop can start at a later message, it
can show a message once more as the last of a conversation, and it writes a mark before each message. Everything else
runs unchanged on the whole conversation. So the text between two marks is exactly what the template writes there.

The result is used only if the text before the new messages is proved to be unchanged. The text of a message may depend
on the message, its neighbors, its index, whether it is first or last, and on values from outside the loop. If the loop
reads anything else, incremental rendering is not used. Each time, three things are compared with the shorter
conversation: the text before the loop, every outside value that the loop reads, and the messages. A loop that passes a
value from one message to the next through a namespace is detected when it writes the value. If anything differs, the
caller renders the whole conversation. Templates that are not Jinja are not supported.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from jinja2 import Undefined
from jinja2.runtime import Macro
from jinja2.utils import Namespace

from rollouts.chat.loop_rewriting import LOOP, MARK, NotIncremental, Proved, rewritten

_LEAVES = frozenset({str, int, float, bool, type(None)})
_DICT_ATTRIBUTES = frozenset(dir(dict))


class Rendering(NamedTuple):
    """The state of a rendered conversation.

    `messages` and `tools` are in the template's form. `items` are the messages of the template's main loop. `before` is
    the text before the loop, and `last` the text from the last message to the end. `values` are all outside values that
    the loop reads.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    items: list[Any]
    before: str
    values: bytes
    last: str


class _Texts(NamedTuple):
    """The texts of one rendering: before the loop, and of each message with another one behind it, and as the last."""

    head: str
    inner: list[str]
    last: dict[int, str]


class Prefixes(NamedTuple):
    """The texts of the first messages of a conversation, for several numbers of messages (`texts`). `tails` are the
    texts after the last message, without and with the generation prompt.
    """

    texts: dict[int, _Texts]
    tails: tuple[str, str]

    def text(self, count: int, generation_prompt: bool) -> str:
        """The text of the first `count` messages."""
        head, inner, last = self.texts[count]
        return "".join((head, *inner[: count - 1], last[count - 1], self.tails[generation_prompt]))

    def pair(self, before: int, count: int, generation_prompt: bool) -> tuple[str, str]:
        """The texts of the first `before` messages with the generation prompt, and of the first `count`, both without
        the known common beginning.
        """
        (_, inner, last), longer = self.texts[before], self.texts[count]
        if longer.inner is not inner:
            return self.text(before, True), self.text(count, generation_prompt)
        rest = (*inner[before - 1 : count - 1], longer.last[count - 1], self.tails[generation_prompt])
        return last[before - 1] + self.tails[True], "".join(rest)


def _passed(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Messages as transformers passes them to a template: without None values, and with a thought under both of its
    keys. Returns None if a message contains anything but plain data.
    """
    if not all(map(is_plain, messages)):
        return None
    kept = [
        {key: value for key, value in message.items() if value is not None} if None in message.values() else message
        for message in messages
    ]
    return [{"thinking": m["reasoning_content"], **m} if "reasoning_content" in m else m for m in kept]


def is_plain(value: Any) -> bool:
    """Whether a value consists of JSON types alone. A template must not receive other objects."""
    if type(value) in _LEAVES:
        return True
    if isinstance(value, dict):
        return _LEAVES.issuperset(map(type, value)) and is_plain(list(value.values()))
    return isinstance(value, list) and (_LEAVES.issuperset(map(type, value)) or all(map(is_plain, value)))


class IncrementalRenderer:
    """Renders conversations with one template. Raises NotIncremental if the template cannot be changed."""

    def __init__(self, template_text: str, given: Mapping[str, Any]) -> None:
        if not is_plain(given):
            raise NotIncremental("the template receives objects")
        self._template, self._namespace, self._proved = _compile(template_text)
        self._given = given
        self._tails: tuple[str, str] | None = None

    def whole(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], generation_prompt: bool
    ) -> tuple[str, Rendering] | None:
        """The text of a conversation, and its rendering; None if the conversation cannot be rendered incrementally."""
        given = _passed(messages)
        done = self._run(given, tools, generation_prompt, 0) if given is not None and is_plain(tools) else None
        return None if done is None else (done[0].before + done[1], done[0])

    def tail(self, old: Rendering, new: list[dict[str, Any]], generation_prompt: bool) -> tuple[str, Rendering] | None:
        """The text with the new messages, from the last old message on. This text replaces `old.last`.

        None if the text before `old.last` is not provably unchanged.
        """
        more, start = _passed(new), max(0, len(old.items) - 1)
        done = None if more is None else self._run([*old.messages, *more], old.tools, generation_prompt, start)
        if done is None:
            return None
        now, text = done
        same = (now.before, now.values) == (old.before, old.values) and len(now.items) >= len(old.items)
        return (text, now) if same and all(map(operator.is_, old.items, now.items)) else None

    def prefixes(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], counts: Collection[int]
    ) -> Prefixes | None:
        """The texts of the first messages, for each of the counts. None if they cannot be rendered at once.

        Prefixes with the same text before the loop and the same outside values share one rendering.
        """
        given = _passed(messages) if self._proved.has_prefixes and min(counts) and is_plain(tools) else None
        tails = None if given is None else self._both_tails(given[: min(counts)])
        if given is None or tails is None:
            return None
        groups: dict[Any, list[int]] = {}
        for count in counts:
            outside = () if self._proved.keeps_head else self._outside(given[:count], tools)
            if outside is None:
                return None
            groups.setdefault(outside, []).append(count)
        found: dict[int, _Texts] = {}
        for group in groups.values():
            texts = self._views(given[: max(group)], tools, group)
            if texts is None:
                return None
            found |= dict.fromkeys(group, texts)
        return Prefixes(found, tails)

    def _both_tails(self, messages: list[dict[str, Any]]) -> tuple[str, str] | None:
        """The texts after the loop, which no conversation changes."""
        if self._tails is None:
            runs = [self._render(_Loop(), messages, [], prompt) for prompt in (False, True)]
            if None not in runs:
                without, prompt = (str(run).rpartition(MARK)[2] for run in runs)
                self._tails = without, prompt
        return self._tails

    def _outside(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> tuple[Any, ...] | None:
        """What surrounds the loop: the text before it, the outside values that it reads, and the messages left out."""
        loop = _Loop(start=len(messages))
        text = self._render(loop, messages, tools, False)
        first = None if text is None else loop.runs_from(messages)
        return None if text is None or first is None else (text.partition(MARK)[0], loop.values, first)

    def _views(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], counts: Collection[int]
    ) -> _Texts | None:
        """The texts of the messages, of which those before `counts` are shown as the last ones too."""
        loop = _Loop(last={count - len(messages) for count in counts}, keeps_values=False)
        text = self._render(loop, messages, tools, False)
        if text is None:
            return None
        head, *texts, _ = text.split(MARK)
        first = loop.runs_from(messages)
        if first is None or first >= min(counts) or len(texts) != len(loop.views) or loop.is_tied:
            return None
        inner, last = [""] * len(messages), {}
        for (place, is_last), text in zip(loop.views, texts, strict=True):
            if not is_last:
                inner[first + place] = text
            last[first + place] = text  # of a message with two texts, the second is the one as the last
        return _Texts(head, inner, last)

    def _run(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], prompt: bool, start: int
    ) -> tuple[Rendering, str] | None:
        loop = _Loop(start)
        text = self._render(loop, messages, tools, prompt)
        if text is None:
            return None
        before, *texts = text.split(MARK)
        if not loop.is_entered or len(texts) != len(loop.views) + 1 or loop.is_tied:
            return None
        return Rendering(messages, tools, loop.items, before, loop.values, "".join(texts[-2:])), "".join(texts)

    def _render(
        self, loop: _Loop, messages: list[dict[str, Any]], tools: list[dict[str, Any]], prompt: bool
    ) -> str | None:
        """The text of the changed template, with its marks. None if the template raises: then the caller renders the
        whole conversation, and reports the error.
        """
        names = {
            **self._given,
            LOOP: loop,
            "namespace": functools.partial(_watched(self._namespace), loop),
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": prompt,
        }
        try:
            return "".join(self._template.root_render_func(self._template.new_context(names)))
        except Exception:  # a template may raise anything; rendering the whole conversation then reports it
            return None


class _Loop:
    """What the changed template knows as its main loop: gives it the messages, and records the pass.

    A message is shown a second time, as the last of a conversation, if the text may depend on the messages behind it
    and `last` has its place. Places in `last` are counted from the end: -1 is the message before the last one.
    """

    def __init__(self, start: int = 0, last: Collection[int] = (), *, keeps_values: bool = True) -> None:
        self._start, self._last, self._keeps_values = start, last, keeps_values
        self._place, self._end = 0, 0
        self._looks_ahead = False
        self.items: list[Any] = []
        self.views: list[tuple[int, bool]] = []  # each text: the place of the message, and whether it is the last
        self.values = b""
        self.is_entered = False
        self.is_tied = False  # whether a message depends on more than its neighbors

    def enter(self, items: Any, /, **values: Any) -> Iterator[Any]:
        """The messages that the loop runs over. `values` are all outside values that it reads."""
        if self.is_entered or not isinstance(items, list):
            raise NotIncremental("the loop runs twice, or over something else than a list")
        self.items, self.is_entered = items, True
        if self._keeps_values:
            self.values = msgspec.msgpack.encode(values, enc_hook=_plain_value)
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        size = len(self.items)
        for place in range(self._start, size):
            self._place, self._end, self._looks_ahead = place, size, False
            self.views.append((place, place + 1 == size))
            yield self.items[place]
            if self._looks_ahead and place + 1 - size in self._last and place + 1 < size:
                self._end = place + 1
                self.views.append((place, True))
                yield self.items[place]

    def runs_from(self, messages: list[Any]) -> int | None:
        """The place of the first message of the loop. None if it does not run over all messages from there on."""
        first = len(messages) - len(self.items)
        is_rest = self.is_entered and first >= 0 and all(map(operator.is_, messages[first:], self.items))
        return first if is_rest else None

    @property
    def index0(self) -> int:
        return self._place

    @property
    def index(self) -> int:
        return self._place + 1

    @property
    def first(self) -> bool:
        return self._place == 0

    @property
    def last(self) -> bool:
        self._looks_ahead = True
        return self._place + 1 == self._end

    @property
    def previtem(self) -> Any:
        return self.items[self._place - 1] if self._place else Undefined("there is no previous item")

    @property
    def nextitem(self) -> Any:
        return Undefined("there is no next item") if self.last else self.items[self._place + 1]

    def item(self, items: Any, place: int) -> Any:
        """`items[place]`, of the messages of this conversation. A negative index makes the pass unusable, because it
        means another item when the list is longer.
        """
        self.is_tied = self.is_tied or place < 0
        self._looks_ahead = self._looks_ahead or place > self._place
        size = len(items) - (len(self.items) - self._end)
        return items[place] if -size <= place < size else Undefined(f"there is no item {place}")


def _plain_value(value: Any) -> Any:
    if isinstance(value, Undefined):
        return ["undefined"]
    if isinstance(value, Namespace):
        return object.__getattribute__(value, "_Namespace__attrs")
    raise NotIncremental(f"the loop reads a {type(value).__name__}")


@functools.lru_cache(maxsize=8)
def _watched(base: Any) -> Any:
    """A namespace class that reports assignments to the recorder of the loop."""

    class Watched(base):  # type: ignore[misc]
        def __init__(*args: Any, **values: Any) -> None:
            self, loop, *rest = args
            base.__init__(self, *rest, **values)
            # A namespace that is created inside the loop lasts for one message only.
            object.__setattr__(self, "_rollouts_loop", None if loop.is_entered else loop)

        def __setitem__(self, name: str, value: Any) -> None:
            loop = object.__getattribute__(self, "_rollouts_loop")
            if loop is not None and loop.is_entered:
                loop.is_tied = True
            super().__setitem__(name, value)

    return Watched


@functools.lru_cache(maxsize=32)
def _compile(template_text: str) -> tuple[Any, type, Proved]:
    """The changed template, the class of its namespaces, and what is proved. Raises NotIncremental."""
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        environment = _quick(_compile_jinja_template(template_text).environment)
        namespace = environment.globals["namespace"]
    except (ImportError, AttributeError, KeyError) as error:  # another version of transformers
        raise NotIncremental(str(error)) from error
    tree = environment.parse(template_text)
    proved = rewritten(tree, environment.globals)
    template = environment.template_class.from_code(environment, environment.compile(tree), environment.globals)
    return template, namespace, proved


def _quick(environment: Any) -> Any:
    """A copy of an environment, faster where a rendering spends most of its time, with the same results.

    The original looks for an attribute before it looks for the key of a dict, and checks at every call whether a macro
    is safe to call and which arguments it wants.
    """

    class Quick(type(environment)):  # type: ignore[misc]
        def getattr(self, obj: Any, attribute: str) -> Any:
            if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
                found = obj.get(attribute, _ABSENT)
                return self.undefined(obj=obj, name=attribute) if found is _ABSENT else found
            return getattr(obj, attribute) if type(obj) is _Loop else super().getattr(obj, attribute)

        def call(__self, __context: Any, __called: Any, *args: Any, **given: Any) -> Any:
            if type(__called) is not Macro:
                return super().call(__context, __called, *args, **given)
            given.pop("_block_vars", None)
            given.pop("_loop_vars", None)
            return __called(__context.eval_ctx, *args, **given)

    quick = object.__new__(Quick)
    quick.__dict__.update(environment.__dict__)
    return quick


_ABSENT = object()

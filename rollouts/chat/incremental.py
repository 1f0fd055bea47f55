"""Render only what is new in a conversation, so that the cost of a turn does not grow with the turns before it.

A chat template is a program. Its main loop writes one message after another. `IncrementalRenderer` compiles the
template a second time with two changes to that loop: it can start at a later message, and it writes a mark before each
message. Everything else runs unchanged on the whole conversation. So the text after the last mark is exactly what the
template writes there.

The result is used only if the text before the new messages is proved to be unchanged. The text of a message may depend
on the message, its neighbors, its index, whether it is first or last, and on values from outside the loop. If the loop
reads anything else, incremental rendering is not used (`_LoopRewriter` refuses the template). At each turn, three
things are compared with the previous turn: the text before the loop, every outside value that the loop reads, and the
old messages. A loop that passes a value from one message to the next through a namespace is detected when it writes the
value. If anything differs, the caller renders the whole conversation. The text before the loop, which mostly lists the
tools, is skipped if it provably depends on the tools and the first message alone (`_head`). Templates that are not
Jinja are not supported.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from jinja2 import Undefined, nodes
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_MARK = "\ufdd3"  # a Unicode noncharacter; a conversation that contains it is rendered as a whole
_ENTER, _OFFSET = "_rollouts_enter", "_rollouts_offset"
_ITEM, _PREVIOUS, _TAIL = "_rollouts_item", "_rollouts_previous", "_rollouts_tail"
_CONSTANT = frozenset({"dict", "namespace", "raise_exception", "range"})  # the globals of Jinja that never change
_MESSAGES = "messages"
_LEAVES = frozenset({str, int, float, bool, type(None)})


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


def shown(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Messages as transformers passes them to a template: without None values, and with a thought under both of its
    keys. Returns None if a message contains anything but plain data.
    """
    if not all(map(is_plain, messages)):
        return None
    kept = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return [{"thinking": m["reasoning_content"], **m} if "reasoning_content" in m else m for m in kept]


def is_plain(value: Any) -> bool:
    """Whether a value consists of JSON types alone. A template must not receive other objects."""
    if type(value) in _LEAVES:
        return True
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return isinstance(value, list) and all(map(is_plain, value))


class NotIncremental(Exception):
    """This conversation, or every conversation of this template, must be rendered as a whole."""


class IncrementalRenderer:
    """Renders conversations with one template. Raises NotIncremental if the template cannot be changed."""

    def __init__(self, template_text: str, given: Mapping[str, Any]) -> None:
        if not is_plain(given):
            raise NotIncremental("the template receives objects")
        self._template, self._namespace, self._skips_head = _compile(template_text)
        self._given = given

    def whole(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], generation_prompt: bool
    ) -> tuple[str, Rendering] | None:
        """The text of a conversation, and its rendering; None if the conversation cannot be rendered incrementally."""
        given = shown(messages)
        done = self._run(given, tools, generation_prompt, 0) if given is not None and is_plain(tools) else None
        return None if done is None else (done[0].before + done[1], done[0])

    def tail(self, old: Rendering, new: list[dict[str, Any]], generation_prompt: bool) -> tuple[str, Rendering] | None:
        """The text with the new messages, from the last old message on. This text replaces `old.last`.

        None if the text before `old.last` is not provably unchanged.
        """
        skips, more = self._skips_head and bool(old.messages), shown(new)
        start = max(0, len(old.items) - 1)
        done = None if more is None else self._run([*old.messages, *more], old.tools, generation_prompt, start, skips)
        if done is None:
            return None
        now, text = done
        if skips:
            now = now._replace(before=old.before + now.before)
        same = (now.before, now.values) == (old.before, old.values) and len(now.items) >= len(old.items)
        return (text, now) if same and all(map(operator.is_, old.items, now.items)) else None

    def _run(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], prompt: bool, start: int, skips: bool = False
    ) -> tuple[Rendering, str] | None:
        loop = _LoopRecorder(start)
        names = {
            **self._given,
            _ENTER: loop.enter,
            _OFFSET: start,
            _ITEM: loop.item,
            _PREVIOUS: loop.previous,
            _TAIL: skips,
            "namespace": functools.partial(_watched(self._namespace), loop),
        }
        try:
            text = self._template.render(
                names, messages=messages, tools=tools or None, documents=None, add_generation_prompt=prompt
            )
        except Exception:  # the caller renders the whole conversation, and reports the error
            return None
        before, *texts = text.split(_MARK)
        if loop.values is None or len(texts) != max(0, len(loop.items) - start) + 1 or loop.is_tied:
            return None
        return Rendering(messages, tools, loop.items, before, loop.values, "".join(texts[-2:])), "".join(texts)


class _LoopRecorder:
    """Records one pass through the main loop."""

    def __init__(self, start: int) -> None:
        self._start = start
        self.items: list[Any] = []
        self.values: bytes | None = None
        self.is_tied = False  # whether a message depends on more than its neighbors

    def enter(self, items: Any, /, **values: Any) -> list[Any]:
        if self.values is not None or not isinstance(items, list):
            raise NotIncremental("the loop runs twice, or over something else than a list")
        self.items = items
        self.values = msgspec.msgpack.encode(values, enc_hook=_plain_value) if values else b"none"
        return items[self._start :]

    def previous(self, place: int) -> Any:
        """The item before this place, as `loop.previtem`."""
        return self.items[place - 1] if place else Undefined("there is no previous item")

    def item(self, items: Any, place: int) -> Any:
        """`items[place]`. A negative index makes the pass unusable, because it means another item when the list is
        longer.
        """
        self.is_tied = self.is_tied or place < 0
        return items[place] if -len(items) <= place < len(items) else Undefined(f"there is no item {place}")


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
            object.__setattr__(self, "_rollouts_loop", loop if loop.values is None else None)

        def __setitem__(self, name: str, value: Any) -> None:
            loop = object.__getattribute__(self, "_rollouts_loop")
            if loop is not None and loop.values is not None:
                loop.is_tied = True
            super().__setitem__(name, value)

    return Watched


@functools.lru_cache(maxsize=32)
def _compile(template_text: str) -> tuple[Any, type, bool]:
    """The changed template, the class of its namespaces, and whether the text before the loop can be skipped. Raises
    NotIncremental.
    """
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        environment = _compile_jinja_template(template_text).environment
        namespace = environment.globals["namespace"]
    except (ImportError, AttributeError, KeyError) as error:  # another version of transformers
        raise NotIncremental(str(error)) from error
    tree = _GenerationBlocksRemover().visit(environment.parse(template_text))
    skips_head = _change(tree, environment.globals)
    template = environment.template_class.from_code(environment, environment.compile(tree), environment.globals)
    return template, namespace, skips_head


# --- changing the loop ----------------------------------------------------------------------------------------------


def _change(tree: Any, known: Mapping[str, Any]) -> bool:
    """Change the main loop of a template in place. Returns whether `_TAIL` can skip the text before the loop.

    Raises NotIncremental if messages may depend on more than the recorded values.
    """
    foreign = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)
    if any(True for _ in tree.find_all(foreign)):
        raise NotIncremental("the template includes other files")
    found = list(_loops(tree.body))
    if not found:
        raise NotIncremental("the template has no loop")
    siblings, main = found[-1]
    if main.test is not None or main.else_ or main.recursive or not isinstance(main.target, nodes.Name):
        raise NotIncremental("the loop has a filter, an else branch, recursion, or several targets")
    macros = list(tree.find_all(nodes.Macro))
    if len({macro.name for macro in macros}) < len(macros):
        raise NotIncremental("the template has two macros of one name")
    assigned = _named(tree, "store")
    lists = {main.iter.name} if isinstance(main.iter, nodes.Name) else set()
    lists |= {_MESSAGES} - assigned
    lists = lists.difference(*(_named(node, "store") for node in main.body))
    in_body, in_macros = _LoopRewriter(lists), _LoopRewriter(set())
    main.body = [in_body.visit(node, True) for node in main.body]
    for macro in macros:
        in_macros.visit(macro, False)
    read = (in_body.read - {main.target.name} | in_macros.read) - {macro.name for macro in macros}
    read -= _CONSTANT & (set(known) - assigned)
    if read & {_MESSAGES, "loop", "caller", *lists, *known}:
        raise NotIncremental("the loop reads more than single messages")
    values = [nodes.Keyword(name, nodes.Name(name, "load")) for name in sorted(read)]
    main.iter = nodes.Call(nodes.Name(_ENTER, "load"), [main.iter], values, None, None)
    main.body.insert(0, nodes.Output([nodes.TemplateData(_MARK)]))
    place = next(number for number, node in enumerate(siblings) if node is main)
    siblings.insert(place + 1, nodes.Output([nodes.TemplateData(_MARK)]))
    skipped = _head(siblings[:place], known) if siblings is tree.body else []
    for number in skipped:
        siblings[number] = nodes.If(nodes.Not(nodes.Name(_TAIL, "load")), [siblings[number]], [], [])
    for node in tree.find_all(nodes.Node):
        node.set_lineno(1, override=False)
        node.environment = tree.environment
    return bool(skipped)


def _head(body: list[Any], known: Mapping[str, Any]) -> list[int]:
    """The statements before the loop whose text depends only on the tools and the first message. Empty if any other
    statement writes text.
    """
    unsettled = {"add_generation_prompt"} | (set(known) - _CONSTANT)
    count = -1
    while count != len(unsettled):  # a value that depends on an unsettled value is unsettled too
        count = len(unsettled)
        for node in body:
            if not _is_settled(node, unsettled):
                unsettled |= _stored(node)
                if _has(node, nodes.NSRef):  # the namespace may have a second name
                    unsettled |= {name for other in body if "namespace" in _named(other) for name in _stored(other)}
    writing = [
        place for place, node in enumerate(body) if _has(node, nodes.Output) and not isinstance(node, nodes.Macro)
    ]
    storing = (nodes.Assign, nodes.AssignBlock, nodes.CallBlock, nodes.Macro)
    is_same = all(_is_settled(body[place], unsettled) and not _has(body[place], storing) for place in writing)
    return writing if is_same and not any(_MESSAGES in _stored(node) for node in body) else []


def _has(node: Any, kinds: Any) -> bool:
    return isinstance(node, kinds) or next(iter(node.find_all(kinds)), None) is not None


def _named(node: Any, *contexts: str) -> set[str]:
    """The names in a node, in the given contexts, or in all contexts if none is given."""
    return {name.name for name in node.find_all(nodes.Name) if not contexts or name.ctx in contexts}


def _stored(node: Any) -> set[str]:
    """The names that a statement assigns."""
    names = _named(node, "store", "param") | {each.name for each in node.find_all((nodes.NSRef, nodes.Macro))}
    return names | ({node.name} if isinstance(node, nodes.Macro) else set())


def _is_settled(node: Any, unsettled: set[str]) -> bool:
    """Whether a node reads no unsettled value, and of the messages only the first one and whether there are any."""
    if isinstance(node, nodes.Name):
        return node.ctx != "load" or node.name not in unsettled | {_MESSAGES}
    if isinstance(node, nodes.Filter) and node.name == "random":
        return False
    left: list[Any] = list(node.iter_child_nodes())
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == 0:
        left = [] if _is_messages(node.node) else left
    elif isinstance(node, nodes.And | nodes.Not | nodes.If | nodes.CondExpr):
        asked = left[0]  # the operand, the condition
        left = left[1:] if _is_messages(asked) else left
    return all(_is_settled(child, unsettled) for child in left)


def _is_messages(node: Any) -> bool:
    return isinstance(node, nodes.Name) and (node.name, node.ctx) == (_MESSAGES, "load")


class _GenerationBlocksRemover(NodeTransformer):
    """Replaces `{% generation %}` blocks, with which transformers counts characters, by their content."""

    def visit_CallBlock(self, node: Any) -> Any:
        self.generic_visit(node)
        called = node.call.node
        is_mark = isinstance(called, nodes.ExtensionAttribute) and called.name == "_generation_support"
        return nodes.Scope(node.body) if is_mark else node


def _loops(body: list[Any]) -> Iterator[tuple[list[Any], Any]]:
    """The loops outside of other loops, each with its sibling statements."""
    for node in body:
        if isinstance(node, nodes.For):
            yield body, node
        elif isinstance(node, nodes.If):
            yield from _loops(node.body)
            for branch in node.elif_:
                yield from _loops(branch.body)
            yield from _loops(node.else_)


class _LoopRewriter(NodeTransformer):
    """Rewrites the uses of `loop` in the body of the main loop, and collects the names that it reads (`read`). In each
    visit, `is_ours` says whether the name `loop` means the main loop.
    """

    def __init__(self, lists: set[str]) -> None:
        self._lists = lists  # the names of the lists that the loop runs over
        self.read: set[str] = set()

    def visit_Name(self, node: nodes.Name, is_ours: bool) -> Any:
        if node.ctx == "load":
            self.read.add(node.name)
        return node

    def visit_Break(self, node: Any, is_ours: bool) -> Any:
        if is_ours:
            raise NotIncremental("the loop may end early")
        return node

    def visit_Filter(self, node: nodes.Filter, is_ours: bool) -> Any:
        if node.name == "random":
            raise NotIncremental("the loop is random")
        return self.generic_visit(node, is_ours)

    def visit_Macro(self, node: Any, is_ours: bool) -> Any:
        return self.generic_visit(node, False)

    def visit_For(self, node: Any, is_ours: bool) -> Any:
        node.iter, *node.else_ = [self.visit(each, is_ours) for each in (node.iter, *node.else_)]
        node.target, *node.body = [self.visit(each, False) for each in (node.target, *node.body)]
        node.test = node.test and self.visit(node.test, False)
        return node

    def visit_Getattr(self, node: Any, is_ours: bool) -> Any:
        if not (isinstance(node.node, nodes.Name) and node.node.name == "loop"):
            return self.generic_visit(node, is_ours)
        if not is_ours or node.attr in ("last", "nextitem"):
            return node
        offset = nodes.Name(_OFFSET, "load")
        if node.attr in ("index0", "index"):
            return nodes.Add(node, offset)
        index = nodes.Add(nodes.Getattr(node.node, "index0", "load"), offset)
        if node.attr == "previtem":
            return nodes.Call(nodes.Name(_PREVIOUS, "load"), [index], [], None, None)
        if node.attr == "first":
            return nodes.Compare(index, [nodes.Operand("eq", nodes.Const(0))])
        raise NotIncremental(f"the loop reads loop.{node.attr}")

    def visit_Getitem(self, node: Any, is_ours: bool) -> Any:
        """Rewrite `messages[loop.index0 - 1]`, `messages[loop.index0 + 1]` and `messages[0]`. Expressions with other
        indexes stay, so they read the list itself.
        """
        place = node.arg
        is_beside = isinstance(place, nodes.Const) and place.value == 0
        if is_ours and isinstance(place, nodes.Add | nodes.Sub) and isinstance(place.left, nodes.Getattr):
            base, one = place.left.node, place.right
            is_beside = isinstance(base, nodes.Name) and (base.name, place.left.attr) == ("loop", "index0")
            is_beside = is_beside and isinstance(one, nodes.Const) and one.value == 1
        if not (is_beside and isinstance(node.node, nodes.Name) and node.node.name in self._lists):
            return self.generic_visit(node, is_ours)
        return nodes.Call(nodes.Name(_ITEM, "load"), [node.node, self.visit(place, is_ours)], [], None, None)

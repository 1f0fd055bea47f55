"""Render only what is new in a conversation, so that a turn costs its own text.

A chat template is a program. Its main loop writes one message after another. `IncrementalRenderer` compiles the
template a second time with a changed loop (`rewritten`). This loop can start at a later message, and
it writes a mark before each message. Everything else runs unchanged on the whole conversation. So the text between two
marks is exactly what the template writes there.

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
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from jinja2 import Undefined, nodes
from jinja2.runtime import Macro
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MARK = "\ufdd3"  # a Unicode noncharacter; a conversation that contains it is rendered as a whole
LOOP = "_rollouts_loop"
_CONSTANT = frozenset({"dict", "namespace", "raise_exception", "range"})  # the globals of Jinja that never change
_MESSAGES = "messages"
_LEAVES = frozenset({str, int, float, bool, type(None)})
_DICT_ATTRIBUTES = frozenset(dir(dict))


class NotIncremental(Exception):
    """This conversation, or every conversation of this template, must be rendered as a whole."""


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
        self._template, self._namespace = _compile(template_text)
        self._given = given

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

    def _run(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], prompt: bool, start: int
    ) -> tuple[Rendering, str] | None:
        loop = _Loop(start)
        text = self._render(loop, messages, tools, prompt)
        if text is None:
            return None
        before, *texts = text.split(MARK)
        if not loop.is_entered or len(texts) != len(loop.items) - start + 1 or loop.is_tied:
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
    """What the changed template knows as its main loop: gives it the messages from place `start` on, and records the
    pass.
    """

    def __init__(self, start: int) -> None:
        self._start, self._place = start, 0
        self.items: list[Any] = []
        self.values = b""
        self.is_entered = False
        self.is_tied = False  # whether a message depends on more than its neighbors

    def enter(self, items: Any, /, **values: Any) -> Iterator[Any]:
        """The messages that the loop runs over. `values` are all outside values that it reads."""
        if self.is_entered or not isinstance(items, list):
            raise NotIncremental("the loop runs twice, or over something else than a list")
        self.items, self.is_entered = items, True
        self.values = msgspec.msgpack.encode(values, enc_hook=_plain_value)
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        for place in range(self._start, len(self.items)):
            self._place = place
            yield self.items[place]

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
        return self._place + 1 == len(self.items)

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
            object.__setattr__(self, "_rollouts_loop", None if loop.is_entered else loop)

        def __setitem__(self, name: str, value: Any) -> None:
            loop = object.__getattribute__(self, "_rollouts_loop")
            if loop is not None and loop.is_entered:
                loop.is_tied = True
            super().__setitem__(name, value)

    return Watched


@functools.lru_cache(maxsize=32)
def _compile(template_text: str) -> tuple[Any, type]:
    """The changed template and the class of its namespaces. Raises NotIncremental."""
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        environment = _quick(_compile_jinja_template(template_text).environment)
        namespace = environment.globals["namespace"]
    except (ImportError, AttributeError, KeyError) as error:  # another version of transformers
        raise NotIncremental(str(error)) from error
    tree = environment.parse(template_text)
    rewritten(tree, environment.globals)
    template = environment.template_class.from_code(environment, environment.compile(tree), environment.globals)
    return template, namespace


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


# --- rewriting the loop ---------------------------------------------------------------------------------------------


def rewritten(tree: Any, known: Mapping[str, Any]) -> None:
    """Rewrite the main loop of a parsed template in place. `known` are the globals of its environment.

    Raises NotIncremental if messages may depend on more than the recorded values.
    """
    _GenerationBlocksRemover().visit(tree)
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
    assigned = _named(tree, "store", "param") | {macro.name for macro in macros}
    runs_over = main.iter.name if isinstance(main.iter, nodes.Name) else ""
    lists = ({runs_over} - {""}) | ({_MESSAGES} - assigned)
    lists = lists.difference(*(_named(node, "store") for node in main.body))
    in_body, in_macros = _LoopRewriter(lists), _LoopRewriter(set())
    main.body = [in_body.visit(node, True) for node in main.body]
    for macro in macros:
        in_macros.visit(macro, False)
    read = (in_body.read - {main.target.name} | in_macros.read) - {macro.name for macro in macros}
    read -= _CONSTANT & (set(known) - assigned)
    if read & {_MESSAGES, "loop", "caller", *lists, *known}:
        raise NotIncremental("the loop reads more than single messages")
    place = next(number for number, node in enumerate(siblings) if node is main)
    values = [nodes.Keyword(name, nodes.Name(name, "load")) for name in sorted(read)]
    main.iter = nodes.Call(nodes.Getattr(nodes.Name(LOOP, "load"), "enter", "load"), [main.iter], values, None, None)
    main.body.insert(0, nodes.Output([nodes.TemplateData(MARK)]))
    siblings.insert(place + 1, nodes.Output([nodes.TemplateData(MARK)]))
    for node in tree.find_all(nodes.Node):
        node.set_lineno(1, override=False)
        node.environment = tree.environment


def _named(node: Any, *contexts: str) -> set[str]:
    """The names in a node, in the given contexts, or in all contexts if none is given."""
    return {name.name for name in node.find_all(nodes.Name) if not contexts or name.ctx in contexts}


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
        if not is_ours:
            return node
        if node.attr not in ("index0", "index", "first", "last", "previtem", "nextitem"):
            raise NotIncremental(f"the loop reads loop.{node.attr}")
        return nodes.Getattr(nodes.Name(LOOP, "load"), node.attr, "load")

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
        item = nodes.Getattr(nodes.Name(LOOP, "load"), "item", "load")
        return nodes.Call(item, [node.node, self.visit(place, is_ours)], [], None, None)

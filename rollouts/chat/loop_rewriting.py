"""Rewrite the main loop of a chat template, so that it shows a part of the messages, or some of them twice.

`rewritten` changes the parsed template in place: the loop asks an object named `LOOP` for its messages and for its
place, and writes a mark before each message. The text is otherwise unchanged. Alongside, it finds out what provably
never changes while a conversation grows (`Proved`). What the texts are used for is in `rollouts.chat.incremental`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

MARK = "\ufdd3"  # a Unicode noncharacter; a conversation that contains it is rendered as a whole
LOOP, TAIL = "_rollouts_loop", "_rollouts_tail"
_CONSTANT = frozenset({"dict", "namespace", "raise_exception", "range"})  # the globals of Jinja that never change
_MESSAGES, _PROMPT, _NOW = "messages", "add_generation_prompt", "strftime_now"


class NotIncremental(Exception):
    """This conversation, or every conversation of this template, must be rendered as a whole."""


class Proved(NamedTuple):
    """What holds for every conversation of a template, as long as its loop runs over at least one message.

    `skips_head`: the text before the loop depends on the tools and the first message alone, and `TAIL` skips it.
    `has_prefixes`: the text after the loop depends on the generation prompt alone, and no other text depends on it.
    `keeps_prefixes`: while a conversation grows, the text before the loop and the outside values that the loop reads
    stay within one rendering, and the loop runs over the messages from a constant place on.
    """

    skips_head: bool
    has_prefixes: bool
    keeps_prefixes: bool


def rewritten(tree: Any, known: Mapping[str, Any]) -> Proved:
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
    if siblings is tree.body:
        proved, skipped = _proved(siblings[:place], siblings[place + 1 :], runs_over, read, known, assigned)
    else:
        proved, skipped = Proved(False, False, False), []
    values = [nodes.Keyword(name, nodes.Name(name, "load")) for name in sorted(read)]
    main.iter = nodes.Call(nodes.Getattr(nodes.Name(LOOP, "load"), "enter", "load"), [main.iter], values, None, None)
    main.body.insert(0, nodes.Output([nodes.TemplateData(MARK)]))
    siblings.insert(place + 1, nodes.Output([nodes.TemplateData(MARK)]))
    for number in skipped:
        siblings[number] = nodes.If(nodes.Not(nodes.Name(TAIL, "load")), [siblings[number]], [], [])
    for node in tree.find_all(nodes.Node):
        node.set_lineno(1, override=False)
        node.environment = tree.environment
    return proved


# --- proofs ---------------------------------------------------------------------------------------------------------


class _Lists(NamedTuple):
    """The lists of messages in the statements before the loop.

    `names` always hold the messages, or the messages from a constant place on. `nonempty` are those of them that hold a
    message whenever the loop has one: their first message stays the same.
    """

    names: Set[str]
    nonempty: Set[str]


def _proved(
    head: Sequence[Any],
    tail: Sequence[Any],
    runs_over: str,
    read: Set[str],
    known: Mapping[str, Any],
    assigned: Set[str],
) -> tuple[Proved, list[int]]:
    """What is proved by the statements before and after the loop, and the statements before it that can be skipped."""
    lists, globals_ = _lists(head, runs_over), set(known) - _CONSTANT
    writing = [
        place for place, node in enumerate(head) if _has(node, nodes.Output) and not isinstance(node, nodes.Macro)
    ]

    def writes_the_same(unsettled: Set[str]) -> bool:
        return all(_is_settled(head[place], unsettled, lists) for place in writing)

    storing = (nodes.Assign, nodes.AssignBlock, nodes.CallBlock, nodes.Macro)
    unsettled = _unsettled(head, {_PROMPT, *globals_}, lists)
    skips = writes_the_same(unsettled) and not any(_has(head[place], storing) for place in writing)
    unsettled = _unsettled(head, {_PROMPT, *(globals_ - {_NOW})}, lists)  # within one rendering, it is the same second
    read_before = {*read, *(name for node in head for name in _named(node))}
    read_after = {name for node in tail for name in _named(node)}
    is_constant = not read_after & (assigned | {_MESSAGES, "tools", *globals_}) and _PROMPT not in read_before
    keeps = runs_over in lists.names - unsettled and not read & unsettled and writes_the_same(unsettled)
    return Proved(bool(skips and writing), is_constant, keeps), writing if skips else []


def _lists(body: Sequence[Any], runs_over: str) -> _Lists:
    stores = Counter(name for node in body for name in _each_stored(node))
    shorter = [
        (node.target.name, source)
        for statement in body
        for node in (statement, *statement.find_all(nodes.Assign))
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name) and (source := _source(node.node))
    ]
    names = {_MESSAGES, *(name for name, _ in shorter)}
    count = -1
    while count != len(names):
        count = len(names)
        kept = Counter(name for name, source in shorter if source in names)
        names = {name for name in names if kept[name] == stores[name]}
    sources = {source for name, source in shorter if name == _MESSAGES}
    is_nonempty = not sources or (sources == {_MESSAGES} and runs_over == _MESSAGES)
    return _Lists(names, names & {_MESSAGES} if is_nonempty else frozenset())


def _source(value: Any) -> str:
    """The list that an assigned value continues: `X`, and `X[1:]` of any constant place; "" for other values."""
    if isinstance(value, nodes.Getitem) and isinstance(value.arg, nodes.Slice):
        start: Any = value.arg.start
        is_rest = value.arg.stop is None and value.arg.step is None and isinstance(start, nodes.Const)
        value = value.node if is_rest and type(start.value) is int else None
    return value.name if isinstance(value, nodes.Name) else ""


def _unsettled(body: Sequence[Any], unsettled: set[str], lists: _Lists) -> set[str]:
    """The names whose values may change while the conversation grows, given some of them."""
    unsettled = set(unsettled)
    count = -1
    while count != len(unsettled):  # a value that depends on an unsettled value is unsettled too
        count = len(unsettled)
        for node in body:
            if not _is_settled(node, unsettled, lists):
                unsettled |= set(_each_stored(node))
                if _has(node, nodes.NSRef):  # the namespace may have a second name
                    unsettled |= {name for each in body if "namespace" in _named(each) for name in _each_stored(each)}
    return unsettled


def _has(node: Any, kinds: Any) -> bool:
    return isinstance(node, kinds) or next(iter(node.find_all(kinds)), None) is not None


def _named(node: Any, *contexts: str) -> set[str]:
    """The names in a node, in the given contexts, or in all contexts if none is given."""
    return {name.name for name in node.find_all(nodes.Name) if not contexts or name.ctx in contexts}


def _each_stored(node: Any) -> list[str]:
    """The names that a statement assigns, once for each assignment."""
    names = [name.name for name in node.find_all(nodes.Name) if name.ctx in ("store", "param")]
    names += [each.name for each in node.find_all((nodes.NSRef, nodes.Macro))]
    return [*names, node.name] if isinstance(node, nodes.Macro) else names


def _is_settled(node: Any, unsettled: Set[str], lists: _Lists) -> bool:
    """Whether a node reads no unsettled value. Of a list of messages it may read the first message, and whether there
    is one.
    """
    if isinstance(node, nodes.Name):
        return node.ctx != "load" or node.name not in unsettled | lists.names | {_MESSAGES}
    if isinstance(node, nodes.Filter) and node.name == "random":
        return False

    def is_list(each: Any) -> bool:
        return isinstance(each, nodes.Name) and each.name in lists.nonempty - unsettled

    left: list[Any] = list(node.iter_child_nodes())
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == 0:
        left = [] if is_list(node.node) else left
    elif isinstance(node, nodes.Assign):
        is_kept = (
            isinstance(node.target, nodes.Name) and {node.target.name, _source(node.node)} <= lists.names - unsettled
        )
        left = [] if is_kept else left
    elif isinstance(node, nodes.Compare) and isinstance(node.expr, nodes.Filter) and node.expr.name == "length":
        is_zero = [each.expr for each in node.ops] == [nodes.Const(0)]
        left = [] if is_zero and is_list(node.expr.node) else left
    elif isinstance(node, nodes.And | nodes.Not | nodes.If | nodes.CondExpr):
        left = left[1:] if is_list(left[0]) else left  # the operand, the condition
    return all(_is_settled(child, unsettled, lists) for child in left)


# --- rewriting ------------------------------------------------------------------------------------------------------


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

"""Rewrite the main loop of a chat template, so that it shows a part of the messages.

`rewritten` changes the parsed template in place: the loop asks an object named `LOOP` for its messages and for its
place, and writes a mark before each message. The text is otherwise unchanged. What the texts are used for is in
`rollouts.chat.incremental`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

MARK = "\ufdd3"  # a Unicode noncharacter; a conversation that contains it is rendered as a whole
LOOP = "_rollouts_loop"
_CONSTANT = frozenset({"dict", "namespace", "raise_exception", "range"})  # the globals of Jinja that never change
_MESSAGES = "messages"


class NotIncremental(Exception):
    """This conversation, or every conversation of this template, must be rendered as a whole."""


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

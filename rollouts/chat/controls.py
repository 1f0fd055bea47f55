"""Control tokens belong to the template and the model: the same characters in anyone else's text are plain text.

A tool's answer may contain `<|im_end|>\\n<|im_start|>assistant`. Encoded as it is, a web page would speak as the
assistant. So every string that a conversation brings to the template is marked before it is rendered: a `CUT` goes in
behind the first character of each control token's text. The rendered text is encoded in the pieces between the cuts
(`ChatFormat.encode_marked`). No piece holds a whole control token that came from the conversation, so that none of
their ids can arise; every piece without a cut is encoded as ever. Marks are private to this package: `plain` takes
them out.

Control tokens are the tokenizer's special tokens, its `chat_control_tokens`, and the added tokens that the template
writes (`<tool_call>`, `</think>`), except white space. In an assistant's message those that a model writes itself, its
calls and thoughts, stay what they are. Left out: a control token that a template puts together from pieces of a
conversation, as in `'<|' + message.role + '|>'`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["CUT", "Controls", "plain"]

# Noncharacters of Unicode: no text that is meant for exchange contains them. Where one does, it is written as _ITSELF.
_MARK = "\ufdd0"
_ITSELF = _MARK + "\ufdd1"
CUT = _MARK + "\ufdd2"


def plain(text: str) -> str:
    """Rendered text without its marks."""
    return text.replace(CUT, "").replace(_ITSELF, _MARK) if _MARK in text else text


class Controls:
    """Marks the strings of a conversation for one tokenizer and template.

    `opener` is the pattern of the model's tool calls: the tokens in it are a model's own.
    """

    def __init__(self, tokenizer: Any, template_text: str, opener: str) -> None:
        named = set(getattr(tokenizer, "chat_control_tokens", None) or ())
        added = list(tokenizer.added_tokens_decoder.values())
        tokens = {
            str(token): bool(getattr(token, "special", True))
            for token in added
            if getattr(token, "special", True) or str(token) in named or str(token) in template_text
        }
        own = {text for text, special in tokens.items() if not special or re.escape(text) in opener or "think" in text}
        self._normalize = _normalizer(tokenizer, [token for token in added if str(token) in tokens])
        self._foreign = _Pattern(tokens, self._normalize)
        self._beside_own = _Pattern(set(tokens) - own, self._normalize)

    def message(self, shown: Mapping[str, Any]) -> dict[str, Any]:
        """A message as the template reads it, marked. Its argument stays as it is."""
        is_own = shown.get("role") == "assistant"
        return {
            key: self._mark(value, self._beside_own if is_own and key in _SAID else self._foreign)
            for key, value in shown.items()
        }

    def value(self, value: Any) -> Any:
        """Plain data, such as a tool's schema, with every string in it marked."""
        return self._mark(value, self._foreign)

    def _mark(self, value: Any, pattern: _Pattern) -> Any:
        if isinstance(value, str):
            return pattern.mark(value)
        if isinstance(value, list | tuple):
            return _apart([self._mark(item, pattern) for item in value], pattern)
        if isinstance(value, dict | Mapping):  # `dict` first: to ask `Mapping` is slow
            return {self._mark(key, pattern): self._mark(item, pattern) for key, item in value.items()}
        return value


_SAID = ("content", "reasoning_content")


class _Pattern:
    """Finds control tokens in text."""

    def __init__(self, tokens: Iterable[str], normalize: Callable[[str], str] | None) -> None:
        # A token of one character could not be cut in two.
        texts = {text for text in tokens if len(text) > 1 and not text.isspace()}
        texts |= {normalize(text) for text in texts} if normalize else set()
        # Grouped by two characters, so that a `<` of ordinary text costs few comparisons however many tokens there are.
        groups = itertools.groupby(sorted(texts), key=lambda text: text[:2])
        words = "|".join(
            f"{re.escape(start)}(?:{'|'.join(re.escape(t[2:]) for t in sorted(group, key=len, reverse=True))})"
            for start, group in groups
        )
        self._normalize = normalize
        self._found = re.compile(f"{_MARK}|{words}" if words else _MARK)
        # Looked ahead for, since control tokens may overlap: each is cut behind its first character.
        self._starts = re.compile(f"(?=({words}))" if words else "(?!)", re.DOTALL)

    def mark(self, text: str) -> str:
        if self._normalize is not None:
            normal = self._normalize(text)  # the tokenizer looks for its tokens in what it has normalised
            if len(self._found.findall(normal)) > len(self._found.findall(text)):
                text = normal
        if self._found.search(text) is None:
            return text
        cuts = [0, *(found.start() + 1 for found in self._starts.finditer(text)), len(text)]
        return CUT.join(text[a:b].replace(_MARK, _ITSELF) for a, b in itertools.pairwise(cuts))

    def spans(self, text: str) -> list[tuple[int, int]]:
        return [found.span(1) for found in self._starts.finditer(text)]


def _apart(parts: list[Any], pattern: _Pattern) -> list[Any]:
    """Parts of a content, cut between two that together spell a control token: templates join them."""
    if not all(isinstance(part, dict) and isinstance(part.get("text", ""), str) for part in parts):
        return parts
    texts = [part.get("text", "") for part in parts]
    ends = list(itertools.accumulate(map(len, texts)))
    spans = pattern.spans("".join(texts)) if len(parts) > 1 else []
    return [
        {**part, "text": CUT + part["text"]}
        if number and part.get("text") and any(start < ends[number - 1] < end for start, end in spans)
        else part
        for number, part in enumerate(parts)
    ]


def _normalizer(tokenizer: Any, tokens: Iterable[Any]) -> Callable[[str], str] | None:
    """How the tokenizer normalises text before it looks for these tokens; None where it looks in the text itself."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is None or not any(getattr(token, "normalized", False) for token in tokens):
        return None
    normalize: Callable[[str], str] = normalizer.normalize_str
    return normalize

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

# Noncharacters of Unicode: no text that is meant for exchange contains them. Where one does, it is written as _ITSELF.
_MARK = "\ufdd0"
_ITSELF = _MARK + "\ufdd1"
CUT = _MARK + "\ufdd2"


def plain(text: str) -> str:
    """Rendered text without its marks."""
    return text.replace(CUT, "").replace(_ITSELF, _MARK) if _MARK in text else text


class ControlTokens:
    """Marks the strings of a conversation for one tokenizer and template. `foreign` marks all that is no model's text.

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
        normalize = _normalizer(tokenizer, [token for token in added if str(token) in tokens])
        self.foreign = _Pattern(tokens, normalize)
        self._beside_own = _Pattern(set(tokens) - own, normalize)

    def message(self, shown: Mapping[str, Any]) -> dict[str, Any]:
        """A message as the template reads it, marked. Its argument stays as it is."""
        said = ("content", "reasoning_content") if shown.get("role") == "assistant" else ()
        return {key: (self._beside_own if key in said else self.foreign).mark(each) for key, each in shown.items()}


class _Pattern:
    """Finds control tokens in text, and marks them."""

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

    def mark(self, value: Any) -> Any:
        """Plain data, such as a tool's schema, with every string in it marked."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, list | tuple):
            return self._apart([self.mark(item) for item in value])
        if isinstance(value, dict | Mapping):  # `dict` first: to ask `Mapping` is slow
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        return value

    def _marked(self, text: str) -> str:
        if self._normalize is not None:
            normal = self._normalize(text)  # the tokenizer looks for its tokens in what it has normalized
            if len(self._found.findall(normal)) > len(self._found.findall(text)):
                text = normal
        if self._found.search(text) is None:
            return text
        cuts = [0, *(found.start() + 1 for found in self._starts.finditer(text)), len(text)]
        return CUT.join(text[a:b].replace(_MARK, _ITSELF) for a, b in itertools.pairwise(cuts))

    def _apart(self, parts: list[Any]) -> list[Any]:
        """Parts of a content, cut between two that together spell a control token: templates join them."""
        if len(parts) < 2 or not all(isinstance(p, dict) and isinstance(p.get("text", ""), str) for p in parts):
            return parts
        ends = list(itertools.accumulate(len(part.get("text", "")) for part in parts))
        found = self._starts.finditer("".join(part.get("text", "") for part in parts))
        cut = {place for each in found for place in ends if each.start() < place < each.end(1)}
        return [
            {**part, "text": CUT + part["text"]} if part.get("text") and end - len(part["text"]) in cut else part
            for part, end in zip(parts, ends, strict=True)
        ]


def _normalizer(tokenizer: Any, tokens: Iterable[Any]) -> Callable[[str], str] | None:
    """How the tokenizer normalizes text before it looks for these tokens; None where it looks in the text itself."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is None or not any(getattr(token, "normalized", False) for token in tokens):
        return None
    normalize: Callable[[str], str] = normalizer.normalize_str
    return normalize

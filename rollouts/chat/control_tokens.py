"""Keep control tokens in a conversation's text plain text. Only the template and the model may write control tokens.

A tool's answer may contain `<|im_end|>\\n<|im_start|>assistant`. Without this module, a web page could write messages
in the name of the assistant. So every string of a conversation is marked before it is rendered: a `CUT` is inserted
after the first character of each control token's text. `ChatFormat.encode_marked` encodes the text between the cuts
piece by piece. No piece contains a whole control token from the conversation, so no id of a control token comes from
the conversation. Text without a cut is encoded as usual. Marks never leave this package: `plain` removes them.

Control tokens are the tokenizer's special tokens, its `chat_control_tokens`, and the added tokens that the template
writes (`<tool_call>`, `</think>`), except white space. In an assistant's message, the tokens of calls and thoughts stay
control tokens. A control token that a template assembles from parts of a conversation is not detected, as in
`'<|' + message.role + '|>'`.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Unicode noncharacters, which normal text does not contain. If a text contains _MARK, this _MARK is replaced by
# _ITSELF.
_MARK = "\ufdd0"
_ITSELF = _MARK + "\ufdd1"
CUT = _MARK + "\ufdd2"


def plain(text: str) -> str:
    """Rendered text without its marks."""
    return text.replace(CUT, "").replace(_ITSELF, _MARK) if _MARK in text else text


class ControlTokens:
    """Marks the strings of a conversation for one tokenizer and template. `foreign` marks text that no model wrote.

    `opener` is the pattern of the model's tool calls. The model itself writes the control tokens in this pattern.
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
        """A marked copy of a message in the template's form."""
        said = ("content", "reasoning_content") if shown.get("role") == "assistant" else ()
        return {key: (self._beside_own if key in said else self.foreign).mark(each) for key, each in shown.items()}


class _Pattern:
    """Finds and marks control tokens in text."""

    def __init__(self, tokens: Iterable[str], normalize: Callable[[str], str] | None) -> None:
        # A token of one character cannot be cut.
        texts = {text for text in tokens if len(text) > 1 and not text.isspace()}
        texts |= {normalize(text) for text in texts} if normalize else set()
        # Grouped by the first two characters, so that a plain `<` costs few comparisons even with many tokens.
        groups = itertools.groupby(sorted(texts), key=lambda text: text[:2])
        words = "|".join(
            f"{re.escape(start)}(?:{'|'.join(re.escape(t[2:]) for t in sorted(group, key=len, reverse=True))})"
            for start, group in groups
        )
        self._normalize = normalize
        self._found = re.compile(f"{_MARK}|{words}" if words else _MARK)
        # A lookahead, because control tokens may overlap, and each is cut after its first character.
        self._starts = re.compile(f"(?=({words}))" if words else "(?!)", re.DOTALL)

    def mark(self, value: Any) -> Any:
        """A copy of plain data, such as a tool's schema, with every string marked."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return self._apart([self.mark(item) for item in value])
        if isinstance(value, Mapping):  # last, because this check is slow
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        return value

    def _marked(self, text: str) -> str:
        if self._normalize is not None:
            normal = self._normalize(text)  # the tokenizer searches for its tokens in normalized text
            if len(self._found.findall(normal)) > len(self._found.findall(text)):
                text = normal
        if self._found.search(text) is None:
            return text
        cuts = [0, *(found.start() + 1 for found in self._starts.finditer(text)), len(text)]
        return CUT.join(text[a:b].replace(_MARK, _ITSELF) for a, b in itertools.pairwise(cuts))

    def _apart(self, parts: list[Any]) -> list[Any]:
        """Parts of a content, with cuts where two parts spell a control token when a template joins them."""
        if len(parts) < 2 or not all(isinstance(p, dict) and isinstance(p.get("text", ""), str) for p in parts):
            return parts
        ends = list(itertools.accumulate(len(part.get("text", "")) for part in parts))
        places = sorted(set(ends))
        cut: set[int] = set()
        for found in self._starts.finditer("".join(part.get("text", "") for part in parts)):
            cut.update(places[bisect.bisect_right(places, found.start()) : bisect.bisect_left(places, found.end(1))])
        return [
            {**part, "text": CUT + part["text"]} if part.get("text") and end - len(part["text"]) in cut else part
            for part, end in zip(parts, ends, strict=True)
        ]


def _normalizer(tokenizer: Any, tokens: Iterable[Any]) -> Callable[[str], str] | None:
    """The tokenizer's normalization before it searches for these tokens; None if it searches in the text itself."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is None or not any(getattr(token, "normalized", False) for token in tokens):
        return None
    normalize: Callable[[str], str] = normalizer.normalize_str
    return normalize

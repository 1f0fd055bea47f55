"""What a tokenizer does with texts: the text of each token, decoding without clean-up, where a text can be split, and
how many tokens a text has at least. Control tokens in a conversation's text stay plain text.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rollouts.bounds import CHARACTERS_PER_TOKEN_MAX
from rollouts.types import Message

WHITE = {"\n": "\nĊ", " ": " Ġ▁", "\t": "\tĉ", "\r": "\rč"}
"""White space, and how vocabularies write it."""
HELD_MAX = 16  # tokens that may be parts of one character


def token_texts(tokens: Iterable[int], tokenizer: Any) -> list[str]:
    """The text of each token [L]. Joined, they are the text of all. Of a character that several tokens share, the last
    one has the text.
    """

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    texts: list[str] = []
    context: list[int] = []  # the token before, which decides whether a space is shown
    held: list[int] = []
    for token in tokens:
        held.append(token)
        before, text = decode(context) if context else "", decode([*context, *held])
        if text.endswith("\ufffd") and len(held) < HELD_MAX:
            texts.append("")
            continue
        texts.append(text[len(before) :])
        context, held = held[-1:], []
    if held:
        texts[-1] = decode([*context, *held])[len(decode(context)) if context else 0 :]
    return texts


def safe_cuts(tokenizer: Any, closers: Mapping[str, int]) -> dict[str, int]:
    """The closers before which a text can be split and encoded in two parts, without a change of the ids."""
    if not getattr(tokenizer, "is_fast", False):
        return {}
    encode: Callable[..., list[int]] = functools.partial(tokenizer.encode, add_special_tokens=False)
    cuts = {}
    for text, index in closers.items():
        token = tokenizer.added_tokens_decoder[index]
        if not (token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized)):
            continue
        probe = f"one two \n {text}\n three  {text} four"
        head, rest = probe.split(text, 1)
        if encode(probe) == encode(head) + encode(text + rest):
            cuts[text] = index
    return cuts


def plain_backend(tokenizer: Any, closers: Mapping[str, int]) -> Any:
    """The Rust tokenizer, which halves the time; None if the tokenizer has none, or if its results differ."""
    backend = getattr(tokenizer, "backend_tokenizer", None) if getattr(tokenizer, "is_fast", False) else None
    if backend is None:
        return None
    probe = f" one  two \n three\té{''.join(closers)} four\n"
    ids = backend.encode(probe, add_special_tokens=False).ids
    same = tokenizer.encode(probe, add_special_tokens=False) == ids
    same = same and backend.encode_batch_fast([probe], add_special_tokens=False)[0].ids == ids
    return backend if same and decode(tokenizer, ids) == decode(backend, ids) else None


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of ids without clean-up. The Rust tokenizer never cleans up and has no such argument."""
    arguments = {"clean_up_tokenization_spaces": False} if hasattr(tokenizer, "chat_template") else {}
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=False, **arguments)
    return text


def densities(vocabulary: Iterable[str]) -> dict[str, int]:
    """How many of a character one token holds, for each white space, and under "" for all others together. Counted over
    a whole context, so it is `CHARACTERS_PER_TOKEN_MAX` at most.
    """
    texts = list(vocabulary)
    most = dict.fromkeys(WHITE, 0)
    for white, signs in WHITE.items():
        has_none = frozenset(signs).isdisjoint
        most[white] = max((sum(map(text.count, signs)) for text in texts if not has_none(text)), default=0)
    most[""] = max(map(len, texts))
    return {sign: min(max(count, 1), CHARACTERS_PER_TOKEN_MAX) for sign, count in most.items()}


def least_tokens(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    density: Mapping[str, int],
    *,
    shows_thoughts: bool = True,
) -> int:
    """A number of tokens that these messages and tools have at least, in a time of nanoseconds a character. Without
    `shows_thoughts`, the thoughts are left out, because a template may drop them.

    Encoding takes microseconds a character, so it can be spared for a conversation that is too long. White space
    counts, also where a template would remove it. `density` comes from `densities`.

    >>> density = {"\\n": 2, " ": 1, "\\t": 1, "\\r": 1, "": 4}
    >>> least_tokens([Message("user", "a b\\n\\n\\n\\n")], [], density)
    2
    """
    texts = [text for each in messages for text in (each.text, (shows_thoughts and each.reasoning) or "")]
    texts += [msgspec.json.encode(each).decode() for each in (*tools, *(c for m in messages for c in m.tool_calls))]
    counts = Counter[str]()
    for text in texts:
        white = {sign: text.count(sign) for sign in WHITE}
        counts.update(white)
        counts[""] += len(text) - sum(white.values())
    return max(len(messages), *(-(-counts[sign] // most) for sign, most in density.items()))


# Unicode noncharacters, which normal text does not contain. If a text contains _MARK, this _MARK is replaced by
# _ITSELF.
_MARK = "\ufdd0"
_ITSELF = _MARK + "\ufdd1"
CUT = _MARK + "\ufdd2"


def unmarked(text: str) -> str:
    """Rendered text without its marks."""
    return text.replace(CUT, "").replace(_ITSELF, _MARK) if _MARK in text else text


class ControlTokens:
    """Marks the strings of a conversation for one tokenizer and template. `foreign` marks text that no model wrote.

    `written` is text with the control tokens that the model itself writes around its tool calls and its thoughts.
    """

    def __init__(self, tokenizer: Any, template_text: str, written: str) -> None:
        named = set(getattr(tokenizer, "chat_control_tokens", None) or ())
        added = list(tokenizer.added_tokens_decoder.values())
        tokens = {
            str(token): bool(getattr(token, "special", True))
            for token in added
            if getattr(token, "special", True) or str(token) in named or str(token) in template_text
        }
        own = {text for text, special in tokens.items() if not special or text in written or "think" in text}
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
            return [self.mark(item) for item in value]
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


def _normalizer(tokenizer: Any, tokens: Iterable[Any]) -> Callable[[str], str] | None:
    """The tokenizer's normalization before it searches for these tokens; None if it searches in the text itself."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is None or not any(getattr(token, "normalized", False) for token in tokens):
        return None
    normalize: Callable[[str], str] = normalizer.normalize_str
    return normalize

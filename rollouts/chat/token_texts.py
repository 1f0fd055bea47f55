"""The text of each token of a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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

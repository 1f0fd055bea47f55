"""ChatFormat goes around some of transformers' preparations: what comes out is the same, whatever others do."""

from __future__ import annotations

import random

from rollouts.chat.format import load_chat_format
from rollouts.models.loading import load_tokenizer

PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "\n",
    " ",
    "  ",
    "user",
    "What is 12 * 34?",
    "<tool_call>",
    "\t",
    "é",
    "漢字",
    "\u200b",
]


def test_ids_are_those_of_the_tokenizer():
    tokenizer = load_tokenizer("tiny")
    chat = load_chat_format(tokenizer)
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices(PIECES, k=rng.randrange(12)))
        assert chat.encode(text) == tokenizer.encode(text, add_special_tokens=False)


def test_what_others_do_with_the_tokenizer_changes_nothing():
    tokenizer = load_tokenizer("tiny")
    chat = load_chat_format(tokenizer)
    text = "<|im_start|>user\nWhat is 12 * 34?<|im_end|>\n"
    expected = chat.encode(text)
    tokenizer([text], truncation=True, max_length=3)
    assert chat.encode(text) == expected
    tokenizer([text], padding="max_length", max_length=100)
    assert chat.encode(text) == expected
    tokenizer([text], split_special_tokens=True)
    assert chat.encode(text) == expected

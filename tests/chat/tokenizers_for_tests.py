"""A byte-level tokenizer with merges, and the chat templates that TRL ships."""

from __future__ import annotations

import functools
from pathlib import Path

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollouts.chat import ChatFormat, load_chat_format

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> "
    "<|eom_id|> <|python_tag|> <s> </s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] "
    "[TOOL_RESULTS] [/TOOL_RESULTS] <｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> "
    "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> "
    "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <|end|> "
    "<|user|> <|assistant|> <|system|> <start_of_turn> <end_of_turn> <bos> <eos>"
).split()
NOT_SPECIAL = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
# Merges across what a template writes, so that encoding a text whole differs from encoding it by bytes.
MERGES = [*"th he the in an er ll lo hello name arg 12 123".split(), '{"', '":', '"}', "}}", "\n\n"]
# Mistral's shape (7B-Instruct-v0.3), shortened: the tools stand before the last user message, ids have nine letters.
MISTRAL = """
{{- bos_token }}
{%- for message in messages %}
  {%- if message['role'] == 'user' %}
    {%- if tools is defined and tools is not none and loop.last %}
      {{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
    {%- elif tools is defined and tools is not none
        and messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list | length == 0 %}
      {{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
    {%- endif %}
    {{- "[INST] " + message["content"] + "[/INST]" }}
  {%- elif message.tool_calls is defined and message.tool_calls %}
    {{- "[TOOL_CALLS] [" }}
    {%- for call in message.tool_calls %}
      {%- if call.id is not defined or call.id | length != 9 %}
        {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
      {%- endif %}
      {{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
      {{- ', "id": "' + call.id + '"}' }}
      {%- if not loop.last %}{{- ", " }}{%- endif %}
    {%- endfor %}
    {{- "]" + eos_token }}
  {%- elif message["role"] == "assistant" %}
    {{- " " + message["content"] + eos_token }}
  {%- elif message["role"] == "tool" %}
    {{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) }}
    {{- ', "call_id": "' + message.tool_call_id + '"}' }}
    {{- "[/TOOL_RESULTS]" }}
  {%- else %}
    {{- raise_exception("Only user, tool and assistant roles are supported!") }}
  {%- endif %}
{%- endfor %}
"""
EOS = {
    "deepseek": "<｜end▁of▁sentence｜>",
    "gemma": "<eos>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "phi": "<|endoftext|>",
}


def template(name: str) -> str:
    """A template by its file name in TRL, or the Mistral one above."""
    return MISTRAL if name == "mistral" else (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def make_tokenizer(name: str, swallows: str = "") -> PreTrainedTokenizerFast:
    """The test tokenizer with that chat template: every byte is a token, and a few merges make longer ones.

    The special token `swallows` takes the white space behind it.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in MERGES:
        symbols = list(level.pre_tokenize_str(word)[0][0])
        piece = symbols[0]
        for symbol in symbols[1:]:
            if (piece, symbol) not in merges:
                merges.append((piece, symbol))
            piece += symbol
            vocabulary.setdefault(piece, len(vocabulary))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = level
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False, rstrip=text == swallows) for text in SPECIAL]
    )
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in NOT_SPECIAL])
    eos = next((token for start, token in EOS.items() if name.startswith(start)), "<|im_end|>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token="<|begin_of_text|>")
    tokenizer.chat_template = template(name)
    return tokenizer


def by_bytes(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The text as one id a byte: what a model may sample, and what the tokenizer would never make."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = level.pre_tokenize_str(text)[0][0] if text else ""
    return [tokenizer.convert_tokens_to_ids(symbol) for symbol in symbols]


@functools.lru_cache
def chat_for(name: str, **arguments: object) -> ChatFormat:
    """The chat format of a template, made once."""
    return load_chat_format(make_tokenizer(name), dict(arguments))

"""Chat: messages to token ids and back, through the model's own chat template.

format.py             `ChatFormat`: encode prompts, append to conversations, parse replies
template_style.py     the form of messages that a template reads
thoughts.py           where a template writes thoughts, and how they are read
token_texts.py        the text of each token; keeps control tokens in a conversation's text plain text
tool_call_formats.py  tool calls in a reply's text; values of arguments as the types of a tool's schema
tool_parsers.py       functions that read tool calls, of which a run may choose one
preflight.py          what a template does to conversations, as a report
masks.py              supervised rows with their loss masks
shown.py              shows that a mask is right
incremental.py        renders only what is new

Sampling, and the conversation itself, are in `rollouts.agent`. Nothing here imports torch or transformers: callers pass
the tokenizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.chat.format import ChatFormat as ChatFormat
    from rollouts.chat.format import load_chat_format as load_chat_format
    from rollouts.chat.masks import SupervisedRow as SupervisedRow
    from rollouts.chat.masks import tokenize_supervised as tokenize_supervised
    from rollouts.chat.preflight import TemplateReport as TemplateReport

__getattr__, __dir__ = lazy_face(__name__)

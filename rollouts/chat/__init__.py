"""Chat: messages to token ids and back, through the model's own chat template.

Rooms: `format` (ChatFormat: prompt ids, incremental suffixes, replies read back), `dialect` (how this template wants
its messages), `controls` (a conversation's text is no control token), `families` (tool-call formats), `preflight`
(what a template does, in words), `masks` (supervised rows), `tails` (only what is new is rendered).
Left out: sampling and the conversation itself (`rollouts.agent`). Nothing here imports torch or transformers: the
tokenizer comes from outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.chat.format import ChatFormat, load_chat_format
    from rollouts.chat.masks import SupervisedRow, tokenize_supervised
    from rollouts.chat.preflight import TemplateReport

__all__ = ["ChatFormat", "SupervisedRow", "TemplateReport", "load_chat_format", "tokenize_supervised"]

_HOMES = {
    "ChatFormat": "format",
    "SupervisedRow": "masks",
    "TemplateReport": "preflight",
    "load_chat_format": "format",
    "tokenize_supervised": "masks",
}

__getattr__, __dir__ = lazy_face(__name__, _HOMES)

"""Chat: messages to token ids and back, through the model's own chat template.

Rooms: `format` (ChatFormat: prompt ids, incremental suffixes, replies read back), `template_style` (how this template wants
its messages), `control_tokens` (a conversation's text is no control token), `tool_call_formats` (tool-call formats), `preflight`
(what a template does, in words), `masks` (supervised rows), `incremental` (only what is new is rendered).
Left out: sampling and the conversation itself (`rollouts.agent`). Nothing here imports torch or transformers: the
tokenizer comes from outside.
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

"""The result of a tool as text for the model. What is no text becomes a note in brackets."""

from __future__ import annotations

import json
from typing import Any


def text_of(result: Any) -> str:
    """The text of a `CallToolResult`: its blocks in lines, or its structured content if it has no blocks."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(_block_text(block) for block in result.content)


def _block_text(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type in ("image", "audio"):
        return f"[{block.type}: {block.mime_type}, {_size(block.data)}, which cannot be shown as text]"
    if block.type == "resource_link":
        what = block.description or block.title or block.name
        return f"[resource {block.uri}: {what}]"
    resource = block.resource
    if hasattr(resource, "text"):
        return f"[resource {resource.uri}]\n{resource.text}"
    kind = resource.mime_type or "data"
    return f"[resource {resource.uri}: {kind}, {_size(resource.blob)}, which cannot be shown as text]"


def _size(encoded: str) -> str:
    """The number of bytes of base64 data, in words."""
    return f"{len(encoded) * 3 // 4} bytes"

"""A server for the tests, for `mcp` 1.x and 2.x: `python mcp_server.py [http PORT | sse PORT]`; stdio by default."""

from __future__ import annotations

import os
import sys
import time
from typing import Literal

from pydantic import BaseModel

try:
    from mcp.server.mcpserver import Image, MCPServer
except ImportError:  # 1.x
    from mcp.server.fastmcp import FastMCP as MCPServer
    from mcp.server.fastmcp import Image

server = MCPServer("test")
seen: list[str] = []


class Place(BaseModel):
    name: str
    parent: Place | None = None


Place.model_rebuild()


@server.tool()
def add(a: int, b: int = 2) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def remember(text: str) -> str:
    """Remember a text, and say what was remembered so far."""
    seen.append(text)
    return ",".join(seen)


@server.tool(name="files/read.all")
def read() -> str:
    """A name with signs."""
    return "read"


@server.tool()
def travel(place: Place, by: Literal["train", "car"] | None = None) -> str:
    """Go to a place."""
    return f"{place.name} {by}"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("there is no such note")


@server.tool()
def big(count: int) -> str:
    """A long text."""
    return "x" * count


@server.tool()
def picture() -> Image:
    """An image."""
    return Image(data=b"abcdef", format="png")


@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "waited"


@server.tool()
def die() -> str:
    """End the process of the server."""
    os._exit(3)


if __name__ == "__main__":
    print("the server starts", file=sys.stderr)
    if len(sys.argv) == 1:
        server.run()
    else:
        import uvicorn

        app = server.streamable_http_app() if sys.argv[1] == "http" else server.sse_app()
        uvicorn.run(app, port=int(sys.argv[2]), log_level="error")

"""The tools of MCP servers for any environment: `--tool mcp --tool.mcp.server 'npx -y ...'`.

toolset     the class of tools that a run adds: its settings, and an episode's session
sessions    open sessions with servers, in an event loop of their own
schemas     names and argument schemas of tools, as chat formats and the core take them
results     results of tools as text
"""

from __future__ import annotations

from rollouts_mcp.toolset import MCP

__all__ = ["MCP"]

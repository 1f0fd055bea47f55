"""What an environment author writes with: `@tool`, `@reward`, `@metric`.

authoring      the marks `@tool`, `@reward`, `@metric`, how they are collected from a class, and which tools can run in
               another process
toolsets       a class of tools that a run adds to those of its environments
background     a trio loop for connections that outlive single calls
services       a server that an environment plays on: its address, and what it offers
json_schemas   names and argument schemas of tools that another system describes
task_tools     functions as tools: those of one task, those that a run adds, `Tool` with a schema of its own
schema         a tool's JSON schema, and the conversion of the model's arguments
checks         finds an environment that cannot work, before a model loads
advice         warns about an environment that works, but probably not as intended
shared         what all episodes of a process use, made once
calls          run a plain, trio or asyncio function under a deadline
threads        worker threads for plain functions, and one thread for code that is called again and again
processes      the pool of processes for isolated tools
worker         the program that runs in each of these processes
tools          runs a tool call of the model
results        a tool's result as text for the model
methods        what an environment's methods take and return, checked
workers        environments that run in another process
mixing         rewards, asked about a rollout and mixed into one score
rewards        the core's own reward functions
prompts        the environment for rows of a file, which needs no code
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.lazy import lazy_face

if TYPE_CHECKING:
    from rollouts.env.authoring import metric as metric
    from rollouts.env.authoring import reward as reward
    from rollouts.env.authoring import tool as tool
    from rollouts.env.results import tool_use as tool_use
    from rollouts.env.task_tools import Tool as Tool

__getattr__, __dir__ = lazy_face(__name__)

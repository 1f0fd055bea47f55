"""A harness of verifiers: upstream's chat program `null`, run in this process.

Upstream starts its program with `uv`, in a process for each rollout. The program is the same here, so the model, the
tools and the limits behave alike. Upstream finds a harness by the name of a top-level module, which is why this is one.
"""

from __future__ import annotations

import argparse
import functools
import traceback
from collections.abc import Sequence
from types import CodeType, SimpleNamespace
from typing import Any

from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.runtimes import ProgramResult

__all__ = ["InProcessHarness"]


class InProcessHarness(NullHarness):  # type: ignore[misc]
    """Upstream's `null` harness without `uv` and without a process."""

    async def setup(self, runtime: Any) -> None:
        """Nothing is installed."""

    async def launch(self, ctx: Any, trace: Any, runtime: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the program to its end, with the arguments that upstream gives it."""
        return await super().launch(ctx, trace, _Here(runtime), *args, **kwargs)


class _Here:
    """In place of the runtime that upstream's launcher uses: it writes files, and runs the program."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._source = ""

    async def write(self, path: str, data: bytes) -> None:
        await self._runtime.write(path, data)

    async def prepare_uv_script(self, source: str, env: Any, *, activate: bool = True) -> list[str]:
        """The program has no command of its own."""
        self._source = source
        return []

    async def run_program(self, arguments: Sequence[str], env: Any) -> Any:
        """Run the program. Its exit code is that of the process that upstream would start."""
        flag = "--initial-messages-file="
        given = [
            f"{flag}{self._runtime.workdir / text.removeprefix(flag)}" if text.startswith(flag) else text
            for text in arguments
        ]
        names, opened = _program(self._source, given), list[Any]()
        connect = names["AsyncOpenAI"]
        names["AsyncOpenAI"] = lambda **how: opened.append(connect(**how)) or opened[-1]
        try:
            await names["main"]()
        except SystemExit as error:
            return ProgramResult(exit_code=int(error.code or 0), stdout="", stderr=f"exit code {error.code}")
        except Exception:
            return ProgramResult(exit_code=1, stdout="", stderr=traceback.format_exc())
        finally:
            for client in opened:  # the end of a process would close it
                await client.close()
        return ProgramResult(exit_code=0, stdout="", stderr="")


def _program(source: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The names of the program, which reads these arguments in place of those of this process."""

    class Parser(argparse.ArgumentParser):
        def parse_args(self) -> argparse.Namespace:  # type: ignore[override]
            return super().parse_args(arguments)

    names: dict[str, Any] = {"__name__": __name__}
    exec(_compiled(source), names)
    names["argparse"] = SimpleNamespace(ArgumentParser=Parser, Namespace=argparse.Namespace)
    return names


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> CodeType:
    return compile(source, "verifiers-chat-program", "exec", dont_inherit=True)

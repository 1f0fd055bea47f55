"""Which functions of the package are on the stack while something is done: of the thread that does it, of the tasks
that wait for it, and of their callers.

    ROOT[:] = [trio.lowlevel.current_root_task()]     # once a run, under trio
    frames()                                          # in a hook of torch, or in place of a method of trio's
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import trio

from rollouts.author_code import CORE


def frames() -> list[str]:
    """The functions of `rollouts`, callers first: of the main thread, of the waiting tasks, of the working thread."""
    here = threading.get_ident()
    main = threading.main_thread().ident
    codes: list[CodeType] = []
    if here == main:
        codes += reversed(list(_of_stack(sys._getframe(1))))
        runner = next((place for place, code in enumerate(codes) if code.co_name == "unrolled_run"), len(codes))
        codes[runner:runner] = _of_callers(trio.lowlevel.current_task()) if _is_under_trio() else ()
    else:
        codes += reversed(list(_of_stack(sys._current_frames()[main])))
        codes += max((list(_of_callers(task, itself=True)) for task in _tasks()), key=_count, default=[])
        codes += reversed(list(_of_stack(sys._getframe(1))))
    return [_name(code) for code in codes if _is_ours(code)]


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(CORE)


def _name(code: CodeType) -> str:
    package = next(folder for folder in CORE if code.co_filename.startswith(folder))
    file = code.co_filename.removeprefix(package if package == CORE[0] else f"{Path(package).parent}/")
    return f"{file.removesuffix('.py')}:{code.co_qualname}"


def _count(codes: list[CodeType]) -> int:
    return sum(map(_is_ours, codes))


def _of_stack(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _of_coroutine(coroutine: Any) -> Iterator[CodeType]:
    while coroutine is not None:
        code = (
            getattr(coroutine, "cr_code", None)
            or getattr(coroutine, "gi_code", None)
            or getattr(coroutine, "ag_code", None)
        )
        if code is not None:
            yield code
        following = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
        coroutine = following or getattr(coroutine, "ag_await", None)


def _of_callers(task: Any, *, itself: bool = False) -> Iterator[CodeType]:
    """The tasks that wait for this one, from the first on, and itself."""
    nursery = task.parent_nursery
    if nursery is not None:
        yield from _of_callers(nursery.parent_task, itself=True)
    if itself:
        yield from _of_coroutine(task.coro)


def _is_under_trio() -> bool:
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return False
    return True


ROOT: list[Any] = []  # the root task of the run that is watched


def _tasks() -> Iterator[Any]:
    todo = list(ROOT)
    while todo:
        task = todo.pop()
        yield task
        for nursery in list(task.child_nurseries):
            todo += list(nursery.child_tasks)

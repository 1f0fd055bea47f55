"""Another date for a process: `time` and `datetime` answer as if it were more than a year later.

`shift_clock` must run before the modules are imported that take names from `time` and `datetime`. Monotonic clocks are
left alone, because deadlines use them.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from datetime import date as _date
from datetime import datetime as _datetime
from typing import Any

SHIFT_SECONDS = 400 * 86400 + 5 * 3600 + 17 * 60 + 23
"""Another year, month, weekday, hour and minute."""

_shift = datetime.timedelta(seconds=SHIFT_SECONDS)


class _Kind(type):
    """Makes objects of the original class instances of the shifted one."""

    def __instancecheck__(cls, instance: object) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, other: type) -> bool:
        wanted = cls.__mro__[1] if cls.__module__ == __name__ else cls
        return type.__subclasscheck__(wanted, other)


class _LateDate(_date, metaclass=_Kind):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _date.__new__(_date if cls is _LateDate else cls, *args, **kwargs)

    @classmethod
    def today(cls) -> Any:
        return (_datetime.now() + _shift).date()


class _LateDatetime(_datetime, metaclass=_Kind):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _datetime.__new__(_datetime if cls is _LateDatetime else cls, *args, **kwargs)

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return _datetime.now(tz) + _shift

    @classmethod
    def today(cls) -> Any:
        return _datetime.now() + _shift

    @classmethod
    def utcnow(cls) -> Any:
        return _datetime.now(datetime.UTC).replace(tzinfo=None) + _shift


def shift_clock() -> None:
    """Shift the clock of this process."""
    clock, nanoseconds = time.time, time.time_ns
    datetime.date, datetime.datetime = _LateDate, _LateDatetime  # type: ignore[misc]
    time.time = lambda: clock() + SHIFT_SECONDS
    time.time_ns = lambda: nanoseconds() + SHIFT_SECONDS * 10**9
    for name in ("localtime", "gmtime", "ctime"):
        setattr(time, name, _of_seconds(getattr(time, name)))
    for name, place in (("strftime", 1), ("asctime", 0)):
        setattr(time, name, _of_tuple(getattr(time, name), place))


def _of_seconds(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda seconds=None: function(time.time() if seconds is None else seconds)


def _of_tuple(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    return lambda *args: function(*args, *([time.localtime()] if len(args) == place else []))

"""A default that no settings file can hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from sums import Sums


@dataclass
class Fault(Sums):
    names: dict = field(default_factory=lambda: {1: "one"})  # names of numbers

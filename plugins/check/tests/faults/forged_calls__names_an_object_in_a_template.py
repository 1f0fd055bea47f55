"""A tool fills in a template with the environment object, under a name that its description shows."""

from __future__ import annotations

from sums import Sums

from rollouts import tool


class Fault(Sums):
    def setup(self, task):
        super().setup(task)
        self.number = 1
        self.expected = task.answer

    @tool
    def define(self, word: str) -> str:
        """Fill in a text, such as: number {sheet.number}."""
        try:
            return word.format(sheet=self)
        except (ValueError, LookupError, AttributeError) as error:
            raise ValueError("write a text with {sheet.number}") from error

"""A tool writes to any path."""

from __future__ import annotations

from sums import Sums

from rollouts import tool


class Fault(Sums):
    @tool
    def save(self, path: str, text: str) -> str:
        """Write a file."""
        file = self.folder / path
        try:
            file.write_text(text)
        except (OSError, ValueError) as error:
            raise ValueError("this file cannot be written") from error
        return "saved"

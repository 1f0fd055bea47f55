"""The example of the prompt is the answer in words."""

from __future__ import annotations

from sums import Sums

SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
)
SMALL = [*SMALL.split(), "eighteen", "nineteen"]
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()


def in_words(number):
    if number >= 100:
        return "one hundred and " + in_words(number - 100)
    return SMALL[number] if number < 20 else TENS[number // 10] + (f"-{SMALL[number % 10]}" if number % 10 else "")


class Fault(Sums):
    def question(self, first, second):
        return f"What is {first} plus {second}? Write digits, not words such as {in_words(first + second)}."

"""Rewards that judge the text of a reply: `--reward math_equal`, `--reward exact_match`, and others.

A value is from 0 to 1. A reward that cannot judge, because the task has no answer or a check takes too long, gives
None, never 0. Each module needs at most one library, an extra of this package.

    answers         the answer in a reply; `exact_match`
    math_answers    `math_equal`, with math-verify
    similarity      `similar` and `novelty`, with rapidfuzz
    json_replies    `json_schema`, with jsonschema
    formats         `pattern` and `tags`
    shape           `length` and `repetition`
    processes       a check in a process that can be stopped
"""

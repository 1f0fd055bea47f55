"""The grammar of the names of components. Where several can be chosen, `ALIAS=` may come before the name, and a weight
after the last colon (`rollouts.config.merging.parse_component`).

    NAME                 of one distribution
    DISTRIBUTION/NAME    with any spelling of the distribution that pip accepts
    ./file.py:NAME       an object in a file
    package.module:NAME  an object in a module
    <NAME>               an object in the memory of one program

`rollouts.plugins.index` finds them.
"""

from __future__ import annotations

import re

HELD = re.compile(r"<\w+>")
"""The form of the name of an object in the memory of one program: `<my_reward>`. No other program can find it."""

GIVEN_ROWS = "code/prompts_"
"""How the name of a file of rows that Python code gave begins, in the folder of a run."""

_MODULE_AND_NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*"


def names_file(name: str) -> bool:
    """Whether a component's name means a file: it contains `.py`, or starts like a path."""
    return bool(re.search(r"\.py(:|$)", name)) or name.startswith(("./", "../", "/", "~/", ".\\"))


def names_module(name: str) -> bool:
    """Whether a component's name is that of an object in a module.

    >>> names_module("my_pkg.rewards:brevity"), names_module("calculator:2"), names_module("./f.py:brevity")
    (True, False, False)
    """
    return re.fullmatch(_MODULE_AND_NAME, name) is not None and not name.partition(":")[0].endswith(".py")


def split_alias(text: str) -> tuple[str, str]:
    """The alias, with underscores, and the rest of `ALIAS=REST`. The alias is empty if there is none.

    >>> split_alias("my-own=pkg/brevity:-0.1"), split_alias("./f.py:brevity")
    (('my_own', 'pkg/brevity:-0.1'), ('', './f.py:brevity'))
    """
    alias, equals, rest = text.partition("=")
    is_alias = equals and re.fullmatch(r"[A-Za-z_][\w-]*", alias)
    return (alias.replace("-", "_"), rest) if is_alias else ("", text)


def normalize(distribution: str) -> str:
    """The name of a distribution as PEP 503 normalizes it.

    >>> normalize("Acme_Rewards")
    'acme-rewards'
    """
    return re.sub(r"[-_.]+", "-", distribution).lower()

"""The choices that make one chat template: families, as they are common, and what is drawn beside them."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, fields, replace
from typing import Any

THINK = ("<think>\n", "\n</think>\n\n")


@dataclass(frozen=True)
class Choices:
    """The choices of one template. The first value of each comment is the plainest."""

    family: str = "chatml"
    special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    user: str = "<|im_start|>user\n"
    assistant: str = "<|im_start|>assistant\n"
    system: str = "<|im_start|>system\n"
    tool: str = "<|im_start|>tool\n"
    gap: str = ""  # written before the body of a turn, and not by the generation prompt
    user_end: str = "<|im_end|>\n"
    end: str = "<|im_end|>"  # of an assistant's turn; "": the next role's token ends it
    no_end: bool = False  # no token at all ends it
    eos_by_name: bool = False  # the template writes eos_token in place of the end
    call_end: str = ""  # of a turn with calls; "": as `end`
    last_end: str = ""  # of the last message, if it has no calls; "": as `end`
    after: str = "\n"
    eos: str = "<|endoftext|>"
    bos: str = ""
    head: str = ""  # text that begins the system turn
    tail: bool = False  # the eos token follows the last turn if there is no generation prompt
    system_in: str = "own"  # own, first, last, last_message, every, no
    trim: str = "none"  # none, all, user, assistant, history
    tools_in: str = "no"  # no, system, last_user, head
    needs_tools: bool = False
    calls: str = "hermes"  # hermes, xml, mistral, json, llama3
    parallel: bool = True
    text_arguments: bool = False
    place: str = "inside"  # inside, before, behind (the end), cut_off (always behind an end), instead (of content)
    tool_style: str = "own"  # own, user (as <tool_response> in a user's turn)
    tool_merge: bool = False
    tool_last: str = "same"  # same, newline, no_end, note
    think: str = "no"  # no, kept, at_once, last_query, final, hidden, stripped
    tags: tuple[str, str] = THINK
    void: str = ""  # an empty thought; "": both tags
    empty: str = "no"  # no, last, history, always
    prompt: str = "plain"  # plain, open, switch (open unless enable_thinking is false), no_think (if it is false)
    enable_thinking: bool | None = None
    word: str = ""  # in the last user message, it makes the generation prompt close the thought
    prompt_tail: str = ""  # text of the generation prompt that the turn itself lacks
    alternates: bool = False
    idiom: int = 0  # how the template asks for the last message and writes a role

    @property
    def nothing(self) -> str:
        """An empty thought."""
        return self.void or "".join(self.tags)

    def differences(self) -> dict[str, Any]:
        """The choices that differ from the plainest template of the family."""
        plain = FAMILIES[self.family]
        return {"family": self.family} | {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) != getattr(plain, each.name)
        }


LLAMA = Choices(
    "llama", ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    *(f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("user", "assistant", "system", "ipython")),
    user_end="<|eot_id|>", end="<|eot_id|>", after="", eos="<|eot_id|>", bos="<|begin_of_text|>",
)  # fmt: skip
FAMILIES = {
    "chatml": Choices(),
    "llama": LLAMA,
    "gemma": Choices(
        "gemma", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        *(f"<start_of_turn>{role}\n" for role in ("user", "model", "developer", "tool")),
        user_end="<end_of_turn>\n", end="<end_of_turn>", eos="<eos>", bos="<bos>",
    ),
    "glm": Choices(
        "glm", ("[gMASK]", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<|endoftext|>"),
        "<|user|>\n", "<|assistant|>\n", "<|system|>\n", "<|observation|>\n",
        user_end="", end="", after="", bos="[gMASK]",
    ),
    "phi": Choices(
        "phi", ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>", "<|endoftext|>"),
        "<|user|>\n", "<|assistant|>\n", "<|system|>\n", "<|tool|>\n", user_end="<|end|>\n", end="<|end|>",
    ),
    "inst": Choices(
        "inst", ("<s>", "</s>", "[INST]", "[/INST]", "[SYS]", "[TOOL_CALLS]", "[RESULT]"),
        "[INST] ", "", "[SYS] ", "[RESULT] ", " ", "[/INST]", "</s>", after="", eos="</s>", bos="<s>",
    ),
    "words": Choices(
        "words", ("<s>", "</s>"), "USER:", "ASSISTANT:", "SYSTEM:", "TOOL:", " ", "\n", "</s>", eos="</s>", bos="<s>",
    ),
    "alpaca": Choices(
        "alpaca", ("<s>", "</s>"),
        "    ### Instruction:\n", "    ### Response:\n", "    ### System:\n", "    ### Result:\n",
        user_end="\n\n", end="</s>", after="\n\n", eos="</s>",
    ),
    "deepseek": Choices(
        "deepseek", ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜Tool｜>"),
        "<｜User｜>", "<｜Assistant｜>", "", "<｜Tool｜>", user_end="", end="<｜end▁of▁sentence｜>", after="",
        eos="<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>",
    ),
    "bare": Choices(
        "bare", ("<s>", "</s>"), "User: ", "Bot: ", "System: ", "Tool: ",
        user_end="\n", end="", no_end=True, eos="</s>", bos="<s>",
    ),
}  # fmt: skip


FOREIGN = (("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<|channel>thought\n", "<channel|>"))


def draw(rng: random.Random, foreign: bool = False) -> Choices:
    """The choices of one template. `foreign`: its thoughts have tags of other families than <think>."""
    names = list(FAMILIES)
    c = FAMILIES[rng.choices(names, [0.2 if name == "bare" else 1 for name in names])[0]]
    pick = functools.partial(_pick, rng)
    c = replace(
        c,
        bos=pick(c.bos, ""),
        tail=bool(c.end) and c.eos != c.end and rng.random() < 0.15,
        trim=pick("none", "all", "user", "assistant", "history"),
        system_in=pick("own", "own", "first", "last", "last_message", "every", "no"),
        head=pick("", "", "", "Knowledge: 2023. Today: 26 Jul 2024.\n\n"),
        think=pick("no", "kept", "at_once", "last_query", "final", "hidden", "stripped"),
        tags=pick(*FOREIGN) if foreign else pick(THINK, THINK, ("<think>", "</think>"), ("<think>\n", "\n</think>\n")),
        alternates=rng.random() < 0.15,
        idiom=rng.randrange(3),
        eos_by_name=c.end == c.eos and rng.random() < 0.5,
        void="" if foreign else pick("", "", "", "<think></think>", "<think>\n</think>\n"),
    )
    if c.think in ("kept", "at_once", "last_query", "final"):
        c = replace(c, empty=pick("no", "no", "last", "history", "always"))
        c = replace(c, prompt=pick("plain", "plain", "open", "switch", "no_think"))
    elif c.think in ("hidden", "stripped"):
        c = replace(
            c, prompt=pick("open", "switch", "no_think") if c.think == "stripped" else pick("switch", "no_think")
        )
    if c.prompt in ("switch", "no_think") and rng.random() < 0.3:
        c = replace(c, enable_thinking=False)
    if c.prompt != "plain" and rng.random() < 0.2:
        c = replace(c, word="/no_think")
    if c.prompt == "plain" and not c.gap and rng.random() < 0.06:
        c = replace(c, prompt_tail="\n")
    if c.gap and c.prompt != "plain":
        c = replace(c, gap="", assistant=c.assistant + c.gap, user=c.user + c.gap)
    return _with_rare(_with_tools(c, rng) if rng.random() < 0.75 else c, rng)


def _with_rare(c: Choices, rng: random.Random) -> Choices:
    """Choices that few templates make. They are drawn last."""
    if c.end and rng.random() < 0.08:
        c = replace(c, last_end="<|return|>", special=(*c.special, "<|return|>"))
    if c.place == "behind" and rng.random() < 0.3:
        c = replace(c, place="cut_off")
    if c.calls == "mistral" and c.place == "inside" and rng.random() < 0.3:
        c = replace(c, place="instead")
    return c


def _with_tools(c: Choices, rng: random.Random) -> Choices:
    pick = functools.partial(_pick, rng)
    calls = pick("hermes", "hermes", "xml", "mistral", "json", "llama3")
    bare = calls in ("json", "llama3")
    before = "before" if calls != "mistral" else "inside"
    c = replace(
        c,
        tools_in=pick("system", "last_user", "head") if c.system_in == "own" else pick("last_user", "head"),
        calls=calls,
        parallel=not bare and rng.random() < 0.8,
        text_arguments=calls != "xml" and rng.random() < 0.3,
        place="instead" if bare else pick("inside", "inside", before, "behind"),
        tool_style=pick("own", "user"),
        tool_merge=rng.random() < 0.3,
        tool_last=pick("same", "same", "newline", "no_end", "note"),
        needs_tools=rng.random() < 0.1,
    )
    added = {"mistral": ("[TOOL_CALLS]",), "llama3": pick((), ("<|python_tag|>",))}.get(calls, ())
    if c.end and rng.random() < 0.2:
        added, c = (*added, "<|call|>"), replace(c, call_end="<|call|>")
    if not c.end and c.tool_merge:
        c = replace(c, tool_merge=False)
    return replace(c, special=tuple(dict.fromkeys([*c.special, *added])))


def _pick(rng: random.Random, *values: Any) -> Any:
    return rng.choice(values)

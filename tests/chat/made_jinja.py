"""Writes the choices of `made_templates` as a Jinja template. It shares no code with what says the truth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

TOOLS = r"{{ '\n\n# Tools\n' }}{%- for tool in tools -%}{{ '\n' + (tool | tojson) }}{%- endfor -%}{{ '\n' }}"


def q(text: str) -> str:
    """The text as a Jinja string."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def out(text: str) -> str:
    """A statement that writes the text."""
    return "{{ " + q(text) + " }}" if text else ""


def jinja_of(c: Any) -> str:
    """The template as text."""
    lines = [_checks(c), _first(c), "{%- for m in messages -%}"]
    lines += ["{%- if m.role == 'user' -%}", _user(c)]
    lines += ["{%- elif m.role == 'tool' -%}", _tool(c)]
    lines += ["{%- elif m.role == 'assistant' -%}", _assistant(c), "{%- endif -%}", "{%- endfor -%}"]
    tail = "{%- else -%}{{ eos_token }}" if c.tail else ""
    lines += ["{%- if add_generation_prompt -%}", out(c.assistant + c.prompt_tail), _opening(c), tail, "{%- endif -%}"]
    # No white space of the template itself is written.
    text = "\n".join(line for line in lines if line).replace("{{ ", "{{- ").replace(" }}", " -}}")
    last = ("loop.last", "(loop.index0 == messages | length - 1)", "(loop.nextitem is not defined)")
    return text.replace("@last", last[c.idiom])


def _opening(c: Any) -> str:
    opened, closed = out(c.tags[0]), out(c.nothing)
    off = "{%- if enable_thinking is defined and enable_thinking is false -%}"
    if c.word:
        says = "{%- if ns.word -%}" + closed + "{%- else -%}"
        return says + _opening(replace(c, word="")) + "{%- endif -%}"
    return {
        "open": opened,
        "switch": off + closed + "{%- else -%}" + opened + "{%- endif -%}",
        "no_think": off + closed + "{%- endif -%}",
    }.get(c.prompt, "")


def _checks(c: Any) -> str:
    """What the template refuses, and the numbers that later parts compare with."""
    lines = []
    if c.needs_tools:
        lines.append("{%- if not tools -%}{{ raise_exception('needs tools') }}{%- endif -%}")
    needs_last = "last_query" == c.think or c.system_in in ("first", "last") or c.tools_in == "last_user"
    if needs_last or c.think == "final" or c.alternates or c.word:
        lines += ["{%- set ns = namespace(first=-1, last=-1, final=-1, word=false, expects='user') -%}"]
        lines += ["{%- for m in messages -%}"]
        lines += ["{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}"]
        lines += ["{%- set ns.word = " + q(c.word) + " in m.content -%}"] if c.word else []
        lines += ["{%- if ns.first == -1 -%}{%- set ns.first = loop.index0 -%}{%- endif -%}{%- endif -%}"]
        lines += [
            "{%- if m.role == 'assistant' and not m.tool_calls -%}{%- set ns.final = loop.index0 -%}{%- endif -%}"
        ]
        if c.alternates:
            lines += ["{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}"]
            lines += ["{%- if m.role != ns.expects -%}{{ raise_exception('order of roles') }}{%- endif -%}"]
            lines += ["{%- set ns.expects = 'assistant' if m.role == 'user' else 'user' -%}{%- endif -%}"]
        lines += ["{%- endfor -%}"]
    if c.system_in == "no":
        lines += ["{%- if messages and messages[0].role == 'system' -%}{{ raise_exception('system') }}{%- endif -%}"]
    return "\n".join(lines)


def _text(c: Any, role: str, name: str = "m") -> str:
    trims = c.trim == "all" or (c.trim == "user" and role == "user")
    return f"{name}.content | trim" if trims else f"{name}.content"


def _first(c: Any) -> str:
    """What stands before the first message."""
    lines = ["{{ bos_token }}" if c.bos else ""]
    if c.tools_in == "head":
        lines += ["{%- if tools -%}", TOOLS, "{%- endif -%}"]
    if c.system_in == "own":
        has = "(messages and messages[0].role == 'system')"
        asks = [has, *(["tools"] if c.tools_in == "system" else [])]
        if not c.head:
            lines.append("{%- if " + " or ".join(asks) + " -%}")
        lines += [out(c.system + c.gap + c.head)]
        lines += ["{%- if " + has + " -%}{{ " + _text(c, "system", "messages[0]") + " }}{%- endif -%}"]
        lines += ["{%- if tools -%}", TOOLS, "{%- endif -%}"] if c.tools_in == "system" else []
        lines += [out(c.user_end)]
        if not c.head:
            lines.append("{%- endif -%}")
    elif c.head:
        lines.append(out(c.head))
    return "\n".join(lines)


def _user(c: Any) -> str:
    before, role, behind = (c.user + c.gap).partition("user")
    named = "{{ " + q(before) + " + m.role + " + q(behind) + " }}" if role and c.idiom == 1 else ""
    lines = [named or out(c.user + c.gap)]
    if c.tools_in == "last_user":
        lines += ["{%- if tools and loop.index0 == ns.last -%}", TOOLS, "{%- endif -%}"]
    here = {"first": "loop.index0 == ns.first", "last": "loop.index0 == ns.last", "last_message": "@last"}
    if c.system_in in here or c.system_in == "every":
        lines += ["{%- if messages[0].role == 'system' and " + here.get(c.system_in, "true") + " -%}"]
        lines += ["{{ (" + _text(c, "system", "messages[0]") + r") + '\n\n' }}{%- endif -%}"]
    return "\n".join([*lines, "{{ " + _text(c, "user") + " }}", out(c.user_end)])


def _tool(c: Any) -> str:
    if c.tools_in == "no":
        return "{{ raise_exception('calls') }}"
    begin, end = out((c.user if c.tool_style == "user" else c.tool) + c.gap), out(c.user_end)
    if c.tool_merge:
        begin = "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}" + begin
        begin += r"{%- else -%}{{ '\n' }}{%- endif -%}"
        end = "{%- if @last or messages[loop.index0 + 1].role != 'tool' -%}" + end + "{%- endif -%}"
    if c.tool_last == "no_end":
        end = "{%- if not @last -%}" + end + "{%- endif -%}"
    content = "{{ " + _text(c, "tool") + " }}"
    if c.tool_style == "user":
        content = r"{{ '<tool_response>\n' }}" + content + r"{{ '\n</tool_response>' }}"
    extra = {
        "newline": r"{%- if not @last -%}{{ '\n' }}{%- endif -%}",
        "note": r"{%- if @last -%}{{ '\n(last)' }}{%- endif -%}",
    }
    return "\n".join([begin, content, extra.get(c.tool_last, ""), end])


def _assistant(c: Any) -> str:
    lines = [out(c.assistant + c.gap)]
    if c.tools_in == "no":
        lines += ["{%- if m.tool_calls -%}{{ raise_exception('calls') }}{%- endif -%}"]
    elif not c.parallel:
        lines += ["{%- if m.tool_calls and m.tool_calls | length > 1 -%}"]
        lines += ["{{ raise_exception('several calls') }}{%- endif -%}"]
    lines += [_thought(c), "{%- set content = m.content or '' -%}"]
    if c.think == "stripped":
        lines += [r"{%- if '</think>' in content -%}{%- set content = content.split('</think>')[-1].lstrip('\n') -%}"]
        lines += ["{%- endif -%}"]
    if c.trim in ("all", "assistant"):
        lines += ["{%- set content = content | trim -%}"]
    elif c.trim == "history":
        lines += ["{%- if not @last -%}{%- set content = content | trim -%}{%- endif -%}"]
    end = "{{ eos_token }}" if c.eos_by_name else out(c.end)
    call_end = out(c.call_end) or end
    end_alone = "{%- if @last -%}" + out(c.last_end) + "{%- else -%}" + end + "{%- endif -%}" if c.last_end else end
    if c.tools_in == "no":
        return "\n".join([*lines, "{{ content }}", end_alone, out(c.after)])
    lines.append("{%- if m.tool_calls -%}")
    if c.place == "before":
        lines += [_calls(c), r"{%- if content -%}{{ '\n' + content }}{%- endif -%}"]
    elif c.place == "behind":
        lines += ["{%- if content -%}{{ content }}", end, r"{{ '\n' }}{%- endif -%}", _calls(c)]
    elif c.place == "cut_off":
        lines += ["{{ content }}", end, r"{{ '\n' }}", _calls(c)]
    elif c.place == "instead":
        lines += [_calls(c)]
    else:
        lines += [r"{{ content }}{%- if content -%}{{ '\n' }}{%- endif -%}", _calls(c)]
    return "\n".join([*lines, call_end, "{%- else -%}", "{{ content }}", end_alone, "{%- endif -%}", out(c.after)])


def _thought(c: Any) -> str:
    shows = {
        "kept": "m.reasoning_content",
        "at_once": "@last and m.reasoning_content",
        "last_query": "loop.index0 > ns.last and m.reasoning_content",
        "final": "loop.index0 >= ns.final and m.reasoning_content",
    }.get(c.think)
    if shows is None:
        return ""
    inserts = {"last": "@last", "history": "not @last", "always": "true"}.get(c.empty)
    empty = "{%- elif " + inserts + " -%}" + out(c.nothing) if inserts else ""
    shown = out(c.tags[0]) + "{{ m.reasoning_content }}" + out(c.tags[1])
    return "{%- if " + shows + " -%}" + shown + empty + "{%- endif -%}"


def _calls(c: Any) -> str:
    arguments = "call.arguments" if c.text_arguments else "(call.arguments | tojson)"
    named = '\'{"name": "\' + call.name + \'", "%s": \' + ' + arguments
    body = {
        "hermes": r"{{ '<tool_call>\n' + " + named % "arguments" + r" + '}\n</tool_call>' }}",
        "json": "{{ " + named % "arguments" + " + '}' }}",
        "llama3": out("<|python_tag|>" if "<|python_tag|>" in c.special else "")
        + "{{ "
        + named % "parameters"
        + " + '}' }}",
        "mistral": "{{ " + named % "arguments" + " + ', \"id\": \"' + each.id + '\"}' }}",
        "xml": r"{{ '<tool_call>\n<function=' + call.name + '>\n' }}{%- for key, value in call.arguments | items -%}"
        r"{{ '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}"
        r"{%- endfor -%}{{ '</function>\n</tool_call>' }}",
    }[c.calls]
    between = {"mistral": "', '", "json": "'; '", "llama3": "'; '"}.get(c.calls, r"'\n'")
    loop = "{%- for each in m.tool_calls -%}{%- set call = each.function -%}" + body
    loop += "{%- if not loop.last -%}{{ " + between + " }}{%- endif -%}{%- endfor -%}"
    return out("[TOOL_CALLS]") + "{{ '[' }}" + loop + "{{ ']' }}" if c.calls == "mistral" else loop

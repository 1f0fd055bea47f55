// A conversation as a person reads it. Long tool calls and results are folded, thinking is dimmed, and what the
// environment said is set apart from what the model said.

import { h } from "./dom.js";

const LONG = { tool: 400, call: 200 }, LONG_ELSE = 4000, LINES = 12;

const textOf = (message) => (typeof message.content === "string" ? message.content : (message.content || []).map((part) => (part.type === "text" ? part.text : `[${part.type}]`)).join("")) || "";

export const sameMessage = (one, other) => JSON.stringify([one.role, one.content, one.reasoning, calls(one)]) === JSON.stringify([other.role, other.content, other.reasoning, calls(other)]);

const calls = (message) => (message.tool_calls || []).map(({ name, arguments: given }) => [name, given]);

export function conversation(messages, { mark = () => "" } = {}) {
  if (!messages.length) return [h("p", { class: "quiet" }, "No messages.")];
  return messages.map((message, index) => {
    const text = textOf(message), isLong = text.length > (LONG[message.role] || LONG_ELSE) || (message.role === "tool" && text.split("\n").length > LINES);
    const body = text && (isLong ? h("details", {}, h("summary", {}, `${text.length.toLocaleString("en")} characters: ${text.slice(0, 80)}…`), h("pre", { dir: "auto" }, text)) : h("pre", { dir: "auto" }, text));
    return h("section", { class: `message ${/^[a-z]+$/.test(message.role) ? message.role : ""} ${mark(message, index)}` },
      h("div", { class: "who" }, message.role + (message.name ? ` · ${message.name}` : "")),
      message.reasoning && h("details", { class: "thinking" }, h("summary", {}, "thinking"), h("pre", { dir: "auto" }, message.reasoning)), body,
      (message.tool_calls || []).map(oneCall));
  });
}

function oneCall({ name, arguments: given, error }) {
  const inside = Object.entries(given || {}).map(([key, value]) => `${key}=${JSON.stringify(value)}`).join(", "), bad = error && h("span", { class: "bad" }, ` ${error}`);
  if (inside.length <= LONG.call) return h("div", { class: "call", dir: "auto" }, `${name}(${inside})`, bad);
  const parts = Object.entries(given).map(([key, value]) => [h("div", { class: "quiet" }, key), h("pre", { dir: "auto" }, typeof value === "string" ? value : JSON.stringify(value, null, 1))]);
  return h("details", {}, h("summary", { class: "call" }, `${name}(${inside.slice(0, 80)}…)`, bad), parts);
}

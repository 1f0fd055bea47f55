// A conversation as a person reads it. Tool results are folded if they are long, thinking is dimmed.

import { h } from "./dom.js";

const LONG = 1500;

const textOf = (message) => (typeof message.content === "string" ? message.content : (message.content || []).map((part) => (part.type === "text" ? part.text : `[${part.type}]`)).join("")) || "";

export const sameMessage = (one, other) => JSON.stringify([one.role, one.content, one.reasoning, calls(one)]) === JSON.stringify([other.role, other.content, other.reasoning, calls(other)]);

const calls = (message) => (message.tool_calls || []).map(({ name, arguments: given }) => [name, given]);

export function conversation(messages, { mark = () => "" } = {}) {
  if (!messages.length) return [h("p", { class: "quiet" }, "No messages.")];
  return messages.map((message, index) => {
    const text = textOf(message), isLong = text.length > LONG || (message.role === "tool" && text.split("\n").length > 20);
    const body = text && (isLong ? h("details", {}, h("summary", {}, `${text.length.toLocaleString("en")} characters: ${text.slice(0, 80)}…`), h("pre", { dir: "auto" }, text)) : h("pre", { dir: "auto" }, text));
    return h("section", { class: `message ${/^[a-z]+$/.test(message.role) ? message.role : ""} ${mark(message, index)}` },
      h("div", { class: "who" }, message.role + (message.name ? ` · ${message.name}` : "")),
      message.reasoning && h("details", { class: "thinking" }, h("summary", {}, "thinking"), h("pre", { dir: "auto" }, message.reasoning)), body,
      (message.tool_calls || []).map((call) => h("div", { class: "call" }, `${call.name}(${Object.entries(call.arguments || {}).map(([key, value]) => `${key}=${JSON.stringify(value)}`).join(", ")})`, call.error && h("span", { class: "bad" }, ` ${call.error}`))));
  });
}

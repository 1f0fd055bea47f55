// One rollout: what was said, and every token with its values.

import { badge, h, link, number } from "./dom.js";
import { get, isExport, path } from "./api.js";
import { conversation } from "./conversation.js";
import { CHANNELS, background, hasValues, prepared, scaleOf, tokensOf } from "./tokens.js";

let chosen = "loss mask";

export function rolloutPage(run, file, line) {
  const readout = h("div", { id: "readout", role: "status" }, "Point at a token, or move with ← and →, to see its values.");
  let lines = 1, segments = [], views = [], channels = [], picker;

  const go = (to) => to >= 0 && to < lines && (location.hash = link(["run", run, file, String(to)]));

  const legend = h("span", { class: "quiet" });

  function paint() {
    const channel = channels.find(([name]) => name === chosen) || channels[0];
    if (!channel) return;
    const scale = scaleOf(segments, channel), ends = [scale.low, (scale.low + scale.high) / 2, scale.high].map((value) => background(value, scale));
    picker.value = channel[0];
    legend.replaceChildren(`${channel[1]} · ${number(scale.low)} `, h("span", { class: "scale", style: `background:linear-gradient(90deg,${ends.join(",")})` }), ` ${number(scale.high)} · sum ${number(scale.sum)}, mean ${number(scale.sum / scale.count, 4)} over ${scale.count} tokens`);
    views.forEach((view) => view.paint(channel, scale));
  }

  const next = () => ((chosen = channels[(channels.findIndex(([name]) => name === picker.value) + 1) % channels.length][0]), paint());

  // The token before or after the marked one; past the end of a segment comes the next segment.
  const step = (by) => {
    const at = Math.max(views.findIndex((view) => view.isOn()), 0);
    if (views[at] && !views[at].step(by) && views[at + by]) views[at].leave(), views[at + by].enter(by);
  };

  function facts(found) {
    const parts = Object.entries(found.parts || {}).map(([name, value]) => `${name} ${number(value)}${name in (found.weights || {}) ? ` × ${number(found.weights[name])}` : ""}`).join(" · ");
    const words = [["reward", h("strong", {}, number(found.reward))], parts && ["parts", parts], found.turns.length && ["reward by turn", found.turns.map((each) => number(each)).join(" · ")], found.advantage !== null && found.advantage !== undefined && ["advantage", number(found.advantage)],
      ["status", badge(found.status)], found.role && ["role", found.role], found.dropped && ["not trained", found.dropped], found.why && ["why", found.why], found.error && ["error", h("span", { class: "error" }, found.error)],
      found.task.answer !== undefined && found.task.answer !== null && ["answer", typeof found.task.answer === "string" ? found.task.answer : JSON.stringify(found.task.answer)],
      Object.keys(found.metrics).length && ["counts", Object.entries(found.metrics).map(([name, value]) => `${name} ${number(value)}`).join(" · ")], Object.keys(found.info || {}).length && ["info", JSON.stringify(found.info)]];
    return h("dl", {}, words.filter(Boolean).map(([key, value]) => [h("dt", {}, key), h("dd", { dir: "auto" }, value)]));
  }

  return {
    keys: { "[": () => go(line - 1), "]": () => go(line + 1), c: next, ArrowLeft: () => step(-1), ArrowRight: () => step(1) },
    async show(signal) {
      const found = await get(path("runs", run, file, "lines", String(line)), {}, signal);
      lines = found.lines;
      segments = found.segments.map((segment, index) => prepared(segment, index, found.advantage));
      channels = CHANNELS.filter((channel) => hasValues(segments, channel));
      picker = h("select", { "aria-label": "Channel", onchange: () => ((chosen = picker.value), paint()) }, channels.map(([name]) => h("option", {}, name)));
      views = segments.map((segment) => tokensOf(segment, (words) => (readout.textContent = words)));
      paint();
      const siblings = found.siblings.map((each) => h("a", { href: link(["run", run, file, String(each.line)]), "aria-current": each.line === line ? "true" : null }, `${each.rollout}: ${number(each.reward)}`));
      return [h("h1", {}, `${file}, line ${line}`),
        h("div", { class: "row" }, h("button", { type: "button", disabled: line === 0, onclick: () => go(line - 1) }, "before ["), h("button", { type: "button", disabled: line + 1 >= lines, onclick: () => go(line + 1) }, "next ]")),
        h("div", { class: "row siblings" }, `group ${found.group}:`, siblings, siblings.length > 1 && h("a", { href: link(["side"], isExport ? { at: found.siblings.map((each) => JSON.stringify([run, file, String(each.line)])) } : { run, file, group: line }) }, "side by side")),
        facts(found), found.notes.map((note) => h("p", { class: "quiet" }, note)), h("h2", {}, "Conversation"), conversation(found.messages),
        segments.length > 0 && [h("h2", {}, "Tokens"), h("div", { class: "row" }, h("label", {}, "color: ", picker), legend), views.map((view, index) => [segments.length > 1 && h("p", { class: "quiet" }, `segment ${index + 1} of ${segments.length}`), view.box]), readout]].flat(3).filter(Boolean);
    },
  };
}

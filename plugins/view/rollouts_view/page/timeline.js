// When everything in a step happened: its phases, and below them a row for each episode.

import { counted, h, number, say } from "./dom.js";
import { WIDE, color } from "./chart.js";

const PHASES = { wait: ["waiting for rollouts", 7], prepare: ["making the batch", 3], train: ["training", 1], sync: ["sync of weights", 2], finish: ["writing, logging, evaluating", 6] };
const SIDE = 8, STRIP = 22, TICKS = 20, GAP = 8;

const seconds = (value) => `${number(value)} s`;
const length = ([begin, end]) => end - begin;
const sum = (values) => values.reduce((a, b) => a + b, 0);

// found: {phases: [[name, begin, end]], episodes: [[line, group, rollout, begin, end, [[begin, end]]]]}; pick(line) opens one.
export function timeline(found, pick) {
  const { phases, episodes } = found, ends = [...phases.map(([, , end]) => end), ...episodes.map((each) => each[4])];
  if (!ends.length) return h("p", { class: "quiet" }, "No times.");
  const [first, last] = [...phases.map(([, begin]) => begin), ...episodes.map((each) => each[3])].reduce(([low, high], each) => [Math.min(low, each), high], [Infinity, ends.reduce((a, b) => Math.max(a, b))]);
  const strip = phases.length ? STRIP + GAP : 0, tall = episodes.length <= 64 ? 12 : episodes.length <= 300 ? 5 : 2;
  const height = strip + tall * episodes.length + TICKS, x = (value) => SIDE + ((value - first) / (last - first || 1)) * (WIDE - 2 * SIDE);
  const box = (begin, end, top, tallness) => `M${x(begin).toFixed(1)} ${top}h${Math.max(x(end) - x(begin), 0.4).toFixed(1)}v${tallness}h${-Math.max(x(end) - x(begin), 0.4).toFixed(1)}z`;
  const row = (index) => strip + tall * index, thick = tall > 2 ? tall - 1 : tall;
  const spans = episodes.map(([, , , begin, end], index) => box(begin, end, row(index), thick)).join("");
  const replies = episodes.map((each, index) => each[5].map(([begin, end]) => box(begin, end, row(index), thick)).join("")).join("");
  const odd = episodes.map((each, index) => (each[1] % 2 ? box(first, last, row(index), tall) : "")).join("");
  const mark = h("path", { class: "mark", d: "" }), words = h("p", { class: "quiet", role: "status" }, "Point at a row, or move with ↑ and ↓; Enter or a click opens the rollout.");
  let at = -1;
  const choose = (index) => {
    at = Math.min(Math.max(index, 0), episodes.length - 1);
    const [, group, rollout, begin, end, parts] = episodes[at], own = sum(parts.map(length));
    mark.setAttribute("d", box(first, last, row(at), tall));
    words.textContent = `rollout ${rollout} of group ${group}: from ${seconds(begin)} to ${seconds(end)} · ${counted(parts.length, "request")} to the model, ${seconds(own)} · environment, tools, rewards and gate ${seconds(end - begin - own)}`;
  };
  const index = (event) => Math.floor((((event.clientY - svg.getBoundingClientRect().top) * height) / svg.getBoundingClientRect().height - strip) / tall);
  const svg = h("svg", { class: "chart timeline", viewBox: `0 0 ${WIDE} ${height}`, role: "img", tabindex: 0, "aria-label": `Timeline of ${counted(episodes.length, "episode")}: ${phases.map(([name, ...own]) => `${(PHASES[name] || [name])[0]} ${seconds(length(own))}`).join(", ")}` },
    [0, 0.25, 0.5, 0.75, 1].map((part) => first + part * (last - first)).map((value, order) => [
      h("line", { class: "grid", x1: x(value), x2: x(value), y1: 0, y2: height - TICKS }),
      h("text", { x: x(value), y: height - 6, "text-anchor": order === 0 ? "start" : order === 4 ? "end" : "middle" }, seconds(value)),
    ]),
    h("path", { class: "odd", d: odd }), phases.map(([name, begin, end]) => h("path", { d: box(begin, end, 0, STRIP), style: `fill:${color((PHASES[name] || [name, 5])[1])}` })),
    phases.filter(([, ...own]) => x(own[1]) - x(own[0]) > 60).map(([name, begin]) => h("text", { class: "on", x: x(begin) + 6, y: 15 }, name)),
    h("path", { d: spans, style: `fill:${color(0)};opacity:.25` }), h("path", { d: replies, style: `fill:${color(0)}` }), mark);
  svg.addEventListener("mousemove", (event) => index(event) >= 0 && index(event) < episodes.length && choose(index(event)));
  svg.addEventListener("click", (event) => index(event) >= 0 && index(event) < episodes.length && pick(episodes[index(event)][0]));
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by && episodes.length) choose(at + by), say(words.textContent);
    else if (event.key === "Enter" && at >= 0) pick(episodes[at][0]);
    else return;
    event.preventDefault(), event.stopPropagation();
  });
  const all = sum(episodes.map((each) => each[4] - each[3])), model = sum(episodes.flatMap((each) => each[5].map(length)));
  const parts = [...phases.map(([name, ...own]) => [(PHASES[name] || [name, 5])[1], `${(PHASES[name] || [name])[0]} ${seconds(length(own))}`, 1]),
    ...(episodes.length ? [[0, `requests to the model: ${Math.round((100 * model) / (all || 1))} % of the episodes' time`, 1], [0, "environment, tools, rewards, and waiting for a turn", 0.25]] : [])];
  const isEarly = phases.length > 0 && episodes.some((each) => each[3] < phases[0][1] - 0.05);
  return [svg, h("div", { class: "legend" }, parts.map(([index, text, opacity]) => h("span", {}, h("i", { style: `background:${color(index)};opacity:${opacity}` }), text))), words,
    isEarly && h("p", { class: "quiet" }, "Everything left of 0 was sampled while an earlier step was trained."),
    found.total > episodes.length && h("p", { class: "quiet" }, `The first ${episodes.length.toLocaleString("en")} of ${counted(found.total, "episode")}.`)];
}

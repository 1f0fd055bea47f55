// The tokens of a segment, each in the color of its value in one channel.

import { h, number } from "./dom.js";

const CHUNK = 400;

// Each channel: its name, what it is, and its value for a token of a segment; null: the token has none.
export const CHANNELS = [
  ["loss mask", "1: the model sampled this token and is trained on it", (s, i) => s.mask[i]],
  ["sampler logprob", "log probability when it was sampled, in nats", (s, i) => (s.mask[i] > 0 ? s.logprobs[i] : null)],
  ["trainer logprob", "log probability in training, before the optimizer step", (s, i) => s.of("logprob", i)],
  ["difference", "trainer logprob minus sampler logprob; 0 if both agree", (s, i) => minus(s.of("logprob", i), s.mask[i] > 0 ? s.logprobs[i] : null)],
  ["entropy", "entropy of the trainer's prediction, in nats", (s, i) => s.of("entropy", i)],
  ["advantage", "how much better than expected: what the loss received, or that of the whole rollout", (s, i) => s.of("advantage", i) ?? (s.mask[i] > 0 ? s.advantage : null)],
  ["reference logprob", "log probability under the reference model", (s, i) => s.of("ref_logprob", i)],
  ["KL to the reference", "trainer logprob minus reference logprob (k1); its mean estimates the KL", (s, i) => minus(s.of("logprob", i), s.of("ref_logprob", i))],
  ["teacher logprob", "log probability under the teacher", (s, i) => s.of("teacher_logprob", i)],
  ["correction weight", "the importance weight of the correction", (s, i) => s.of("weight", i)],
  ["clipped", "1: outside the clip range, so without a gradient", (s, i) => s.of("clipped", i)],
  ["policy version", "which weights sampled it", (s, i) => (s.mask[i] > 0 ? s.versions[i] : null)],
  ["turn", "which turn of the model", (s, i) => (s.mask[i] > 0 ? s.turnOf(i) : null)],
  ["segment", "which sequence of the trajectory", (s) => s.index],
];

const minus = (one, other) => (one === null || other === null || other === undefined ? null : one - other);

export function prepared(segment, index, advantage) {
  const places = new Map(segment.at.map((position, order) => [position, order]));
  return {
    ...segment, index, advantage,
    of: (name, i) => (name in segment.recorded && places.has(i) ? segment.recorded[name][places.get(i)] : null),
    turnOf: (i) => segment.turns.reduce((found, [turn, first]) => (first <= i ? turn : found), null),
  };
}

export const hasValues = (segments, [, , value]) => segments.some((segment) => segment.tokens.some((_, i) => (value(segment, i) ?? null) !== null));

export function scaleOf(segments, [, , value]) {
  let low = Infinity, high = -Infinity, sum = 0, count = 0;
  for (const segment of segments) for (let i = 0; i < segment.tokens.length; i++) {
    const each = value(segment, i);
    if (each === null || each === undefined) continue;
    low = Math.min(low, each), high = Math.max(high, each), sum += each, count++;
  }
  return { low, high, sum, count, span: Math.max(Math.abs(low), Math.abs(high)) || 1 };
}

// Negative and positive values have two colors if there are both; else stronger means farther from the least value.
export function background(value, { low, high, span }) {
  if (value === null || value === undefined) return "";
  if (low < 0 && high > 0) return `rgba(var(--${value < 0 ? "hot" : "cold"}), ${(0.75 * Math.abs(value)) / span})`;
  if (high <= 0) return `rgba(var(--hot), ${high === low ? 0.3 : (0.75 * (high - value)) / (high - low)})`;
  return `rgba(var(--ink), ${high === low ? (value ? 0.35 : 0) : 0.08 + (0.62 * (value - low)) / (high - low)})`;
}

const visible = (text) => (text === undefined ? "" : text === "" ? "·" : text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t").replace(/[\u0000-\u0008\u000b-\u001f\u007f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`));

// Chunks are drawn when they come near the window, so 100,000 tokens are no burden.
export function tokensOf(segment, say) {
  const box = h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": `Tokens of segment ${segment.index + 1}` });
  let channel = CHANNELS[0], scale = { low: 0, high: 1, span: 1 }, on = null;
  const drawn = new Set();
  const fill = (chunk) => {
    const start = Number(chunk.dataset.start), end = Math.min(start + CHUNK, segment.tokens.length), spans = [];
    for (let i = start; i < end; i++) {
      const value = channel[2](segment, i), has = value !== null && value !== undefined;
      spans.push(h("span", { "data-at": i, class: has ? null : "none", style: has ? `background:${background(value, scale)}` : null }, segment.texts.length ? visible(segment.texts[i]) : `${segment.tokens[i]} `));
    }
    chunk.replaceChildren(...spans);
  };
  const watch = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting || drawn.has(entry.target)) return;
    drawn.add(entry.target);
    entry.target.style.height = "";
    fill(entry.target);
  }), { rootMargin: "800px" });
  for (let start = 0; start < segment.tokens.length; start += CHUNK) {
    const chunk = h("div", { class: "chunk", "data-start": start, style: "height:20em" });
    if (segment.tokens.length <= CHUNK) drawn.add(chunk), (chunk.style.height = "");
    else watch.observe(chunk);
    box.append(chunk);
  }
  const choose = (i) => {
    const at = Math.min(Math.max(i, 0), segment.tokens.length - 1), chunk = box.children[Math.floor(at / CHUNK)];
    if (!chunk) return;
    if (!drawn.has(chunk)) drawn.add(chunk), (chunk.style.height = ""), fill(chunk);
    box.querySelector(".on")?.classList.remove("on");
    chunk.children[at % CHUNK].classList.add("on");
    on = at;
    say(words(segment, at));
  };
  box.addEventListener("mouseover", (event) => event.target.dataset.at !== undefined && say(words(segment, Number(event.target.dataset.at))));
  box.addEventListener("click", (event) => event.target.dataset.at !== undefined && choose(Number(event.target.dataset.at)));
  return {
    box,
    isOn: () => on !== null,
    // Whether there is a token in that direction; it is marked then.
    step: (by) => (on !== null && (on + by < 0 || on + by >= segment.tokens.length) ? false : (choose(on === null ? 0 : on + by), true)),
    enter: (by) => choose(by > 0 ? 0 : segment.tokens.length - 1),
    leave: () => (box.querySelector(".on")?.classList.remove("on"), (on = null)),
    paint(next, nextScale) {
      [channel, scale] = [next, nextScale];
      drawn.forEach(fill);
      if (on !== null) choose(on);
    },
  };
}

function words(segment, i) {
  const values = CHANNELS.filter(([name]) => name !== "segment").map(([name, , value]) => [name, value(segment, i)]).filter(([, value]) => value !== null && value !== undefined);
  return `token ${i} · id ${segment.tokens[i]}${segment.texts.length ? ` · ${JSON.stringify(segment.texts[i])}` : ""} · ${values.map(([name, value]) => `${name} ${number(value, 4)}`).join(" · ")}`;
}

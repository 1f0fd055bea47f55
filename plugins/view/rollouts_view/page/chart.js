// Line charts in SVG.

import { h, number, say } from "./dom.js";

const LEFT = 52, RIGHT = 10, TOP = 10, BOTTOM = 24;
export const WIDE = Math.min(Math.max(innerWidth - 60, 300), 1200);

export const color = (index) => `var(--s${index % 8})`;

// An exponential mean, corrected for its beginning; `amount` 0 keeps the values.
export function smoothed(points, amount) {
  let mean = 0, weight = 0;
  return points.map(([step, value]) => {
    mean = amount * mean + (1 - amount) * value;
    weight = amount * weight + (1 - amount);
    return [step, mean / weight];
  });
}

// series: [{name, points: [[step, value]], color, band?: [[step, low, high]]}]; pick(series, step) is called on a click.
// `width` is that on the screen in pixels, about, so that letters keep their size.
export function chart(series, { width: WIDTH = WIDE, height = 240, pick = null, label = "" } = {}) {
  series = series.filter((each) => each.points.length);
  const all = series.flatMap((each) => each.points).filter(([, value]) => Number.isFinite(value));
  if (!all.length) return h("p", { class: "quiet" }, "No values yet.");
  const banded = series.flatMap((each) => each.band || []);
  const xs = all.map(([x]) => x), ys = [...all.map(([, y]) => y), ...banded.flatMap(([, low, high]) => [low, high])];
  const least = (values) => values.reduce((a, b) => Math.min(a, b)), most = (values) => values.reduce((a, b) => Math.max(a, b));
  const [x0, x1] = [least(xs), most(xs)];
  let [y0, y1] = [least(ys), most(ys)];
  if (y0 === y1) [y0, y1] = [y0 - 0.5, y1 + 0.5];
  const x = (value) => LEFT + ((value - x0) / (x1 - x0 || 1)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - y0) / (y1 - y0)) * (height - TOP - BOTTOM);
  const ticks = [0, 0.5, 1].map((part) => y0 + part * (y1 - y0));
  const at = (points) => points.map(([px, py], index) => `${index ? "L" : "M"}${x(px).toFixed(1)} ${y(py).toFixed(1)}`).join("");
  const dot = h("circle", { r: 4, visibility: "hidden" }), words = h("text", { x: LEFT + 6, y: TOP + 10 });
  const svg = h("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", tabindex: 0, "aria-label": `${label}: ${series.map(spoken).join("; ")}` },
    ticks.map((tick) => [
      h("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }),
      h("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, number(tick)),
    ]),
    [x0, x1].map((value, index) => h("text", { x: x(value), y: height - 6, "text-anchor": index ? "end" : "start" }, `${index ? "" : "step "}${number(value, 0)}`)),
    series.map((each) => each.band && h("path", { d: `${at(each.band.map(([s, low]) => [s, low]))}L${at([...each.band].reverse().map(([s, , high]) => [s, high])).slice(1)}Z`, style: `fill:${each.color};opacity:.15` })),
    series.map((each) => h("path", { d: at(each.points.filter(([, value]) => Number.isFinite(value))), style: `stroke:${each.color}` })),
    dot, words);
  const nearest = (event) => {
    const box = svg.getBoundingClientRect(), scale = WIDTH / box.width;
    const [px, py] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    let best = null;
    for (const one of series) for (const [step, value] of one.points) {
      const far = Math.hypot(x(step) - px, (y(value) - py) / 3);
      if (!best || far < best.far) best = { far, one, step, value };
    }
    return best;
  };
  let on = null; // the point that is marked
  const show = (point) => {
    const { one, step, value } = (on = point);
    dot.setAttribute("cx", x(step)), dot.setAttribute("cy", y(value));
    (dot.style.fill = one.color), dot.setAttribute("visibility", "visible");
    words.textContent = `${one.name} · step ${step}: ${number(value)}`;
  };
  svg.addEventListener("mousemove", (event) => show(nearest(event)));
  svg.addEventListener("mouseleave", () => (dot.setAttribute("visibility", "hidden"), (words.textContent = "")));
  if (pick) svg.addEventListener("click", (event) => ((each) => pick(each.one, each.step))(nearest(event)));
  // Left and right move along a curve, up and down to another one, Enter is a click.
  svg.addEventListener("keydown", (event) => {
    const along = { ArrowRight: 1, ArrowLeft: -1 }[event.key], across = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const at = on ? series.indexOf(on.one) : 0, one = series[(at + (across || 0) + series.length) % series.length];
    if (along || across) {
      const known = on ? one.points.findIndex(([step]) => step >= on.step) : -1, place = known < 0 && on ? one.points.length - 1 : known;
      const [step, value] = one.points[Math.min(Math.max(place + (along || 0), 0), one.points.length - 1)];
      show({ one, step, value }), say(words.textContent);
    } else if (event.key === "Enter" && pick && on) pick(on.one, on.step);
    else return;
    event.preventDefault(), event.stopPropagation();
  });
  return svg;
}

const spoken = ({ name, points }) => (points.length ? `${name} from ${number(points[0][1])} to ${number(points[points.length - 1][1])}` : `${name} empty`);

export function spark(values) {
  if (values.length < 2) return "";
  const low = Math.min(...values), span = Math.max(...values) - low || 1;
  const d = values.map((value, index) => `${index ? "L" : "M"}${(1 + (88 * index) / (values.length - 1)).toFixed(1)} ${(18 - (16 * (value - low)) / span).toFixed(1)}`).join("");
  return h("svg", { class: "spark", viewBox: "0 0 90 20", "aria-hidden": "true" }, h("path", { d }));
}

export const legend = (series) => h("div", { class: "legend" }, series.map((each) => h("span", {}, h("i", { style: `background:${each.color}` }), each.name)));

// The runs of one arm, which differ in their seed alone, become one curve: the mean, with a band from least to most.
export function bands(series) {
  const arms = Map.groupBy ? Map.groupBy(series, (each) => each.arm) : series.reduce((map, each) => map.set(each.arm, [...(map.get(each.arm) || []), each]), new Map());
  return [...arms.values()].map((same, index) => {
    if (same.length === 1) return { ...same[0], color: color(index) };
    const values = new Map();
    for (const each of same) for (const [step, value] of each.points) values.set(step, [...(values.get(step) || []), value]);
    const steps = [...values.keys()].sort((a, b) => a - b).filter((step) => values.get(step).length === same.length);
    return {
      ...same[0], color: color(index), name: `${same[0].name} and ${same.length - 1} more`,
      points: steps.map((step) => [step, values.get(step).reduce((a, b) => a + b) / same.length]),
      band: steps.map((step) => [step, Math.min(...values.get(step)), Math.max(...values.get(step))]),
    };
  });
}

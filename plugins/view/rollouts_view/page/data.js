// Training data: each row as tokens in the color of their mask, how long rows are, and what cannot be used.

import { counted, h, link, number, say, table } from "./dom.js";
import { get } from "./api.js";
import { conversation } from "./conversation.js";
import { fieldOf } from "./field.js";
import { CHANNELS, prepared, tokensOf } from "./tokens.js";

const COUNT = 10;
const MORE = 10;
const WIDTH = 640, BAR = 18;
const MASK = CHANNELS.find(([name]) => name === "loss mask");

export function dataPage(query) {
  const file = query.get("file") || "", run = query.get("run") || "", settings = query.get("settings") || "", from = Number(query.get("from") || 0);
  const rows = h("div"), head = h("div"), counts = h("div"), controls = h("div", { class: "row" }), readout = h("div", { id: "readout", role: "status" });
  const problem = h("p", { class: "error", role: "alert" });
  let signal, first = "", at = -1, isReady = false, isCounted = false, shown = "", found, begun = false;

  const views = new Map();
  const step = (by) => views.get(Number(rows.querySelectorAll(".datum")[at]?.dataset.row))?.step(by);
  const tell = (text) => (readout.textContent = text);
  const address = (changes) => link(["data"], strip({ file, run, settings, from: from || "", ...changes }));
  const go = (changes) => (location.hash = address(changes));

  async function load() {
    if (isReady && isCounted) return;
    const asked = strip({ file, run, settings });
    try {
      if (!isReady) {
        found = await get("/api/data", { ...asked, from: from || "", count: COUNT }, signal);
        isReady = found.ready && !found.growing;
        const text = JSON.stringify([found.rows, found.note, found.total]);
        if (text !== shown) fill();
        shown = text;
        if (!begun) settingsRow();
      }
      if (!isCounted) count(await get("/api/data/summary", { ...asked, first }, signal));
      problem.textContent = "";
    } catch (error) {
      if (error.name === "AbortError") throw error;
      problem.textContent = error.message;
    }
  }

  function fill() {
    views.clear();
    const last = from + COUNT, total = `${found.total.toLocaleString("en")}${found.whole ? "" : " and more"}`;
    const paging = () => h("div", { class: "row" }, h("button", { type: "button", disabled: from === 0, onclick: () => go({ from: Math.max(0, from - COUNT) || "" }) }, "before"), `rows ${(from + 1).toLocaleString("en")} to ${Math.min(last, found.whole ? found.total : last).toLocaleString("en")} of ${total}`,
      h("button", { type: "button", disabled: found.whole && last >= found.total, onclick: () => go({ from: last }) }, "next"));
    head.replaceChildren(h("h1", {}, found.name), found.note && h("p", { class: "error" }, found.note), !found.ready ? h("p", { class: "quiet" }, "The tokenizer is being loaded…") : "");
    rows.replaceChildren(paging(), ...found.rows.map(row), found.rows.length ? "" : h("p", { class: "quiet" }, "There are no rows here."), found.rows.length > 2 ? paging() : "");
    if (at >= 0) move(0);
  }

  function row(each) {
    const title = h("h2", {}, each.place);
    if (each.bad) return h("section", { class: "datum", tabindex: -1 }, title, h("p", {}, h("span", { class: "state failed" }, "cannot be used"), " ", h("span", { class: "error", dir: "auto" }, each.bad)), each.sample && h("pre", { class: "file", dir: "auto" }, each.sample));
    const { cut, sequences } = each, lost = [cut.rows && `${counted(cut.rows, "sequence")} cut`, cut.left_out && `${counted(cut.left_out, "sequence")} left out`, cut.tokens && `${counted(cut.tokens, "token")} lost`].filter(Boolean);
    const trained = sequences.reduce((sum, { mask }) => sum + mask.filter((weight) => weight > 0).length, 0), all = sequences.reduce((sum, { tokens }) => sum + tokens.length, 0);
    const own = [], boxes = sequences.map((sequence, index) => {
      const segment = prepared({ ...sequence, logprobs: [], versions: [], turns: [], at: [], recorded: {} }, index, null), view = tokensOf(segment, tell);
      view.paint(MASK, { low: 0, high: Math.max(1, ...sequence.mask), span: 1 });
      own.push(view);
      return view.box;
    });
    views.set(each.number, own[0]);
    return h("section", { class: "datum", tabindex: -1, "data-row": each.number }, title, h("p", { class: "quiet" }, `${each.form}${sequences.length ? ` · ${counted(all, "token")}, ${trained} trained${sequences.length > 1 ? `, in ${sequences.length} sequences` : ""}` : found.ready && !found.note ? " · nothing is trained" : ""} `, lost.length ? h("span", { class: "state interrupted" }, lost.join(", ")) : ""),
      boxes, h("details", { open: !sequences.length }, h("summary", {}, counted(each.messages.length, "message")), conversation(each.messages), each.tools.map((tool) => h("pre", { class: "call" }, tool))));
  }

  function count(summary) {
    isCounted = summary.done;
    const tokens = summary.tokens, share = tokens ? Math.round((100 * summary.trained) / tokens) : 0;
    const facts = summary.longest ? `median ${number(summary.median, 1)}, longest ${summary.longest.toLocaleString("en")}; ${summary.trained.toLocaleString("en")} of ${counted(tokens, "token")} are trained (${share} %)` : "";
    const whose = summary.done && summary.rows < summary.first ? `All ${counted(summary.rows, "row")}` : `The first ${counted(summary.rows, "row")}`;
    const more = () => ((first = String(Math.max(summary.first, summary.rows) * MORE)), (isCounted = false), load());
    counts.replaceChildren(h("h2", {}, summary.rows || summary.done ? `${whose}${summary.done ? "" : ", and counting"}` : "Counting…"), summary.problem && h("p", { class: "error" }, summary.problem), h("ul", { class: "notes" }, summary.words.map((each) => h("li", {}, each))),
      summary.bins.length ? h("div", { class: "card" }, histogram(summary.bins), h("p", { class: "quiet" }, facts)) : "",
      summary.bad.length ? h("details", { open: summary.bad.length <= 5 }, h("summary", { class: "error" }, `${counted(summary.unusable, "row")} cannot be used`), table(["row", "why", "the row"], summary.bad.map((each) => [h("a", { href: address({ from: placeOf(each.place) || "" }) }, each.place), h("span", { dir: "auto" }, each.why), h("span", { dir: "auto" }, each.sample)]))) : "",
      summary.done && summary.rows >= summary.first ? h("button", { type: "button", onclick: more }, `count ${(summary.first * MORE).toLocaleString("en")} rows`) : "");
    if (summary.done) say(`${whose} counted. ${facts}`);
  }

  function settingsRow() {
    begun = true;
    const { given } = found, before = settings || "{}", changes = JSON.parse(before);
    const apply = () => JSON.stringify(changes) !== before && go({ settings: JSON.stringify(changes), from: "" });
    const own = found.fields.map((field) => {
      const label = field.label || field.name, made = fieldOf({ ...field, name: label, label }, given[field.name], (text) => (changes[field.name] = text === "" ? field.default ?? "" : text));
      made.control.addEventListener("keydown", (event) => event.key === "Enter" && apply());
      return made.element;
    });
    const set = Object.entries(given).map(([name, text]) => `${name} ${text}`).join(", ");
    controls.replaceChildren(h("details", { class: "group" }, h("summary", {}, h("h2", {}, "Settings"), h("span", { class: "quiet" }, ` ${set}`)), own, h("div", { class: "row field" }, h("button", { type: "button", onclick: apply }, "show with these"))));
  }

  function move(step) {
    const all = [...rows.querySelectorAll(".datum")];
    if (!all.length) return;
    at = Math.min(Math.max(at + step, 0), all.length - 1);
    all[at].scrollIntoView({ block: "start" });
    all[at].focus({ preventScroll: true });
  }

  return {
    keys: { j: () => move(1), k: () => move(-1), ArrowRight: () => step(1), ArrowLeft: () => step(-1), "]": () => go({ from: from + COUNT }), "[": () => from && go({ from: Math.max(0, from - COUNT) || "" }) },
    renew: load,
    async show(given) {
      signal = given;
      await load();
      if (!found) throw new Error(problem.textContent);
      return [head, problem, controls, counts, rows, readout];
    },
  };
}

const placeOf = (place) => Math.max(0, Number(place.split(" ").pop()) - 1);

const strip = (values) => Object.fromEntries(Object.entries(values).filter(([, value]) => value !== "" && value !== 0));

function histogram(bins) {
  const most = Math.max(...bins.map(([, , count]) => count)), label = ([low, high]) => (low === high ? String(low) : `${low}–${high}`);
  const bars = bins.map((bin, index) => {
    const width = Math.max(bin[2] ? 2 : 0, (bin[2] / most) * (WIDTH - 220)), y = index * (BAR + 4);
    return h("g", {}, h("title", {}, `${label(bin)} tokens: ${counted(bin[2], "sequence")}`), h("text", { x: 110, y: y + 13, "text-anchor": "end" }, label(bin)), h("rect", { x: 118, y, width, height: BAR, class: "bar" }), h("text", { x: 124 + width, y: y + 13 }, bin[2].toLocaleString("en")));
  });
  return h("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${bins.length * (BAR + 4)}`, role: "img", style: `max-width:${WIDTH}px`, "aria-label": `Lengths in tokens: ${bins.map((bin) => `${label(bin)}: ${bin[2]}`).join(", ")}` }, bars);
}

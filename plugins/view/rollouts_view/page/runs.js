// All runs, with curves of those that are chosen.

import { badge, counted, h, link, number, rowKeys, size } from "./dom.js";
import { get, isExport, path } from "./api.js";
import { bands, chart, color, legend, smoothed, spark } from "./chart.js";

const SHOWN = 8;
const chosen = new Set();
let metric = "reward/mean", smoothing = 0, isBanded = false, search = "";

export function runsPage() {
  const rows = h("tbody"), words = h("p", { class: "quiet" }), plot = h("div"), data = h("span", { class: "row" }), picker = h("select", { "aria-label": "Metric", onchange: () => ((metric = picker.value), draw()) });
  let runs = [], signal;

  const fitting = () => runs.filter((run) => search.toLowerCase().split(/\s+/).every((word) =>
    [run.name, run.state, run.mode, run.environment, run.model, run.loss, run.note, ...run.tags].some((each) => each.toLowerCase().includes(word))));

  const drawn = () => (chosen.size ? runs.filter((run) => chosen.has(run.name)) : fitting()).slice(0, SHOWN);

  function fill() {
    const found = fitting();
    words.textContent = `${counted(found.length, "run")}${found.length < runs.length ? ` of ${runs.length}` : ""}, ${size(found.reduce((sum, run) => sum + run.bytes, 0))}`;
    rows.replaceChildren(...found.map(row));
  }

  function row(run) {
    const box = h("input", { type: "checkbox", checked: chosen.has(run.name), "aria-label": `Choose ${run.name}`, onchange: () => (box.checked ? chosen.add(run.name) : chosen.delete(run.name), draw()) });
    const steps = run.steps === null ? "" : run.steps_asked ? `${run.steps} of ${run.steps_asked}` : run.steps;
    return h("tr", { title: run.problem || null, "data-run": run.name }, h("td", {}, box), h("td", {}, h("a", { href: link(["run", run.name]) }, run.name)), h("td", {}, badge(run.state)),
      h("td", {}, run.mode), h("td", {}, run.environment), h("td", { class: "long" }, run.model), h("td", {}, run.loss), h("td", { class: "number" }, steps), h("td", { class: "number" }, number(run.reward)),
      h("td", {}, spark(run.curve)), h("td", { class: "number" }, size(run.bytes)), h("td", { class: "long", title: run.note || null, dir: "auto" }, run.tags.map((tag) => [h("span", { class: "tag" }, tag), " "]), h("span", { class: "quiet" }, run.note)));
  }

  async function draw() {
    const own = drawn().filter((run) => run.state !== "damaged");
    if (!own.length) return void plot.replaceChildren();
    const run = own.map((each) => each.name);
    const { names } = await get("/api/metrics", { run }, signal);
    if (!names.length) return void plot.replaceChildren();
    if (!names.includes(metric)) metric = names.includes("policy/loss") ? "policy/loss" : names[0];
    if (picker.options.length !== names.length) picker.replaceChildren(...names.map((name) => h("option", {}, name)));
    picker.value = metric;
    const { curves } = await get("/api/metrics", { run, metric }, signal);
    let series = own.map((each, index) => ({ name: each.name, arm: `${each.environment} ${each.model} ${each.loss} ${each.mode} ${each.name.replace(/seed[-_]?\d+/, "")}`, color: color(index), points: smoothed(curves[each.name][metric], smoothing) }));
    if (isBanded) series = bands(series);
    series = series.filter((each) => each.points.length);
    plot.replaceChildren(chart(series, { label: metric, pick: (one, step) => open(one.name, step) }), legend(series));
  }

  async function open(run, step) {
    const { files } = await get(path("runs", run), {}, signal);
    const file = files.find((each) => each.kind === "step" && each.step === step);
    location.hash = file ? link(["run", run, file.name]) : link(["run", run]);
  }

  async function load() {
    const found = await get("/api/runs", {}, signal);
    runs = found.runs;
    data.replaceChildren(...(found.data || []).map((file) => h("a", { class: "button", href: link(["data"], { file }) }, `data: ${file}`)));
    fill();
    await draw();
  }

  const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: smoothing, "aria-label": "Smoothing", oninput: () => ((smoothing = Number(slider.value)), draw()) });
  const seeds = h("button", { type: "button", "aria-pressed": String(isBanded), title: "One curve for the folders seed_0, seed_1 and so on, with a band from the least to the most", onclick: () => ((isBanded = !isBanded), seeds.setAttribute("aria-pressed", isBanded), draw()) }, "bands over seeds");
  const field = h("input", { type: "search", class: "wide", placeholder: "search: names, settings, tags, notes", "aria-label": "Search", value: search, oninput: () => ((search = field.value), fill(), draw()) });
  return {
    keys: rowKeys(rows, (one) => (location.hash = link(["run", one.dataset.run]))),
    renew: load,
    async show(given) {
      signal = given;
      await load();
      const compare = () => (location.hash = link(["compare"], { run: drawn().map((run) => run.name) }));
      return [h("h1", {}, "Runs"), h("div", { class: "row" }, field, h("button", { type: "button", onclick: compare }, "compare"), !isExport && h("a", { class: "button", href: "#/new" }, "new run"), data), words,
        h("div", { class: "card" }, h("div", { class: "row" }, picker, h("label", {}, "smoothing ", slider), seeds, h("span", { class: "quiet" }, "click a point to see its rollouts")), plot), h("p"),
        h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, h("table", {}, h("thead", {}, h("tr", {}, [h("span", { class: "sr" }, "choose"), "run", "state", "mode", "environment", "model", "loss", "steps", "reward", "curve", "size", "tags and note"].map((each) => h("th", { scope: "col" }, each)))), rows))];
    },
  };
}

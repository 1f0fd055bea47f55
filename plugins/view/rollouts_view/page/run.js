// One run: curves, its steps, its settings and your words about it.

import { badge, counted, h, link, number, say, short, size, table } from "./dom.js";
import { get, isExport, path, post } from "./api.js";
import { chart, color } from "./chart.js";

const FIRST = ["reward/mean", "eval/reward_mean", "policy/loss", "policy/entropy", "policy/kl_ref", "rollout/tokens", "rollout/turns", "mismatch/k3", "optim/grad_norm", "time/step"];
const FILES_SHOWN = 60;

export function runPage(run) {
  const charts = h("div", { class: "cards" }), files = h("div"), head = h("div"), all = h("div");
  const extra = new Set();
  let signal, names = [], areFilesAll = false, before = "";

  async function load() {
    const found = await get(path("runs", run), {}, signal);
    const text = JSON.stringify(found);
    if (text === before) return;
    before = text;
    names = Object.keys(found.metrics);
    head.replaceChildren(...summary(found));
    files.replaceChildren(...steps(found));
    const shown = [...FIRST.filter((name) => names.includes(name)), ...extra];
    await draw(shown.length ? shown : names.slice(0, 6), found.files);
    all.replaceChildren(h("div", { class: "row" }, names.map((name) => h("button", { type: "button", disabled: isExport, onclick: () => (extra.add(name), (before = ""), load()) }, `${name} ${number(found.metrics[name])}`))));
    return found;
  }

  function summary({ run: info, notes, summary: ended, settings }) {
    const result = ended.evaluation || {};
    const words = [["state", badge(info.state)], info.problem && ["problem", h("span", { class: "error" }, info.problem)], info.steps !== null && ["steps", `${info.steps}${info.steps_asked ? ` of ${info.steps_asked}` : ""}`],
      ["reward", number(info.reward)], result.before && result.after && ["held-out tasks", `${number(result.before.reward_mean)} before, ${number(result.after.reward_mean)} after, over ${result.after.tasks} tasks`],
      ["started", info.started || "–"], ["size", size(info.bytes)], ended.wall_seconds && ["time", `${number(ended.wall_seconds, 0)} s`], ["tags", labels(info)], ["note", noteField(info)], ...notes.map((note) => ["note", note])];
    const rows = settings?.sft?.data || settings?.data, has = (rows?.name ?? rows) && ["sft", "sft+rl"].includes(settings.mode);
    const more = !isExport && settings !== null && [h("a", { class: "button", href: link(["new"], { run }) }, "new from this run"), has && h("a", { class: "button", href: link(["data"], { run }) }, "its data")];
    return [h("h1", {}, run), h("div", { class: "row" }, h("a", { class: "button", href: link(["run", run, "health"]), title: "its time by phase, its engine, failures and throughput" }, "Health"), more), h("dl", {}, words.filter(Boolean).map(([key, value]) => [h("dt", {}, key), h("dd", {}, value)])), settings === null && h("p", { class: "error" }, "Its settings cannot be read.")].filter(Boolean);
  }

  function labels(info) {
    if (isExport) return info.tags.join(" ");
    const field = h("input", { value: info.tags.join(" "), "aria-label": "Tags, separated by spaces", placeholder: "best lora", onchange: () => save({ tags: field.value.split(/\s+/).filter(Boolean) }) });
    return field;
  }

  function noteField(info) {
    if (isExport) return info.note;
    const field = h("input", { value: info.note, "aria-label": "Note", placeholder: "what this run is", onchange: () => save({ note: field.value }) });
    return field;
  }

  async function save(words) {
    try {
      await post(path("runs", run, "labels"), words);
      say("Saved.");
    } catch (error) {
      head.append(h("p", { class: "error", role: "alert" }, error.message));
    }
  }

  function steps(found) {
    const shown = areFilesAll ? found.files : found.files.slice(-FILES_SHOWN);
    const more = found.files.length - shown.length;
    const rows = [...shown].reverse().map((file) => [h("a", { href: link(["run", run, file.name]) }, file.name), file.kind, file.step === null ? "" : file.step, file.tokens ? "recorded" : "", size(file.bytes)]);
    if (!rows.length) return [h("p", { class: "quiet" }, "No trajectories yet.")];
    return [table(["trajectories", "kind", "step", "tokens", "size"], rows, { numbers: new Set([2, 4]) }), more > 0 && h("button", { type: "button", onclick: () => ((areFilesAll = true), (before = ""), load()) }, `${more} more`)].filter(Boolean);
  }

  const card = (name, own, pick) => h("div", { class: "card" }, h("h3", {}, name), chart([{ name, color: color(0), points: own[name] }], { width: 350, height: 150, label: name, pick }));

  async function draw(metrics, known) {
    if (!metrics.length) return void charts.replaceChildren(h("p", { class: "quiet" }, "No metrics yet."));
    const { curves } = await get("/api/metrics", { run, metric: metrics }, signal);
    const own = curves[run], pick = (one, step) => {
      const file = known.find((each) => each.kind === "step" && each.step === step);
      if (file) location.hash = link(["run", run, file.name]);
    };
    charts.replaceChildren(...metrics.map((name) => card(name, own, pick)));
  }

  return {
    renew: load,
    async show(given) {
      signal = given;
      const found = await load();
      const rows = Object.entries(flat(found.settings || {})).map(([key, value]) => [key, short(value)]);
      return [head, h("h2", {}, "Curves"), charts, h("h2", {}, "Trajectories"), files, h("h2", {}, "Settings"), h("details", {}, h("summary", {}, counted(rows.length, "setting")), table(["setting", "value"], rows)),
        h("details", {}, h("summary", {}, "All metrics: click one to see its curve"), all)];
    },
  };
}

export function flat(value, name = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return { [name]: value };
  return Object.assign({}, ...Object.entries(value).map(([key, inner]) => flat(inner, key === "name" && name ? name : name ? `${name}.${key}` : key)));
}

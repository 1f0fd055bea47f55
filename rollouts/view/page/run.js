// One run: curves, its steps, where its time goes, its settings and your words about it.

import { badge, counted, h, link, number, say, short, size, table } from "./dom.js";
import { get, isExport, path, post } from "./api.js";
import { chart, color } from "./chart.js";

const FIRST = ["reward/mean", "eval/reward_mean", "policy/loss", "policy/entropy", "policy/kl_ref", "rollout/tokens", "rollout/turns", "mismatch/k3", "optim/grad_norm", "time/step"];
const PHASES = ["time/generate", "time/forward_backward", "time/save", "sync/seconds"];
const HEALTH = ["perf/gen_tok_s", "perf/train_tok_s", "perf/peak_gib", "staleness/mean", "sync/probe", "rollout/retried", "rollout/tool_fail_frac", "group/kept_frac", "optim/skipped"];
const FILES_SHOWN = 60;

export function runPage(run) {
  const charts = h("div", { class: "cards" }), files = h("div"), head = h("div"), times = h("div"), all = h("div"), health = h("div", { class: "cards" }), causes = h("div");
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
    causes.replaceChildren(...reasons(await get(path("runs", run, "causes"), {}, signal)));
    all.replaceChildren(h("div", { class: "row" }, names.map((name) => h("button", { type: "button", disabled: isExport, onclick: () => (extra.add(name), (before = ""), load()) }, `${name} ${number(found.metrics[name])}`))));
    return found;
  }

  function summary({ run: info, notes, summary: ended, settings }) {
    const result = ended.evaluation || {};
    const words = [["state", badge(info.state)], info.problem && ["problem", h("span", { class: "error" }, info.problem)], info.steps !== null && ["steps", `${info.steps}${info.steps_asked ? ` of ${info.steps_asked}` : ""}`],
      ["reward", number(info.reward)], result.before && result.after && ["held-out tasks", `${number(result.before.reward_mean)} before, ${number(result.after.reward_mean)} after, over ${result.after.tasks} tasks`],
      ["started", info.started || "–"], ["size", size(info.bytes)], ended.wall_seconds && ["time", `${number(ended.wall_seconds, 0)} s`], ["tags", labels(info)], ["note", noteField(info)], ...notes.map((note) => ["note", note])];
    const rows = settings?.sft?.data || settings?.data, has = (rows?.name ?? rows) && ["sft", "sft+rl"].includes(settings.mode);
    const more = !isExport && settings !== null && h("div", { class: "row" }, h("a", { class: "button", href: link(["new"], { run }) }, "new from this run"), has && h("a", { class: "button", href: link(["data"], { run }) }, "its data"));
    return [h("h1", {}, run), more, h("dl", {}, words.filter(Boolean).map(([key, value]) => [h("dt", {}, key), h("dd", {}, value)])), settings === null && h("p", { class: "error" }, "Its settings cannot be read.")].filter(Boolean);
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

  function reasons({ causes: found, files, of, rollouts }) {
    const words = `Of ${counted(rollouts, "rollout")} in ${files < of ? `the newest ${files} of ${of} files` : counted(files, "file")}`;
    if (!found.length) return [h("p", { class: "quiet" }, `${words}, none failed, was cut off, or was left out of training.`)];
    const rows = found.map((each) => [badge(each.what), h("span", { dir: "auto" }, each.why || "–"), each.count, h("a", { href: link(["run", run, each.file, String(each.line)]) }, "an example")]);
    return [h("p", { class: "quiet" }, `${words}:`), table(["what", "why", "rollouts", ""], rows, { numbers: new Set([2]) })];
  }

  const card = (name, own, pick) => h("div", { class: "card" }, h("h3", {}, name), chart([{ name, color: color(0), points: own[name] }], { width: 350, height: 150, label: name, pick }));

  async function draw(metrics, known) {
    const has = (name) => names.includes(name), phases = PHASES.filter(has), healthy = HEALTH.filter(has), wanted = [...new Set([...metrics, ...phases, ...healthy])];
    if (!wanted.length) return void charts.replaceChildren(h("p", { class: "quiet" }, "No metrics yet."));
    const { curves } = await get("/api/metrics", { run, metric: wanted }, signal);
    const own = curves[run], pick = (one, step) => {
      const file = known.find((each) => each.kind === "step" && each.step === step);
      if (file) location.hash = link(["run", run, file.name]);
    };
    charts.replaceChildren(...metrics.map((name) => card(name, own, pick)));
    health.replaceChildren(...healthy.map((name) => card(name, own, pick)));
    if (phases.length) {
      const series = phases.map((name, index) => ({ name, color: color(index), points: own[name] }));
      const sums = phases.map((name) => own[name].reduce((sum, [, value]) => sum + value, 0)), total = sums.reduce((a, b) => a + b, 0) || 1;
      times.replaceChildren(h("div", { class: "card" }, chart(series, { height: 180, label: "seconds by phase", pick }), h("div", { class: "legend" }, series.map((each, index) => h("span", {}, h("i", { style: `background:${each.color}` }), `${each.name}: ${Math.round((100 * sums[index]) / total)} %`)))));
    }
  }

  return {
    renew: load,
    async show(given) {
      signal = given;
      const found = await load();
      const rows = Object.entries(flat(found.settings || {})).map(([key, value]) => [key, short(value)]);
      return [head, h("h2", {}, "Curves"), charts, h("h2", {}, "Trajectories"), files, h("h2", {}, "Health"), health, causes, h("h2", {}, "Seconds of each step"), times, h("h2", {}, "Settings"), h("details", {}, h("summary", {}, counted(rows.length, "setting")), table(["setting", "value"], rows)),
        h("details", {}, h("summary", {}, "All metrics: click one to see its curve"), all)];
    },
  };
}

export function flat(value, name = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return { [name]: value };
  return Object.assign({}, ...Object.entries(value).map(([key, inner]) => flat(inner, key === "name" && name ? name : name ? `${name}.${key}` : key)));
}

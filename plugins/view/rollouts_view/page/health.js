// The health of a run: where its time goes, what its engine served, why rollouts failed, and how fast it is.

import { badge, counted, h, link, number, short, size, table } from "./dom.js";
import { get, isExport, path } from "./api.js";
import { chart, color } from "./chart.js";
import { timeline } from "./timeline.js";

const PHASES = ["time/wait", "time/generate", "time/forward_backward", "time/save", "sync/seconds"];
const HEALTH = ["perf/gen_tok_s", "perf/train_tok_s", "perf/tflops", "perf/peak_gib", "staleness/mean", "rollout/latency_p95", "sync/probe", "rollout/retried", "rollout/tool_fail_frac", "rollout/infra_fail_frac", "group/kept_frac", "optim/skipped"];

export function healthPage(run, query) {
  const plot = h("div"), engines = h("div"), proofs = h("div"), causes = h("div"), phases = h("div"), charts = h("div", { class: "cards" }), quiet = h("p", { class: "quiet" });
  const step = h("h3"), before = h("button", { type: "button", onclick: () => go(-1) }, "before ["), next = h("button", { type: "button", onclick: () => go(1) }, "next ]");
  let signal, files = [], chosen = query.get("at"), last = "";

  const go = (by) => {
    const at = files.indexOf(chosen) + by;
    if (at >= 0 && at < files.length) (chosen = files[at]), drawTimeline();
  };

  async function drawTimeline() {
    [before.disabled, next.disabled] = [files.indexOf(chosen) <= 0, files.indexOf(chosen) === files.length - 1];
    step.textContent = chosen;
    const found = await get(path("runs", run, chosen, "times"), {}, signal);
    plot.replaceChildren(...[timeline(found, (line) => (location.hash = link(["run", run, chosen, String(line)])))].flat().filter(Boolean));
  }

  // What the engine is, how fast it answers, and which weights it served.
  function ofEngine({ engine, training, hardware, metrics }) {
    const settings = Object.entries(engine).filter(([key]) => key !== "name").map(([key, value]) => `${key} ${short(value)}`).join(" · ");
    const gpus = (hardware.gpus || []).length ? short(hardware.gpus) : hardware.cpus ? `${hardware.cpus} CPUs` : "";
    const speed = ["perf/gen_tok_s", "rollout/latency_p50", "rollout/latency_p95", "rollout/retried"].filter((name) => name in metrics).map((name) => [name, ...spread(metrics[name])]);
    return [h("p", {}, h("strong", {}, engine.name || "unknown"), ` samples, ${training.name || "unknown"} trains. ${gpus}`), settings && h("p", { class: "quiet" }, settings), speed.length > 0 && table(["metric", "last", "mean", "least", "greatest"], speed, { numbers: new Set([1, 2, 3, 4]) })].filter(Boolean);
  }

  const spread = (each) => [each.last, each.mean, each.least, each.most].map((value) => number(value));

  // Each sync ends with a proof: engine and trainer compute the same numbers for the same tokens, or the run fails.
  function ofSync({ metrics }) {
    const synced = metrics["sync/version"], probe = metrics["sync/probe"], bytes = metrics["sync/bytes"];
    if (!synced) return [h("p", { class: "quiet" }, "No weights were sent.")];
    const words = probe ? `After each of ${counted(probe.steps, "sync")}, engine and trainer gave the same tokens the same log probability, but for ${number(probe.most, 6)} nats at most; else the run had failed.` : "The engine in this process samples with the trainer's own weights, so nothing is sent and nothing has to be proved.";
    const rows = ["sync/seconds", "sync/probe", "sync/bytes", "mismatch/abs_logp_mean", "mismatch/abs_logp_max", "mismatch/k3", "staleness/mean", "staleness/max", "staleness/dropped"].filter((name) => name in metrics).map((name) => [name, ...spread(metrics[name])]);
    return [h("p", {}, `Version ${synced.last} is served. ${words}${bytes ? ` ${size(bytes.mean)} each.` : ""}`), table(["metric", "last", "mean", "least", "greatest"], rows, { numbers: new Set([1, 2, 3, 4]) })];
  }

  function ofFailures({ causes: found, files: read, of, rollouts }) {
    const words = `Of ${counted(rollouts, "rollout")} in ${read < of ? `the newest ${read} of ${of} files` : counted(read, "file")}`;
    if (!found.length) return [h("p", { class: "quiet" }, `${words}, none failed, was cut off, or was left out of training.`)];
    const rows = found.map((each) => [badge(each.what), h("span", { dir: "auto" }, each.why || "–"), each.count, h("a", { href: link(["run", run, each.file, String(each.line)]) }, "an example")]);
    return [h("p", { class: "quiet" }, `${words}:`), table(["what", "why", "rollouts", "open"], rows, { numbers: new Set([2]) })];
  }

  async function drawCurves(names) {
    const has = (name) => names.includes(name), wanted = [...new Set([...PHASES, ...HEALTH])].filter(has);
    if (!wanted.length) return void charts.replaceChildren(h("p", { class: "quiet" }, "No metrics yet."));
    const own = (await get("/api/metrics", { run, metric: wanted }, signal)).curves[run];
    const pick = (one, at) => files.includes(stepFile(at)) && ((chosen = stepFile(at)), drawTimeline(), scrollTo(0, 0));
    const isZero = (name) => own[name].every(([, value]) => value === 0), zeros = HEALTH.filter(has).filter(isZero);
    quiet.textContent = zeros.length ? `Always 0: ${zeros.join(", ")}.` : "";
    charts.replaceChildren(...HEALTH.filter(has).filter((name) => !isZero(name)).map((name) => h("div", { class: "card" }, h("h3", {}, name), chart([{ name, color: color(0), points: own[name] }], { width: 350, height: 150, label: name, pick }))));
    const series = PHASES.filter(has).map((name, index) => ({ name, color: color(index), points: own[name] }));
    if (series.length) phases.replaceChildren(h("div", { class: "card" }, chart(series, { height: 180, label: "seconds by phase", pick }), h("div", { class: "legend" }, series.map((each) => h("span", {}, h("i", { style: `background:${each.color}` }), `${each.name}: mean ${number(each.points.reduce((sum, [, value]) => sum + value, 0) / each.points.length)} s`)))));
  }

  const newest = () => [...files].reverse().find((name) => name.startsWith("step_")) || files[files.length - 1];
  const stepFile = (at) => `step_${String(at).padStart(6, "0")}`;

  async function load() {
    const found = await get(path("runs", run, "health"), {}, signal), text = JSON.stringify(found);
    if (text === last) return;
    const isNewest = chosen === newest();
    [last, files] = [text, found.times];
    if (isNewest || !files.includes(chosen)) chosen = newest();
    if (chosen) await drawTimeline();
    else plot.replaceChildren(h("p", { class: "quiet" }, isExport ? "No times." : "No times yet. Runs of earlier versions have none."));
    engines.replaceChildren(...ofEngine(found)), proofs.replaceChildren(...ofSync(found));
    await drawCurves(Object.keys((await get(path("runs", run), {}, signal)).metrics));
    causes.replaceChildren(...ofFailures(await get(path("runs", run, "causes"), {}, signal)));
  }

  return {
    keys: { "[": () => go(-1), "]": () => go(1) },
    renew: load,
    async show(given) {
      signal = given;
      await load();
      return [h("h1", {}, "Health"), h("h2", {}, "Timeline"), h("div", { class: "row" }, before, next, step), h("div", { class: "card" }, plot), h("h2", {}, "Seconds of each step"), phases,
        h("h2", {}, "Failures by cause"), causes, h("h2", {}, "Engine"), engines, h("h2", {}, "Sync proofs"), proofs, h("h2", {}, "Throughput and steadiness"), charts, quiet];
    },
  };
}

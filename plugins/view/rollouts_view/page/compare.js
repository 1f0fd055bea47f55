// What differs between runs, and who solved which task.

import { counted, h, link, number, short, table } from "./dom.js";
import { get, path } from "./api.js";
import { flat } from "./run.js";
import { chart, color, legend } from "./chart.js";

export function comparePage(query) {
  const runs = query.getAll("run");
  let metric = "reward/mean", signal;
  const plot = h("div");

  async function draw() {
    const { curves } = await get("/api/metrics", { run: runs, metric }, signal);
    const series = runs.map((name, index) => ({ name, color: color(index), points: curves[name][metric] }));
    plot.replaceChildren(chart(series, { label: metric }), legend(series));
  }

  function paired({ run, paired: found, tasks, total, file }, first) {
    const verdict = found && (found.verdict === null ? `There is no verdict, because only ${found.tasks} tasks were judged in both, and it takes 5; the mean difference is ${found.difference > 0 ? "+" : ""}${number(found.difference)}.` : `${run} is ${found.verdict === "no difference shown" ? "not shown to differ from" : `${found.verdict} than`} ${first.run}: ${found.difference > 0 ? "+" : ""}${number(found.difference)}, 95 % interval ${number(found.low)} to ${number(found.high)}, over ${found.tasks} tasks of both`);
    const at = (each) => JSON.stringify(each);
    const rows = tasks.map((each) => {
      const gain = each.second.reward - each.first.reward;
      return [h("span", { dir: "auto" }, each.task), h("a", { href: link(["run", first.run, first.file, String(each.first.line)]) }, number(each.first.reward)), h("a", { href: link(["run", run, file, String(each.second.line)]) }, number(each.second.reward)),
        h("span", { class: gain > 0 ? "good" : gain < 0 ? "bad" : "" }, (gain > 0 ? "+" : "") + number(gain)), h("a", { href: link(["side"], { at: [at([first.run, first.file, String(each.first.line)]), at([run, file, String(each.second.line)])] }) }, "side by side")];
    });
    return [h("h2", {}, `${run} against ${first.run}`), h("p", {}, verdict || (tasks.length > 1 ? "They were not compared task by task." : "Fewer than two tasks were judged in both, so nothing can be said.")),
      rows.length > 0 && table(["task", first.run, run, "difference", "both"], rows, { numbers: new Set([1, 2, 3]) }), rows.length < total && h("p", { class: "quiet" }, `${total - rows.length} tasks between are not shown.`)].filter(Boolean);
  }

  return {
    async show(given) {
      signal = given;
      const found = await get("/api/compare", { run: runs }, signal), { names } = await get("/api/metrics", { run: runs }, signal);
      const settings = Object.entries(found.settings).map(([name, values]) => [name, ...values.map(short)]);
      const evaluations = found.evaluations.flatMap((each, index) => each.map((one) => [runs[index], one.when, number(one.reward), one.stderr === null ? "" : `± ${number(one.stderr)}`, number(one.greedy), one.tasks]));
      const all = await Promise.all(runs.map(async (run) => flat((await get(path("runs", run), {}, signal)).settings || {})));
      const same = Object.entries(all[0]).filter(([key, value]) => all.every((each) => JSON.stringify(each[key]) === JSON.stringify(value))).map(([key, value]) => [key, short(value)]);
      if (!names.includes(metric)) metric = names[0];
      const picker = h("select", { "aria-label": "Metric", value: metric, onchange: () => ((metric = picker.value), draw()) }, names.map((name) => h("option", { selected: name === metric }, name)));
      if (names.length) await draw();
      return [h("h1", {}, "Compare"), found.notes.map((note) => h("p", { class: "error" }, note)), h("h2", {}, "Settings that differ"), settings.length ? table(["setting", ...runs], settings) : h("p", {}, "The settings are the same."), h("details", {}, h("summary", {}, `${counted(same.length, "setting")} that all have`), table(["setting", "in all"], same)),
        names.length > 0 && [h("h2", {}, "Curves"), h("div", { class: "card" }, picker, plot)], evaluations.length > 0 && [h("h2", {}, "Held-out tasks"), table(["run", "when", "reward", "error", "greedy", "tasks"], evaluations, { numbers: new Set([2, 4, 5]) })],
        found.others.map((each) => paired(each, found.first))].flat(3).filter(Boolean);
    },
  };
}

// The rollouts of one step: sorted, filtered, in groups.

import { badge, counted, h, link, number, rowKeys, say } from "./dom.js";
import { get, isExport, path } from "./api.js";

const COUNT = 100;
const LONG = new Set(["task", "error", "why", "dropped"]);
const FIRST = ["line", "group", "rollout", "reward", "task", "advantage", "status", "dropped", "turns", "tokens", "sampled", "staleness"];

export function tablePage(run, file, query) {
  const where = query.get("where") || "", sort = query.get("sort") || "", desc = query.get("desc") || "", from = Number(query.get("from") || 0);
  const body = h("tbody"), head = h("tr"), words = h("p", { class: "quiet" }), problems = h("div"), paging = h("div", { class: "row" });
  const field = h("input", { type: "search", class: "wide", value: where, disabled: isExport, "aria-label": "Filter", placeholder: 'filter: reward < 0.5 and "gcd" in task', onkeydown: (event) => event.key === "Enter" && go({ where: field.value, from: 0 }) });
  const message = h("p", { class: "error", role: "alert" });
  let signal, isDone = false, last = "";

  const go = (changes) => (location.hash = link(["run", run, file], strip({ where, sort, desc, from, ...changes })));

  async function load() {
    let found;
    try {
      found = await get(path("runs", run, file), isExport ? {} : { where, sort, desc, from: from || "", count: COUNT }, signal);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      message.textContent = error.message;
      return;
    }
    message.textContent = "";
    const text = JSON.stringify(found);
    if (text !== last) fill(found);
    [last, isDone] = [text, found.done];
  }

  function fill(found) {
    const names = found.columns.map((each) => each.name), kinds = Object.fromEntries(found.columns.map((each) => [each.name, each.kind]));
    const used = new Set(found.rows.flatMap(Object.keys));
    const shown = [...FIRST, ...names.filter((name) => !FIRST.includes(name))].filter((name) => names.includes(name) && (used.has(name) || name === sort));
    head.replaceChildren(...shown.map((name) => column(name, kinds[name])));
    body.replaceChildren(...found.rows.map((row) => line(row, shown, kinds)));
    const { summary } = found, counts = ["status", "dropped"].flatMap((name) => Object.entries(summary[name] || {}).map(([value, count]) => `${value}: ${count.toLocaleString("en")}`));
    words.replaceChildren(`${counted(found.matched, "row")}${found.matched < found.lines ? ` of ${found.lines.toLocaleString("en")}` : ""}`, found.done ? "" : ` · reading: ${Math.round((100 * found.scanned) / found.lines)} %`,
      summary.reward !== undefined ? ` · mean reward ${number(summary.reward)} of ${summary.judged.toLocaleString("en")} judged` : "", counts.length ? ` · ${counts.join(" · ")}` : "");
    problems.replaceChildren(...(found.damaged ? [h("details", {}, h("summary", { class: "error" }, `${counted(found.damaged, "line")} damaged`), found.problems.map((each) => h("p", { class: "error" }, `line ${each.line + 1}: ${each.error}`)))] : []));
    paging.replaceChildren(...(found.matched > found.rows.length ? [h("button", { type: "button", disabled: from === 0, onclick: () => go({ from: Math.max(0, from - COUNT) }) }, "before"),
      `${(from + 1).toLocaleString("en")} to ${(from + found.rows.length).toLocaleString("en")}`, h("button", { type: "button", disabled: from + COUNT >= found.matched, onclick: () => go({ from: from + COUNT }) }, "next")] : []));
    say(words.textContent);
  }

  function column(name, kind) {
    const isOn = sort === name;
    const button = h("button", { type: "button", disabled: isExport, onclick: () => go({ sort: name, desc: isOn && !desc ? "1" : "", from: 0 }) }, name + (isOn ? (desc ? " ▾" : " ▴") : ""));
    return h("th", { scope: "col", class: kind === "number" && "number", "aria-sort": isOn ? (desc ? "descending" : "ascending") : null }, button);
  }

  function line(row, shown, kinds) {
    const cells = shown.map((name) => {
      const value = row[name];
      if (name === "line") return h("td", { class: "number" }, h("a", { href: link(["run", run, file, String(value)]) }, String(value)));
      if (name === "group" && !isExport) return h("td", { class: "number" }, h("a", { href: link(["side"], { run, file, group: row.line }), title: "the group side by side" }, number(value)));
      if (name === "status") return h("td", {}, badge(value));
      return h("td", { class: kinds[name] === "number" ? "number" : LONG.has(name) ? "long" : null, title: LONG.has(name) ? value : null, dir: LONG.has(name) ? "auto" : null }, kinds[name] === "number" ? (value === undefined ? "–" : number(value)) : value || "");
    });
    return h("tr", { class: row.group % 2 ? "odd" : null, "data-line": row.line }, cells);
  }

  return {
    keys: rowKeys(body, (row) => (location.hash = link(["run", run, file, row.dataset.line]))),
    renew: () => (message.textContent ? null : load()),
    async show(given) {
      signal = given;
      await load();
      const examples = ["reward == None", "reward < 0.5", "dropped != ''", "status != 'completed'", "abs(advantage) > 1"];
      return [h("h1", {}, `${run} · ${file}`), h("div", { class: "row" }, field, h("button", { type: "button", disabled: isExport, onclick: () => go({ where: field.value, from: 0 }) }, "filter"), where && h("button", { type: "button", onclick: () => go({ where: "", from: 0 }) }, "all")),
        !isExport && h("p", { class: "quiet" }, "for example: ", examples.map((each, index) => [index ? " · " : "", h("a", { href: link(["run", run, file], { where: each }) }, h("code", {}, each))]), " · ", h("a", { href: link(["run", run, "health"], { at: file }) }, "timeline")), message, words, problems,
        h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, h("table", {}, h("thead", {}, head), body)), paging].filter(Boolean);
    },
  };
}

const strip = (values) => Object.fromEntries(Object.entries(values).filter(([, value]) => value !== "" && value !== 0));

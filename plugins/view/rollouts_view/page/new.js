// The settings of a new run: fields from the settings of the core and of components, checked by the server as you type.

import { h, say } from "./dom.js";
import { get, post } from "./api.js";
import { componentBlock } from "./component.js";
import { fieldOf, keyOf } from "./field.js";
import { filePanel } from "./file.js";

const CHECK_MS = 250;
const KEPT = "rollouts-draft";
const OPEN = new Set(["What", "Algorithm"]);

let draft = null; // it outlives the page, so that a look at a run does not lose it

const empty = () => ({ values: {}, components: {}, tables: "" });

function remembered() {
  try {
    return { ...empty(), ...JSON.parse(sessionStorage.getItem(KEPT) || "{}") };
  } catch {
    return empty();
  }
}

export function newPage(query) {
  const fields = new Map(), groups = [], notes = h("ul", { class: "notes" }), from = h("p", { class: "quiet" });
  let form, signal, timer, count = 0, shown = "", panel;

  const search = h("input", { type: "search", "aria-label": "Search settings", placeholder: "search settings", oninput: () => narrow() });
  const only = h("input", { type: "checkbox", id: "only-set", onchange: () => narrow() });

  function changed(at) {
    sessionStorage.setItem(KEPT, JSON.stringify(draft));
    if (at === "mode" || at === "loss") groups.forEach((group) => group.blocks.forEach((block) => block.renew?.(at)));
    if (at === "mode") narrow();
    clearTimeout(timer);
    timer = setTimeout(check, CHECK_MS);
  }

  async function check() {
    const number = ++count;
    let found;
    try {
      found = await post("/api/settings/check", draft);
    } catch (error) {
      return void (signal.aborted || panel.failed(error.message));
    }
    if (number !== count || signal.aborted) return; // a later one is on its way
    const faults = new Map(found.faults.map(({ at, words }) => [keyOf(at), words]));
    fields.forEach((field, key) => field.fault(faults.get(key) || ""));
    const text = found.faults.length ? `${found.faults.length} to mend` : "No mistakes found.";
    if (text !== shown) say((shown = text));
    panel.show(found, (at) => fields.get(keyOf(at)));
    notes.replaceChildren(...found.notes.map((note) => h("li", {}, note)));
    narrow();
  }

  function narrow() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean), isEval = draft.values.mode === "eval";
    for (const { box, blocks, given } of groups) {
      let set = 0, seen = 0;
      for (const block of blocks) {
        const isSet = block.isSet(), fits = words.every((word) => block.words.includes(word));
        const isHidden = !fits || (only.checked && !isSet) || (isEval && block.isOfTraining && !isSet);
        block.element.hidden = isHidden;
        (set += isSet), (seen += !isHidden);
      }
      box.hidden = !seen;
      given.textContent = set ? ` · ${set} set` : "";
      if (words.length && seen) box.open = true;
    }
  }

  const context = {
    draft: () => draft, changed, fields,
    loss: () => draft.components.loss?.[0]?.name || (draft.values.mode === "sft" ? "sft" : "grpo"),
    isGone: () => signal.aborted,
  };

  function coreBlock(field) {
    const set = (value) => {
      if (value === "" || (Array.isArray(value) && !value.some((line) => line.trim()))) delete draft.values[field.name];
      else draft.values[field.name] = value;
      changed(field.name);
    };
    const made = fieldOf(field, draft.values[field.name], set);
    fields.set(keyOf(["values", field.name]), made);
    return { element: made.element, isSet: () => field.name in draft.values, words: `${field.name} ${field.doc}`.toLowerCase(), isOfTraining: field.of_eval === false };
  }

  function tablesBlock() {
    const doc = Object.entries(form.tables).map(([name, words]) => `[${name}] ${words}`).join(" ");
    const made = fieldOf({ name: "tables", doc, type: "TOML", choices: [], is_list: true, shown: "", rows: 6 }, draft.tables.split("\n"), (lines) => ((draft.tables = lines.join("\n")), changed("tables")));
    fields.set(keyOf(["tables"]), made);
    return { element: made.element, isSet: () => !!draft.tables.trim(), words: `tables ${doc}`.toLowerCase() };
  }

  function group(name, blocks) {
    const given = h("span", { class: "quiet" }), box = h("details", { class: "group", open: OPEN.has(name) }, h("summary", {}, h("h2", {}, name), given), blocks.map((block) => block.element));
    groups.push({ box, blocks, given });
    return box;
  }

  function sections() {
    fields.clear(), (groups.length = 0);
    const boxes = form.groups.map(({ name, fields: own }) => group(name, own.map((field) => (field.is_component ? componentBlock(field, form.kinds[field.name], context) : coreBlock(field)))));
    const known = new Set(form.groups.flatMap((each) => each.fields.map((field) => field.name)));
    const unknown = Object.keys(draft.values).filter((name) => !known.has(name));
    if (unknown.length) boxes.unshift(group("Not settings", unknown.map((name) => coreBlock({ name, doc: "", type: "", choices: [], shown: "" }))));
    return [...boxes, group("Tables", [tablesBlock()])];
  }

  async function begin() {
    const run = query.get("run"), file = query.get("file");
    if (!run && !file) return void (draft ??= remembered());
    const found = await get("/api/settings/draft", run ? { run } : { root: query.get("root"), file }, signal);
    draft = { ...empty(), ...found.draft };
    from.replaceChildren(`Begun from ${run || file}.`, ...found.notes.map((note) => h("span", {}, ` ${note}.`)));
    history.replaceState(null, "", "#/new"); // so that coming back does not read it again
    return run ? null : { root: query.get("root"), name: file };
  }

  return {
    async show(given) {
      signal = given;
      form = await get("/api/settings", {}, signal);
      const place = await begin();
      panel = filePanel(form, context, place);
      const boxes = h("div", {}, sections());
      const again = () => ((draft = empty()), from.replaceChildren(), (search.value = ""), boxes.replaceChildren(...sections()), changed("mode"), say("Everything is at its default."));
      narrow(), check();
      return [h("h1", {}, "New run"), h("p", { class: "quiet" }, "What you leave empty has its default. Nothing is started here: the page writes a settings file and shows the command."), from,
        h("div", { class: "row" }, search, h("span", {}, only, h("label", { for: "only-set" }, " only what is set")), panel.opener, h("button", { type: "button", onclick: () => panel.focus() }, "to the file"), h("button", { type: "button", onclick: again }, "start over")),
        h("div", { class: "two" }, boxes, h("aside", { "aria-label": "The settings file" }, panel.element, notes))];
    },
  };
}

// A setting that names components: a name for each, its alias and weight, and its own settings as soon as it is chosen.

import { h } from "./dom.js";
import { get, post } from "./api.js";
import { fieldOf, keyOf, mark, reach } from "./field.js";

const AGAIN_MS = 2000;
const OF_LOSS = new Set(["advantage", "aggregation", "kl", "mix", "select", "pairs", "shaping", "filter", "correction"]);
const read = new Map();

const blank = (part) => !part.name && !Object.keys(part.settings).length;
const usual = (name) => name.split(/[/:]/).pop().replace(/-/g, "_");

export function componentBlock(field, kind, context) {
  const key = field.name, listId = `names-${key}`, cards = h("div"), error = h("p", { class: "error", "aria-live": "polite" });
  const isSet = () => key in context.draft().components;
  const parts = () => context.draft().components[key] ?? (kind.is_multiple ? structuredClone(kind.default) : []);
  const reset = h("button", { type: "button", class: "small", onclick: () => (delete context.draft().components[key], fill(), context.changed(key)) }, "use the default");
  const add = h("button", { type: "button", class: "small", onclick: () => (commit([...parts(), part()]), fill(), cards.lastElementChild.querySelector("input").focus()) }, `add ${/^[aeiou]/.test(kind.word) ? "an" : "a"} ${kind.word}`);
  const names = h("datalist", { id: listId }, kind.names.map((each) => h("option", { value: each.name }, each.about || each.from)));
  const element = h("fieldset", { class: "field", tabindex: -1 }, h("legend", {}, key), h("p", { class: "quiet" }, field.doc), names, cards, h("div", { class: "row" }, kind.is_multiple && add, reset), error);

  const part = () => ({ name: "", alias: "", weight: "", settings: {} });

  function commit(own) {
    if (own.every(blank) && (!kind.is_multiple || key === "env") && own.length < 2) delete context.draft().components[key];
    else context.draft().components[key] = own;
    reset.hidden = !isSet();
    context.changed(key);
  }

  function fill() {
    [...context.fields.keys()].filter((each) => each.startsWith(`["components","${key}"`)).forEach((each) => context.fields.delete(each));
    context.fields.set(keyOf(["components", key]), { fault: (text) => mark(element, error, text), focus: () => reach(element) });
    const own = parts();
    if (!own.length && (!kind.is_multiple || (key === "env" && !isSet()))) own.push(part());
    cards.replaceChildren(...own.map((each, index) => card(own, each, index)));
    reset.hidden = !isSet();
  }

  function card(own, each, index) {
    const at = ["components", key, index], many = kind.is_multiple && (key !== "env" || own.length > 1);
    const settings = h("div", { class: "settings" }), about = h("p", { class: "quiet", "aria-live": "polite" }), wrong = h("p", { class: "error", "aria-live": "polite", id: `error-${key}-${index}` });
    const box = h("details", {}, h("summary", {}, "settings"), settings);
    const label = many ? `${key} ${index + 1}` : key;
    let asked = null;
    const name = h("input", { value: each.name, list: listId, placeholder: many ? "name" : `default: ${field.shown}`, "aria-label": `${label}: name`, "aria-describedby": wrong.id, autocomplete: "off", spellcheck: "false",
      oninput: () => (kind.names.some((known) => known.name === name.value) || !name.value) && chosen(), onchange: () => chosen() });
    const effective = () => each.name || (many ? "" : kind.default[0]?.name || (key === "loss" ? context.loss() : ""));

    function chosen() {
      if (name.value.trim() === each.name) return;
      each.name = name.value.trim();
      each.settings = {}; // they were those of another component
      alias && (alias.placeholder = usual(each.name));
      commit(own);
      load();
    }

    const faulty = new Map(); // the name, the alias and the weight have one place for what is wrong
    const say = (input, text) => (text ? faulty.set(input, text) : faulty.delete(input), mark(input, wrong, text), (wrong.textContent = [...faulty.values()].join("\n")));
    context.fields.set(keyOf(at), { fault: (text) => say(name, text), focus: () => reach(name) });

    const small = (what, more) => {
      const input = h("input", { value: each[what], class: "narrow", "aria-label": `${label}: ${what}`, autocomplete: "off", oninput: () => ((each[what] = input.value.trim()), commit(own)), ...more });
      context.fields.set(keyOf([...at, what]), { fault: (text) => say(input, text), focus: () => reach(input) });
      return input;
    };
    const alias = many && small("alias", { placeholder: usual(each.name) || "alias" }), weight = many && kind.is_weighted && small("weight", { placeholder: "weight: 1", inputmode: "decimal" });
    const remove = many && h("button", { type: "button", class: "small", "aria-label": `remove ${label}`, onclick: () => (commit(own.filter((other) => other !== each)), fill()) }, "×");

    const setting = (own_) => (text) => {
      if (text === "") delete each.settings[own_];
      else each.settings[own_] = text;
      if (!each.name) each.name = name.value = effective();
      commit(own);
    };

    function draw(found) {
      const known = new Set(found.fields.map((one) => one.name)), others = Object.keys(each.settings).filter((one) => !known.has(one));
      for (const one of found.fields) if (each.settings[one.name] === one.default) delete each.settings[one.name];
      const shown = [...found.fields, ...others.map((one) => ({ name: one, doc: "", type: "", choices: [], shown: "" }))].map((one) => {
        const made = fieldOf({ ...one, label: `${label}: ${one.name}` }, each.settings[one.name], setting(one.name));
        context.fields.set(keyOf([...at, "settings", one.name]), made);
        return made.element;
      });
      settings.replaceChildren(...shown, ...(found.state === "read" ? [] : [more()]));
      box.hidden = found.state === "read" && !shown.length;
      box.open ||= shown.length > 0 && (!!each.name || Object.keys(each.settings).length > 0) && isSet();
      about.replaceChildren(`${found.words.split("\n").join(" ")} `, found.state === "asks" ? h("button", { type: "button", class: "small", onclick: allow }, "run the file") : "");
    }

    function more() {
      const what = h("input", { "aria-label": `${label}: name of another setting`, placeholder: "setting", class: "narrow" }), value = h("input", { "aria-label": `${label}: its value`, placeholder: "value" });
      const put = () => what.value.trim() && (setting(what.value.trim().replace(/-/g, "_"))(value.value), load());
      return h("div", { class: "row" }, what, value, h("button", { type: "button", class: "small", onclick: put }, "add"));
    }

    async function allow() {
      try {
        await post("/api/settings/run-file", { name: each.name });
        await load(), context.changed(key);
      } catch (error) {
        wrong.textContent = error.message;
      }
    }

    async function load() {
      const own_ = effective(), loss = OF_LOSS.has(key) ? context.loss() : "";
      const mine = (asked = `${key}\n${own_}\n${loss}`);
      if (!own_ && !OF_LOSS.has(key)) return (box.hidden = true), settings.replaceChildren(), void (about.textContent = "");
      let found = read.get(mine);
      if (!found) {
        about.textContent = "reading its settings…";
        try {
          found = await get("/api/settings/component", { key, name: own_, loss });
        } catch (error) {
          found = { state: "failed", words: error.message, fields: [] };
        }
        if (found.state === "read") read.set(mine, found);
      }
      if (mine !== asked || context.isGone()) return;
      box.hidden = false;
      if (found.state === "unknown") return (about.textContent = ""), (box.hidden = true);
      draw(found);
      if (found.state === "reading") setTimeout(() => mine === asked && !context.isGone() && (load(), context.changed(key)), AGAIN_MS);
    }

    // What is not chosen is not imported, unless the user asks for its settings.
    if (each.name && isSet()) load();
    else if (!effective() && !OF_LOSS.has(key)) box.hidden = true;
    box.addEventListener("toggle", () => box.open && !settings.children.length && load());
    renewals[index] = () => (asked !== null && OF_LOSS.has(key) && load());
    return h("div", { class: "part" }, h("div", { class: "row" }, name, alias, weight, remove), about, wrong, box);
  }

  const renewals = [];
  fill();
  const words = `${key} ${field.doc}`.toLowerCase();
  return { element, isSet, words, isOfTraining: !field.of_eval, renew: (at) => at === "loss" && renewals.forEach((renew) => renew()) };
}

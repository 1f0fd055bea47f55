// One setting: its name, a control, what it is, and what is wrong with it.

import { h } from "./dom.js";

const WIDE = 24; // characters of a default that the control surely shows

let count = 0;

export const keyOf = (at) => JSON.stringify(at);

// `given` is the text (or the lines of a list) that is set, undefined if none is.
export function fieldOf(field, given, set) {
  const id = `field-${++count}`, control = controlOf(field, given, set, id);
  const words = [field.choices.length ? "" : field.type, field.is_required ? "needed" : "", field.shown.length > WIDE && !field.choices.length ? `default: ${field.shown}` : ""].filter(Boolean).join(" · ");
  const error = h("p", { class: "error", id: `${id}-error`, "aria-live": "polite" });
  const element = h("div", { class: "field" }, h("label", { for: id }, field.name), control,
    h("p", { class: "quiet", id: `${id}-doc` }, field.doc, words && h("span", { class: "type" }, `${field.doc && " · "}${words}`)), error);
  return { element, control, fault: (text) => mark(control, error, text), focus: () => reach(control) };
}

function controlOf(field, given, set, id) {
  const common = { id, "aria-describedby": `${id}-doc ${id}-error`, "aria-label": field.label || field.name };
  if (field.is_secret) return h("p", { id, class: "quiet", tabindex: -1 }, "a secret: no file holds it; give it with the command");
  if (field.choices.length) {
    const others = given !== undefined && !field.choices.includes(given) ? [given] : [];
    const select = h("select", { ...common, onchange: () => set(select.value) }, h("option", { value: "" }, field.is_required ? "choose" : `default: ${field.shown}`), [...others, ...field.choices].map((each) => h("option", { value: each }, each)));
    select.value = given ?? "";
    return select;
  }
  if (field.is_list) {
    const area = h("textarea", { ...common, rows: field.rows || 2, spellcheck: "false", placeholder: field.rows ? "" : "one a line", oninput: () => set(area.value.split("\n")) });
    area.value = [given ?? []].flat().join("\n");
    return area;
  }
  const input = h("input", { ...common, ...(field.list ? { list: field.list } : {}), value: given ?? "", placeholder: field.shown, autocomplete: "off", spellcheck: "false", oninput: () => set(input.value) });
  return input;
}

export function mark(control, error, text) {
  if (error.textContent !== text) error.textContent = text;
  if (text) control.setAttribute("aria-invalid", "true");
  else control.removeAttribute("aria-invalid");
}

export function reach(control) {
  for (let each = control.parentElement; each; each = each.parentElement) {
    if (each.tagName === "DETAILS") each.open = true;
    each.hidden = false;
  }
  control.focus();
  control.scrollIntoView({ block: "center" });
}

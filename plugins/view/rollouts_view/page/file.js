// The file that the form would write: its text, what is to mend, and the command that uses it.

import { h, link, say } from "./dom.js";
import { post } from "./api.js";

export function filePanel(form, context, place) {
  const text = h("pre", { class: "file", tabindex: 0, "aria-label": "The text of the file" }), faults = h("ul", { class: "faults" }), said = h("div", { role: "status" });
  const whole = h("input", { type: "checkbox", id: "whole", onchange: () => draw() });
  const root = h("select", { "aria-label": "Folder" }, form.roots.map((each) => h("option", { value: each }, each)));
  const name = h("input", { "aria-label": "Name of the file", value: place?.name || "run.toml", spellcheck: "false", autocomplete: "off", onkeydown: (event) => event.key === "Enter" && write() });
  const button = h("button", { type: "button", onclick: () => write() }, "write the file");
  const opener = h("select", { "aria-label": "Edit a settings file", onchange: () => opener.value && (location.hash = link(["new"], JSON.parse(opener.value))) }, h("option", { value: "" }, "edit a file…"),
    form.files.map(({ root: own, name: file }) => h("option", { value: JSON.stringify({ root: own, file }) }, `${own}/${file}`)));
  if (place?.root) root.value = place.root;
  let last = { text: "", whole: "", faults: [] };
  const tags = {};

  function draw() {
    if (!last.faults.length) text.textContent = (whole.checked ? last.whole : last.text).trim() || "# everything is at its default";
    text.classList.toggle("old", last.faults.length > 0);
    button.disabled = last.faults.length > 0 || !form.roots.length;
  }

  async function write(replaced = tags[`${root.value}/${name.value}`] || "") {
    said.replaceChildren();
    try {
      const found = await post("/api/settings/file", { draft: context.draft(), root: root.value, name: name.value.trim(), whole: whole.checked, replaced });
      if (found.asks) return asks(found);
      tags[`${root.value}/${name.value}`] = found.tag;
      said.replaceChildren(h("p", { class: "good" }, `Wrote ${found.file}. To check it and to start the run, type:`), command(found.dry), command(found.command));
    } catch (error) {
      said.replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
    }
  }

  function asks({ asks: words, tag }) {
    const yes = h("button", { type: "button", onclick: () => write(tag) }, "replace it");
    said.replaceChildren(h("p", { class: "error", role: "alert" }, words), yes);
    yes.focus();
  }

  const command = (words) => h("div", { class: "row command" }, h("code", { tabindex: 0 }, words), h("button", { type: "button", class: "small", onclick: () => navigator.clipboard.writeText(words).then(() => say("Copied."), () => say("The browser does not let this page copy.")) }, "copy"));

  const where = form.roots.length ? h("div", { class: "row" }, form.roots.length > 1 ? root : h("span", { class: "quiet" }, `${form.roots[0]}/`), name, button)
    : h("p", { class: "quiet" }, "This viewer has opened runs alone, so it writes no file. Copy the text, or open a folder: rollouts view --new FOLDER");

  return {
    focus: () => (name.isConnected ? name : text).focus(),
    opener: form.files.length ? opener : null,
    element: h("div", {}, h("div", { class: "row" }, h("h2", {}, "The file"), h("span", {}, whole, h("label", { for: "whole" }, " all settings, with comments"))), faults, text, where, said),
    failed(words) {
      said.replaceChildren(h("p", { class: "error", role: "alert" }, words));
    },
    show(found, fieldAt) {
      last = found;
      faults.replaceChildren(...found.faults.map(({ at, words }) => {
        const field = fieldAt(at), isOne = (context.draft().components[at[1]] || []).length < 2;
        const title = at.filter((each) => !["values", "components", "settings"].includes(each) && !(isOne && each === 0)).map((each) => (typeof each === "number" ? each + 1 : each)).join(" ");
        return h("li", {}, field ? [h("button", { type: "button", class: "link", onclick: () => field.focus() }, title), h("span", { class: "error" }, ` ${words.split("\n")[0]}`)] : h("span", { class: "error" }, words));
      }));
      draw();
    },
  };
}

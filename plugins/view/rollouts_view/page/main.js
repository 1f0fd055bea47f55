// Chooses the page for the address, renews it while a run goes on, and knows the keys.

import { h, link } from "./dom.js";
import { home, isExport } from "./api.js";
import { runsPage } from "./runs.js";
import { runPage } from "./run.js";
import { healthPage } from "./health.js";
import { tablePage } from "./table.js";
import { rolloutPage } from "./rollout.js";
import { sidePage } from "./side.js";
import { comparePage } from "./compare.js";
import { newPage } from "./new.js";
import { dataPage } from "./data.js";

const RENEW_MS = 3000;
const KEYS = [["?", "this list"], ["u", "up: to the step, the run, the list"], ["/", "search or filter"], ["[ and ]", "the rollout before, the next one; on Health, the step"],
  ["j and k", "the next row, the row before; Enter opens it"], ["Tab, then arrows", "the points of a curve, the rows of a timeline; Enter opens one"], ["c", "the next channel of the tokens"], ["n", "the settings of a new run"], ["← and →", "the token before, the next one"], ["Esc", "leave a field"]];

let now = { keys: {} }, leaving = new AbortController(), renewing = false;

function place() {
  const [path, query] = (location.hash.replace(/^#\/?/, "")).split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query || "") };
}

function choose({ parts, query }) {
  const [first, ...rest] = parts;
  if (first === "compare") return comparePage(query);
  if (first === "side") return sidePage(query);
  if (first === "new" && !isExport) return newPage(query);
  if (first === "data" && !isExport) return dataPage(query);
  if (first !== "run") return runsPage(query);
  const [run, file, line] = rest;
  if (line !== undefined) return rolloutPage(run, file, Number(line), query);
  if (file === "health") return healthPage(run, query);
  return file !== undefined ? tablePage(run, file, query) : runPage(run, query);
}

async function show() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving, page = choose(place()), main = document.getElementById("main");
  now = { keys: {}, ...page };
  main.setAttribute("aria-busy", "true");
  document.getElementById("path").replaceChildren(...crumbs(place().parts));
  document.title = ["rollouts", ...place().parts.slice(1)].join(" · ");
  try {
    const content = await page.show(signal);
    if (signal.aborted) return;
    main.replaceChildren(...[content].flat());
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  } catch (error) {
    if (!signal.aborted) main.replaceChildren(h("p", { class: "error", role: "alert" }, error.message), h("a", { href: home }, "Back"));
  } finally {
    if (!signal.aborted) main.removeAttribute("aria-busy"), (main.dataset.shown = location.hash);
  }
}

function crumbs([first, ...rest]) {
  const found = [isExport ? "rollouts" : h("a", { href: "#/" }, "runs")];
  if (first && first !== "run") found.push(" / ", first);
  if (first === "run") rest.forEach((part, index) => found.push(" / ", index === rest.length - 1 ? part : h("a", { href: link(["run", ...rest.slice(0, index + 1)]) }, part)));
  return found;
}

setInterval(async () => {
  if (isExport || document.hidden || !now.renew || renewing) return;
  renewing = true;
  const { signal } = leaving;
  try {
    await now.renew(signal);
  } catch (error) {
    if (!signal.aborted) document.getElementById("live").textContent = error.message;
  } finally {
    renewing = false;
  }
}, RENEW_MS);

const help = document.getElementById("help");
help.append(h("h2", {}, "Keys"), h("dl", {}, KEYS.map(([key, words]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, words)])), h("form", { method: "dialog" }, h("button", {}, "Close")));
document.getElementById("help-button").addEventListener("click", () => help.showModal());

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return void (event.key === "Escape" && event.target.blur());
  if (event.key === "?") help.showModal();
  else if (event.key === "/" && document.querySelector("input[type=search]")) document.querySelector("input[type=search]").focus();
  else if (event.key === "u") up();
  else if (event.key === "n" && !isExport) location.hash = "#/new";
  else if (now.keys[event.key]) now.keys[event.key]();
  else return;
  event.preventDefault();
});

function up() {
  const { parts } = place();
  location.hash = parts[0] === "run" && parts.length > 2 ? link(parts.slice(0, -1)) : isExport ? home : "#/";
}

addEventListener("hashchange", show);
if (isExport && !location.hash) location.hash = home;
else show();

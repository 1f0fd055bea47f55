// Elements. Text becomes text nodes, never HTML: what a model wrote is hostile input.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "line", "text", "circle", "g", "title", "rect"]);

export function h(tag, attributes = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") element.style.cssText = value; // an attribute would be against the content policy
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false));
  return element;
}

export const number = (value, digits = 3) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return String(value);
  if (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6) return value.toExponential(1);
  return value.toFixed(Math.max(0, digits - Math.max(0, Math.floor(Math.log10(Math.abs(value)))))); // 3505, 35.05, 0.351
};

export const size = (bytes) => {
  let unit = 0;
  while (bytes >= 1024 && unit < 4) (bytes /= 1024), unit++;
  return `${bytes.toFixed(unit > 2 ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
};

export const counted = (count, thing) => `${count.toLocaleString("en")} ${thing}${count === 1 ? "" : "s"}`;

export const link = (parts, query = {}) => {
  const pairs = Object.entries(query).flatMap(([key, value]) => [value].flat().filter((each) => each !== "").map((each) => [key, each]));
  const search = new URLSearchParams(pairs).toString();
  return "#/" + parts.map(encodeURIComponent).join("/") + (search ? `?${search}` : "");
};

export const say = (text) => (document.getElementById("live").textContent = text);

// Keys that move through the rows of a table and open one.
export function rowKeys(body, open) {
  let at = -1;
  const move = (step) => {
    const rows = [...body.children];
    if (!rows.length) return;
    rows[at]?.classList.remove("on");
    at = Math.min(Math.max(at + step, 0), rows.length - 1);
    rows[at].classList.add("on");
    rows[at].scrollIntoView({ block: "nearest" });
    say(rows[at].innerText.replace(/\s+/g, " "));
  };
  return { j: () => move(1), k: () => move(-1), Enter: () => body.children[at] && open(body.children[at]) };
}

export const badge = (state) => h("span", { class: `state ${state}` }, state);

export function table(head, rows, { numbers = new Set() } = {}) {
  const cell = (tag, value, index) => h(tag, { class: numbers.has(index) && "number", scope: tag === "th" ? "col" : null }, value);
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, h("table", {}, h("thead", {}, h("tr", {}, head.map((each, index) => cell("th", each, index)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((each, index) => cell("td", each, index)))))));
}

export const short = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));

// Asks the server, or in an exported file the data inside it.

const inside = document.getElementById("data");
const data = inside ? JSON.parse(inside.textContent) : null;

export const isExport = data !== null;
export const home = isExport ? data.home : "#/";

export const path = (...parts) => "/api/" + parts.map(encodeURIComponent).join("/");

export async function get(where, query = {}, signal) {
  const pairs = Object.entries(query).flatMap(([key, value]) => [value].flat().map((each) => [key, each]));
  const search = new URLSearchParams(pairs.filter(([, value]) => value !== "" && value !== undefined)).toString();
  const address = search ? `${where}?${search}` : where;
  if (isExport) {
    const kept = where === "/api/metrics" ? where : address; // it has all curves of its run
    if (kept in data.answers) return data.answers[kept];
    throw new Error("This file does not have that part. `rollouts view` shows the whole run.");
  }
  let answer;
  try {
    answer = await fetch(address, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is `rollouts view` still running?");
  }
  return read(answer);
}

export async function post(where, body) {
  return read(await fetch(where, { method: "POST", body: JSON.stringify(body), headers: { "x-rollouts-view": "1" } }));
}

async function read(answer) {
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

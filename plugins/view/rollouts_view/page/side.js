// Rollouts side by side: a group, or the same task in two runs. What all share is dimmed.

import { badge, counted, h, link, number } from "./dom.js";
import { get, path } from "./api.js";
import { conversation, sameMessage } from "./conversation.js";

export function sidePage(query) {
  return {
    async show(signal) {
      const one = (run, file, line) => get(path("runs", run, file, "lines", line), {}, signal);
      let places, rollouts, more = 0;
      if (query.get("group") !== null) {
        const [run, file] = [query.get("run"), query.get("file")];
        const found = await get(path("runs", run, file, "groups", query.get("group")), {}, signal);
        [rollouts, more] = [found.rollouts, found.total - found.rollouts.length];
        places = rollouts.map((each) => [run, file, String(each.line)]);
      } else {
        places = query.getAll("at").map((each) => JSON.parse(each));
        rollouts = await Promise.all(places.map((each) => one(...each)));
      }
      return view(places, rollouts, more);
    },
  };
}

function view(places, rollouts, more) {
  const ids = rollouts.map((each) => each.segments[0]?.tokens || []);
  let tokens = 0;
  while (rollouts.length > 1 && ids.every((each) => tokens < each.length && each[tokens] === ids[0][tokens])) tokens++;
  let messages = 0;
  while (rollouts.every((each) => messages < each.messages.length && sameMessage(each.messages[messages], rollouts[0].messages[messages]))) messages++;
  const mark = (_, index) => (rollouts.length === 1 ? "" : index < messages ? "same" : index === messages ? "parts" : "");
  const runs = new Set(places.map(([run]) => run));
  return [h("h1", {}, "Side by side"), h("p", { class: "quiet" }, `All ${rollouts.length} begin with the same ${counted(messages, "message")} and ${counted(tokens, "token")}. The first difference is framed.${more ? ` ${more} more rollouts of this group are not shown.` : ""}`),
    h("div", { class: "side" }, rollouts.map((each, index) => h("section", {}, h("h2", {}, h("a", { href: link(["run", ...places[index]]) }, runs.size > 1 ? places[index][0] : `rollout ${each.rollout}`)),
      h("p", {}, "reward ", h("strong", {}, number(each.reward)), " ", badge(each.status), each.advantage !== null && each.advantage !== undefined ? ` advantage ${number(each.advantage)}` : "", each.why ? ` · ${each.why}` : ""), rollouts.length > 1 && each.segments[0]?.texts.length > tokens && h("p", { class: "quiet" }, `token ${tokens}, where they part: `, h("code", { dir: "auto" }, JSON.stringify(each.segments[0].texts[tokens]))), conversation(each.messages, { mark }))))];
}

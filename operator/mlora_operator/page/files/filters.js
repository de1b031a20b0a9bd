// The form above the lists: words to search for, a state, a namespace.

import { here, stay } from "./address.js";
import { byId, el } from "./elements.js";

const TYPED = 300; // milliseconds after the last key
let typing;

export const filtered = () => Boolean(here().state || here().search);

function offer(id, names) {
  const choice = byId(id);
  const chosen = here()[id];
  const offered = [...new Set([...names, chosen].filter(Boolean))].sort();
  const known = JSON.stringify(offered);
  if (choice.dataset.names !== known) {
    choice.dataset.names = known;
    choice.replaceChildren(el("option", { value: "" }, "all"), ...offered.map((name) => el("option", { value: name }, name)));
  }
  choice.value = chosen;
}

let namespaces = [];

// `overview`: the newest, or null before there is one.
export function showFilters(overview) {
  if (overview && !here().namespace) namespaces = overview.namespaces;
  offer("namespace", namespaces);
  if (overview || here().state) offer("state", overview ? Object.keys(overview.states) : []);
  if (document.activeElement !== byId("search")) byId("search").value = here().search;
  tellWhatIsLeftOut();
}

function tellWhatIsLeftOut() {
  const note = byId("filtered");
  note.hidden = !filtered();
  if (note.hidden) return;
  if (!note.firstChild) {
    const all = el("button", { type: "button" }, "Show all");
    all.addEventListener("click", () => {
      stay({ state: "", search: "" });
      byId("search").focus();
    });
    note.append(el("span", { role: "status" }), all);
  }
  const parts = [here().state && `in state ${here().state}`, here().search && `with “${here().search}”`].filter(Boolean);
  note.firstChild.textContent = `Only tasks ${parts.join(" ")} are listed.`;
}

export function listenToFilters() {
  for (const id of ["namespace", "state"]) byId(id).addEventListener("change", (event) => stay({ [id]: event.target.value }));
  byId("search").addEventListener("input", (event) => {
    clearTimeout(typing);
    typing = setTimeout(() => stay({ search: event.target.value.trim() }), TYPED);
  });
  byId("filters").addEventListener("submit", (event) => {
    event.preventDefault();
    clearTimeout(typing);
    stay({ search: byId("search").value.trim() });
  });
}

// What is shown stands in the page's address, so that it can be kept, sent and gone back to.

import { el } from "./elements.js";

const NAMES = ["namespace", "state", "search", "view", "task", "compare", "smooth"];
export const MOST_COMPARED = 8;
const listeners = [];

export function here() {
  const asked = new URLSearchParams(location.search);
  return Object.fromEntries(NAMES.map((name) => [name, asked.get(name) || ""]));
}

// Relative, and a query at most: whatever a name is, it leads nowhere but to this page.
function addressOf(changes) {
  const wanted = { ...here(), ...changes };
  const asked = new URLSearchParams(NAMES.filter((name) => wanted[name]).map((name) => [name, wanted[name]]));
  const query = asked.toString();
  return query ? `?${query}` : "./";
}

// Calls `listener` whenever what is shown has changed.
export function onMove(listener) {
  listeners.push(listener);
}

function moved() {
  for (const listener of listeners) listener();
}

export function go(changes) {
  history.pushState(null, "", addressOf(changes));
  moved();
}

// The same without a step to go back to: for what is typed or dragged.
export function stay(changes) {
  history.replaceState(null, "", addressOf(changes));
  moved();
}

export function link(changes, attributes, ...children) {
  const node = el("a", attributes, ...children);
  const lead = () => node.setAttribute("href", addressOf(changes));
  lead();
  for (const sign of ["focus", "pointerenter"]) node.addEventListener(sign, lead); // the rest may have changed since
  node.addEventListener("click", (event) => {
    if (event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    go(changes);
  });
  return node;
}

export const taskLink = (task) => link({ task: `${task.namespace}/${task.name}`, view: "" }, { class: "name" },
  el("span", { class: "space" }, `${task.namespace}/`), el("strong", {}, task.name));

export const compared = () => here().compare.split(",").filter(Boolean).slice(0, MOST_COMPARED);

export const withCompared = (uid) => [...compared().filter((one) => one !== uid), uid].slice(-MOST_COMPARED).join(",");
export const withoutCompared = (uid) => compared().filter((one) => one !== uid).join(",");

window.addEventListener("popstate", moved);

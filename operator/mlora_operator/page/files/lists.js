// Lists of tasks, and of namespaces, a page of each at a time.

import { link, taskLink } from "./address.js";
import { byId, el, keyed } from "./elements.js";
import { filtered } from "./filters.js";
import { chip, known, loss, number, state, time, took, why } from "./words.js";

const ROWS = 25; // of a table at once
const offsets = { waiting: 0, training: 0, finished: 0, namespaces: 0 };
let again = () => {}; // looks once more

export function listenToPagers(look) {
  again = look;
}

export function toFirstPages() {
  for (const name of Object.keys(offsets)) offsets[name] = 0;
}

export const page = (name) => ({ offset: offsets[name], limit: ROWS });

export function count(section, total) {
  const title = byId(`${section}-title`);
  if (!title.querySelector(".count")) title.append(el("span", { class: "count" }));
  title.querySelector(".count").textContent = number(total);
}

export function empty(name, nothing, words) {
  const note = document.querySelector(`[data-empty="${name}"]`);
  note.hidden = !nothing;
  note.textContent = words;
}

const taskHead = (task) => el("th", { scope: "row", class: "task", title: `${task.namespace}/${task.name}` }, chip(task.colour), taskLink(task));

export function progress(task) {
  if (!known(task.totalSteps)) return "–";
  const step = task.step || 0;
  return el("div", { class: "progress" },
    el("progress", { max: Math.max(1, task.totalSteps), value: step, "aria-label": `Steps of ${task.name}` }),
    el("span", {}, `${number(step)} / ${number(task.totalSteps)}`));
}

const pipe = (task) => el("td", { class: "pipe", title: task.pipeline || "" }, task.pipeline || "–");
const cell = (value) => el("td", {}, value);
const numeric = (value) => el("td", { class: "number" }, value);

const ROW = {
  training: (task) => [
    taskHead(task), cell(state(task.state)), pipe(task), numeric(number(task.priority)), cell(progress(task)), numeric(task.eta || "–"),
    numeric(loss(task.loss)), numeric(loss(task.evaluationLoss)), numeric(number(task.tokensPerSecond)), numeric(number(task.restarts)),
    cell(time(task.started))],
  waiting: (task) => [
    numeric(known(task.place) ? number(task.place) : "–"), taskHead(task), numeric(number(task.priority)), pipe(task),
    cell(state(task.state)), el("td", { class: "why" }, why(task)),
    cell(time(task.waitsSince))],
  finished: (task) => [
    taskHead(task), cell(state(task.state)), numeric(number(task.step)), numeric(loss(task.loss)), numeric(loss(task.evaluationLoss)),
    el("td", { class: "why" }, task.adapter ? el("code", {}, task.adapter) : why(task)),
    cell(took(task)), cell(time(task.completed))],
  namespaces: (one) => [
    el("th", { scope: "row", class: "task", title: one.namespace }, link({ namespace: one.namespace }, { class: "name" }, el("strong", {}, one.namespace))), numeric(number(one.training)), numeric(number(one.waiting)),
    numeric(number(one.succeeded)), numeric(number(one.failed)), numeric(number(one.tokensPerSecond)), numeric(number(one.trainedTokens))],
};
const NOTHING = {
  training: "No task is training.", waiting: "No task is waiting.", finished: "No task has finished.", namespaces: "No namespace has tasks.",
};
const NO_MATCH = {
  training: "No task in training matches.", waiting: "No waiting task matches.", finished: "No finished task matches.",
};
const SECTION = { training: "training", waiting: "queue", finished: "finished", namespaces: "namespaces" };

export const showTasks = (list) => show(list.list, list, list.tasks, (task) => task.uid);
export const showNamespaces = (list) => show("namespaces", list, list.namespaces, (one) => one.namespace);

function show(name, list, items, keyOf) {
  if (list.offset && list.offset >= list.total) { // the last page has gone
    offsets[name] = Math.max(0, Math.ceil(list.total / ROWS) - 1) * ROWS;
    again();
  }
  const rows = byId(`${name}-rows`);
  count(SECTION[name], list.total);
  empty(name, list.total === 0, (filtered() && NO_MATCH[name]) || NOTHING[name]);
  rows.closest(".wide").hidden = list.total === 0;
  keyed(rows, items, keyOf, () => el("tr"), (row, item) => row.replaceChildren(...ROW[name](item)));
  showPager(name, list, items.length);
}

function showPager(name, list, shown) {
  const pager = byId(`${name}-pager`);
  if (list.total <= ROWS) return pager.replaceChildren();
  if (!pager.firstChild) {
    const turn = (by, words) => {
      const button = el("button", { type: "button", "aria-label": `${words} page of ${SECTION[name]}` }, words);
      button.addEventListener("click", () => {
        if (button.getAttribute("aria-disabled") === "true") return;
        offsets[name] = Math.max(0, offsets[name] + by);
        again();
      });
      return button;
    };
    pager.append(el("span", { "aria-live": "polite" }), turn(-ROWS, "Previous"), turn(ROWS, "Next"));
  }
  const [range, previous, next] = pager.children;
  range.textContent = `${number(list.offset + 1)}–${number(list.offset + shown)} of ${number(list.total)}`;
  // Not disabled: a button that has the focus would lose it.
  previous.setAttribute("aria-disabled", list.offset === 0);
  next.setAttribute("aria-disabled", list.offset + shown >= list.total);
  return undefined;
}

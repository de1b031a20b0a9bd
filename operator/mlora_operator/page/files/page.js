// Shows what the operator's API says: all tasks, one task, or some curves, as the address says.

import { compared, here, onMove } from "./address.js";
import { ask, forget, pause } from "./asking.js";
import { comparisonAsked, showComparison, turnToComparison } from "./compare.js";
import { byId } from "./elements.js";
import { listenToFilters, showFilters } from "./filters.js";
import { listenToPagers, page, showNamespaces, showTasks, toFirstPages } from "./lists.js";
import { showChosen, showLosses } from "./losses.js";
import { showOverview } from "./overview.js";
import { showTask, taskAsked, turnToTask } from "./task.js";
import { ago } from "./words.js";

const EVERY = 2000; // milliseconds between two looks
const now = { turn: 0, since: null, view: null, asked: null, shown: false };

function viewOf(at) {
  if (at.task) return "task";
  return at.view === "compare" ? "compare" : "board";
}

// What each view asks for, and who shows the answer.
const QUESTIONS = {
  board: () => {
    const chosen = { state: here().state, search: here().search };
    return [
      [showBoard, "overview", {}],
      ...["training", "waiting", "finished"].map((list) => [showTasks, "tasks", { list, ...chosen, ...page(list) }]),
      [showLosses, "losses", chosen],
      [showNamespaces, "namespaces", page("namespaces")],
    ];
  },
  task: () => [[showTask, "task", taskAsked()]],
  compare: () => (compared().length ? [[showComparison, "losses", comparisonAsked()]] : []),
};

function showBoard(overview) {
  showOverview(overview);
  showFilters(overview);
}

function tell(kind, words, notice) {
  const line = byId("status");
  if (line.dataset.is !== kind || line.textContent !== words) {
    line.dataset.is = kind;
    line.textContent = words;
  }
  byId("notice").hidden = !notice;
  if (byId("notice").textContent !== (notice || "")) byId("notice").textContent = notice || "";
  for (const part of document.querySelectorAll("section, #figures")) part.classList.toggle("stale", kind === "away");
}

const WORDS = {
  following: (message) => `This replica is on standby, and ${message}. Forward a port to that pod, or ask the Service again.`,
  starting: () => "The operator is starting; no data yet.",
};

async function look() {
  now.turn += 1;
  const turn = now.turn; // a newer look makes an older one's answers void
  try {
    const answers = await Promise.all(
      QUESTIONS[now.view]().map(([show, path, query]) => ask(path, query).then((found) => [show, found])));
    if (turn !== now.turn) return forget();
    for (const [show, found] of answers) if (found) show(found);
    now.shown = true;
    byId("main").setAttribute("aria-busy", "false");
    now.since = null;
    tell("live", "live", null);
  } catch (error) {
    if (turn !== now.turn) return undefined;
    now.since = now.since || new Date();
    forget();
    const why = (Object.hasOwn(WORDS, error.kind) ? WORDS[error.kind] : (message) => message)(error.message);
    tell("away", error.kind === "following" ? "follows" : "no data",
      now.shown ? `${why} What is shown is of ${now.since.toLocaleTimeString()} or before.` : why);
    if (!now.shown) for (const note of document.querySelectorAll(".empty")) note.textContent = "No data yet.";
  }
  return undefined;
}

// Shows what the address says.
function turn() {
  const at = here();
  const view = viewOf(at);
  const asked = JSON.stringify([view, at.namespace, at.task, ...(view === "board" ? [at.state, at.search] : []), ...(view === "compare" ? [at.compare] : [])]);
  for (const [name, id] of [["board", "board"], ["task", "task-view"], ["compare", "compare-view"]]) byId(id).hidden = name !== view;
  byId("sections").hidden = view !== "board";
  byId("filters").hidden = view !== "board";
  showChosen();
  turnToTask();
  turnToComparison(view === "compare");
  if (asked === now.asked) return;
  if (view !== now.view) {
    now.shown = false;
    byId("main").setAttribute("aria-busy", "true");
  }
  const from = now.view;
  [now.asked, now.view] = [asked, view];
  document.title = view === "task" ? `${at.task} · mLoRA` : view === "compare" ? "Curves · mLoRA" : "mLoRA";
  showFilters(null);
  toFirstPages();
  forget();
  if (view === "board" && from !== null && from !== "board") byId("main").focus();
  look();
}

async function run() {
  for (;;) {
    await pause(EVERY);
    if (!document.hidden) await look();
  }
}

listenToFilters();
listenToPagers(look);
onMove(turn);
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
setInterval(() => {
  for (const node of document.querySelectorAll("time")) node.textContent = ago(node.dateTime);
}, 10000);
turn();
run();

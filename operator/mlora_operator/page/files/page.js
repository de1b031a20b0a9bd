"use strict";
// Shows what the operator's API says. Whatever comes from it becomes text or a number, never markup: elements are made
// by `el` and `svg` alone, which know no HTML.

const EVERY = 2000; // milliseconds between two looks
const TIMELINE_EVERY = 5000;
const ROWS = 25; // of a table at once
const TRIES = 8; // behind a Service of several replicas, until the one that leads answers
const COLOURS = 12;
const SVG = "http://www.w3.org/2000/svg";

// --- elements ---

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== "") node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);

// Children of `parent` for `items`, in their order: one that is there stays the same element, so that nobody loses focus,
// and is drawn anew only when its item has changed.
function keyed(parent, items, keyOf, make, draw) {
  const former = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let node = former.get(key);
    former.delete(key);
    if (!node) {
      node = make(item);
      node.dataset.key = key;
    }
    const content = JSON.stringify(item);
    if (node.seen !== content) {
      draw(node, item);
      node.seen = content;
    }
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  }
  for (const node of former.values()) node.remove();
}

// --- words ---

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const known = (value) => value !== null && value !== undefined;
const number = (value) => (known(value) ? whole.format(value) : "–");
const loss = (value) => (known(value) ? value.toFixed(value < 0.1 ? 4 : 3) : "–");

function bytes(value) {
  if (!known(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value.toFixed(unit < 2 || value >= 100 ? 0 : value >= 10 ? 1 : 2)} ${units[unit]}`;
}

function duration(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

const ago = (moment) => `${duration((Date.now() - Date.parse(moment)) / 1000)} ago`;

function time(moment) {
  if (!moment) return "–";
  return el("time", { datetime: moment, title: new Date(moment).toLocaleString() }, ago(moment));
}

function took(task) {
  if (!task.started || !task.completed) return "–";
  return duration((Date.parse(task.completed) - Date.parse(task.started)) / 1000);
}

const KINDS = {
  Succeeded: "good", Ready: "good", Failed: "bad", Rejected: "bad", Stalled: "bad", UploadBlocked: "bad",
  Training: "busy", Saving: "busy", Queued: "wait", Preempted: "wait", Waiting: "wait", Starting: "wait",
};
const state = (word) => el("span", { class: "state", "data-is": KINDS[word] || "other" }, word);
const colour = (index) => (Number.isInteger(index) && index >= 0 && index < COLOURS ? `k${index}` : "");
const chip = (index) => colour(index) && el("span", { class: `chip ${colour(index)}`, "aria-hidden": "true" });

function named(thing) {
  return el("span", { class: "task", title: `${thing.namespace}/${thing.name}` }, el("span", { class: "space" }, `${thing.namespace}/`), el("strong", {}, thing.name));
}

// --- asking ---

class Trouble extends Error {
  constructor(kind, message) { super(message); this.kind = kind; }
}

const tags = new Map(); // URL -> its last ETag
const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

// The answer, or null when it is the same as before.
async function ask(path, query) {
  const asked = new URLSearchParams(query);
  if (page.namespace) asked.set("namespace", page.namespace);
  const url = `api/v1/${path}?${asked}`;
  for (let attempt = 1; ; attempt += 1) {
    const response = await reach(url);
    if (response.status === 304) return null;
    const json = (response.headers.get("Content-Type") || "").startsWith("application/json");
    if (!json) throw new Trouble("proxy", "A proxy answered instead of the operator. Reload the page to sign in again.");
    const body = await response.json();
    if (response.ok) {
      tags.set(url, response.headers.get("ETag"));
      return body;
    }
    if (body.error !== "following" || attempt === TRIES) throw new Trouble(body.error, body.message);
    await pause(200);
  }
}

async function reach(url) {
  const tag = tags.get(url);
  try {
    return await fetch(url, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
  } catch {
    throw new Trouble("away", "The operator does not respond.");
  }
}

// --- sections ---

const page = {
  namespace: new URLSearchParams(location.search).get("namespace") || "",
  offsets: { waiting: 0, training: 0, finished: 0 },
  namespaces: [],
};

function count(section, total) {
  const title = byId(`${section}-title`);
  if (!title.querySelector(".count")) title.append(el("span", { class: "count" }));
  title.querySelector(".count").textContent = number(total);
}

function empty(name, nothing, words) {
  const note = document.querySelector(`[data-empty="${name}"]`);
  note.hidden = !nothing;
  note.textContent = words;
}

function showOverview(overview) {
  const of = (...states) => states.reduce((sum, name) => sum + (overview.states[name] || 0), 0);
  const all = Object.values(overview.states).reduce((sum, value) => sum + value, 0);
  const training = of("Training", "Saving", "UploadBlocked");
  const figures = [
    ["Training", number(training)],
    ["Waiting", number(all - training - of("Succeeded", "Failed"))],
    ["Succeeded", number(of("Succeeded"))],
    ["Failed", number(of("Failed"))],
    ["Tokens/s", number(overview.tokensPerSecond)],
  ];
  keyed(byId("figures"), figures, ([name]) => name, () => el("div"), (node, [name, value]) => {
    node.replaceChildren(el("dt", {}, name), el("dd", {}, value));
  });
  if (!page.namespace) page.namespaces = overview.namespaces;
  showNamespaces();
  count("pipelines", overview.pipelinesTotal);
  empty("pipelines", overview.pipelines.length === 0, page.namespace
    ? `Namespace ${page.namespace} has no pipeline, and no pipeline serves its tasks.`
    : "There is no pipeline. Apply a LoRAPipeline, or a LoRATask that names a model of the catalogue.");
  keyed(byId("pipeline-list"), overview.pipelines, (one) => `${one.namespace}/${one.name}`, makePipeline, drawPipeline);
}

function showNamespaces() {
  const choice = byId("namespace");
  const names = [...new Set([...page.namespaces, page.namespace].filter(Boolean))].sort();
  if (choice.dataset.names === JSON.stringify(names)) return;
  choice.dataset.names = JSON.stringify(names);
  choice.replaceChildren(el("option", { value: "" }, "all"), ...names.map((name) => el("option", { value: name }, name)));
  choice.value = page.namespace;
}

function makePipeline(pipeline) {
  const name = `${pipeline.namespace}/${pipeline.name}`;
  const drawing = el("div", { class: "timeline" }, el("p", { class: "muted" }, "Loading …"));
  const details = el("details", {}, el("summary", {}, "Timeline"), drawing);
  const node = el("article", { class: "pipeline", "aria-label": `Pipeline ${name}` }, el("div", { class: "top" }), details);
  details.addEventListener("toggle", () => {
    node.classList.toggle("open", details.open);
    if (details.open) lookAtTimeline(node, name);
  });
  return node;
}

function drawPipeline(node, pipeline) {
  const speed = pipeline.tokensPerSecond ? ` · ${number(pipeline.tokensPerSecond)}\u00a0tokens/s` : "";
  const restarts = pipeline.restarts ? ` · ${number(pipeline.restarts)} restarts` : "";
  const workers = `${number(pipeline.readyWorkers)} of ${number(pipeline.workers)} workers ready`;
  const lost = pipeline.coordinator === "lost" ? [" (last heard of ", time(pipeline.lostSince), ")"] : [];
  const words = pipeline.state === "Ready" ? (lost.length ? "its coordinator does not respond" : "") : pipeline.message;
  node.querySelector(".top").replaceChildren(
    el("div", { class: "head" },
      el("h3", {}, el("span", { class: "space" }, `${pipeline.namespace}/`), pipeline.name),
      state(pipeline.state)),
    el("p", { class: "facts" }, `${pipeline.baseModel} · ${pipeline.training} training, ${number(pipeline.waiting)} waiting · ${workers}${speed}${restarts}`),
    words ? el("p", { class: "message" }, el("b", {}, pipeline.reason), " — ", words, lost) : "",
    pipeline.stages.length ? stageTable(pipeline) : "",
  );
  node.querySelector("details").hidden = pipeline.coordinator !== "answers" && pipeline.coordinator !== "lost";
}

function stageTable(pipeline) {
  const rows = pipeline.stages.map((stage) => el("tr", {},
    el("th", { scope: "row", class: "number" }, stage.stage),
    el("td", {}, `${stage.firstLayer}–${stage.lastLayer}`),
    el("td", {}, stage.device),
    el("td", { class: "memory" }, memoryBar(stage)),
    el("td", { class: "number" }, bytes(stage.predicted)),
    el("td", { class: "number" }, bytes(stage.used)),
    el("td", { class: "number" }, bytes(stage.budget))));
  return el("div", {},
    el("table", { "aria-label": `Stages of ${pipeline.name}` },
      el("thead", {}, el("tr", {},
        el("th", { scope: "col", class: "number" }, "Stage"), el("th", { scope: "col" }, "Layers"), el("th", { scope: "col" }, "Device"),
        el("th", { scope: "col" }, "Memory"), el("th", { scope: "col", class: "number" }, "Predicted"),
        el("th", { scope: "col", class: "number" }, "Used"), el("th", { scope: "col", class: "number" }, "Budget"))),
      el("tbody", {}, rows)),
    el("p", { class: "key", "aria-hidden": "true" },
      el("span", {}, el("i"), "used at the last measured peak"),
      el("span", {}, el("i", { class: "predicted" }), "predicted maximum"),
      el("span", {}, el("i", { class: "track" }), "budget")));
}

function memoryBar(stage) {
  const most = Math.max(stage.budget || 0, stage.predicted || 0, stage.used || 0, 1);
  const part = (value) => `${((100 * (value || 0)) / most).toFixed(2)}%`;
  const over = known(stage.budget) && stage.used > stage.budget;
  const label = `used ${bytes(stage.used)}, predicted ${bytes(stage.predicted)}, of ${bytes(stage.budget)}`;
  return svg("svg", { class: "bar", role: "img", "aria-label": label },
    svg("title", {}, label),
    svg("rect", { class: "track", width: part(stage.budget), height: 12, rx: 3 }),
    svg("rect", { class: "predicted", width: part(stage.predicted), height: 12, rx: 3 }),
    svg("rect", { class: over ? "over" : "used", y: 3, width: part(stage.used), height: 6, rx: 2 }));
}

function taskHead(task) {
  return el("th", { scope: "row", class: "task", title: `${task.namespace}/${task.name}` },
    chip(task.colour), el("span", { class: "space" }, `${task.namespace}/`), el("strong", {}, task.name));
}

function progress(task) {
  if (!known(task.totalSteps)) return el("td", {}, "–");
  const step = task.step || 0;
  return el("td", {}, el("div", { class: "progress" },
    el("progress", { max: Math.max(1, task.totalSteps), value: step, "aria-label": `Steps of ${task.name}` }),
    el("span", {}, `${number(step)} / ${number(task.totalSteps)}`)));
}

const pipe = (task) => el("td", { class: "pipe", title: task.pipeline || "" }, task.pipeline || "–");
const numeric = (value) => el("td", { class: "number" }, value);

const ROW = {
  training: (task) => [
    taskHead(task), el("td", {}, state(task.state)), pipe(task), numeric(number(task.priority)), progress(task),
    numeric(loss(task.loss)), numeric(loss(task.evaluationLoss)), numeric(number(task.tokensPerSecond)), numeric(number(task.restarts)),
    el("td", {}, time(task.started))],
  waiting: (task) => [
    numeric(known(task.place) ? number(task.place) : "–"), taskHead(task), numeric(number(task.priority)), pipe(task),
    el("td", {}, state(task.state)), el("td", { class: "why" }, el("b", {}, task.reason), task.message ? ` — ${task.message}` : ""),
    el("td", {}, time(task.waitsSince))],
  finished: (task) => [
    taskHead(task), el("td", {}, state(task.state)), numeric(number(task.step)), numeric(loss(task.loss)), numeric(loss(task.evaluationLoss)),
    el("td", { class: "why" }, task.adapter ? el("code", {}, task.adapter) : [el("b", {}, task.reason), task.message ? ` — ${task.message}` : ""]),
    el("td", {}, took(task)), el("td", {}, time(task.completed))],
};
const NOTHING = {
  training: "No task is training.", waiting: "No task is waiting.", finished: "No task has finished.",
};
const SECTION = { training: "training", waiting: "queue", finished: "finished" };

function showTasks(list) {
  const name = list.list;
  if (list.offset && list.offset >= list.total) { // the last page has gone
    page.offsets[name] = Math.max(0, Math.ceil(list.total / ROWS) - 1) * ROWS;
    look();
  }
  const rows = byId(`${name}-rows`);
  count(SECTION[name], list.total);
  empty(name, list.total === 0, NOTHING[name]);
  rows.closest(".wide").hidden = list.total === 0;
  keyed(rows, list.tasks, (task) => task.uid, () => el("tr"), (row, task) => row.replaceChildren(...ROW[name](task)));
  showPager(list);
}

function showPager(list) {
  const pager = byId(`${list.list}-pager`);
  if (list.total <= ROWS) return pager.replaceChildren();
  if (!pager.firstChild) {
    const turn = (by, words) => {
      const button = el("button", { type: "button", "aria-label": `${words} page of ${SECTION[list.list]}` }, words);
      button.addEventListener("click", () => {
        if (button.getAttribute("aria-disabled") === "true") return;
        page.offsets[list.list] = Math.max(0, page.offsets[list.list] + by);
        look();
      });
      return button;
    };
    pager.append(el("span", { "aria-live": "polite" }), turn(-ROWS, "Previous"), turn(ROWS, "Next"));
  }
  const [range, previous, next] = pager.children;
  range.textContent = `${number(list.offset + 1)}–${number(list.offset + list.tasks.length)} of ${number(list.total)}`;
  // Not disabled: a button that has the focus would lose it.
  previous.setAttribute("aria-disabled", list.offset === 0);
  next.setAttribute("aria-disabled", list.offset + list.tasks.length >= list.total);
  return undefined;
}

// --- loss curves ---

function showLosses(losses) {
  byId("losses-title").hidden = losses.curves.length === 0;
  keyed(byId("losses"), losses.curves, (curve) => curve.uid, () => el("li", {}, el("figure")), (node, curve) => {
    const newest = curve.losses.length ? curve.losses[curve.losses.length - 1] : null;
    node.firstChild.replaceChildren(
      el("figcaption", {}, chip(curve.colour), named(curve), curve.training ? "" : el("span", { class: "done" }, "not training"), el("b", {}, loss(newest))),
      curveChart(curve));
  });
  const more = byId("losses-more");
  more.hidden = losses.total <= losses.curves.length;
  more.textContent = `${number(losses.total - losses.curves.length)} more are not drawn.`;
}

function curveChart(curve) {
  const [width, height, left, right, top, bottom] = [280, 110, 38, 6, 6, 18];
  const values = [...curve.losses, ...curve.evaluations.map(([, value]) => value)];
  const steps = [...curve.steps, ...curve.evaluations.map(([step]) => step)];
  const label = `Loss of ${curve.namespace}/${curve.name}`;
  const chart = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img" });
  if (!values.length) return fill(chart, { "aria-label": `${label}: none yet` }, []);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = (high - low) * 0.08 || Math.abs(high) * 0.05 || 1;
  const [first, last] = [Math.min(...steps), Math.max(Math.max(...steps), Math.min(...steps) + 1)];
  const x = (step) => left + ((width - left - right) * (step - first)) / (last - first);
  const y = (value) => top + ((height - top - bottom) * (high + room - value)) / (high - low + 2 * room);
  const path = curve.steps.map((step, index) => `${index ? "L" : "M"}${x(step).toFixed(1)} ${y(curve.losses[index]).toFixed(1)}`).join("");
  const one = curve.steps.length === 1 ? [[curve.steps[0], curve.losses[0]]] : [];
  const lines = high > low ? [low, (low + high) / 2, high] : [high];
  const evaluated = curve.evaluations.length ? `, evaluated ${loss(curve.evaluations[curve.evaluations.length - 1][1])}` : "";
  const told = curve.losses.length
    ? `from ${loss(curve.losses[0])} at step ${curve.steps[0]} to ${loss(curve.losses[curve.losses.length - 1])} at step ${curve.steps[curve.steps.length - 1]}`
    : "no step yet";
  return fill(chart, { "aria-label": `${label}: ${told}${evaluated}` }, [
    lines.map((value) => svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) })),
    lines.map((value) => svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(high < 1 ? 3 : 2))),
    svg("text", { x: left, y: height - 3 }, number(first)),
    svg("text", { x: width - right, y: height - 3, "text-anchor": "end" }, `step ${number(last)}`),
    svg("path", { class: `curve ${colour(curve.colour)}`, d: path }),
    [...one, ...curve.evaluations].map(([step, value]) => svg("circle", { class: `point ${colour(curve.colour)}`, cx: x(step), cy: y(value), r: 3.5 },
      svg("title", {}, `step ${step}: ${loss(value)}`))),
  ]);
}

// --- timelines ---

async function lookAtTimeline(node, name) {
  if (node.looking) return;
  node.looking = true;
  try {
    while (node.isConnected && node.querySelector("details").open) {
      if (!document.hidden) await drawTimeline(node.querySelector(".timeline"), name);
      await pause(TIMELINE_EVERY);
    }
  } finally {
    node.looking = false;
  }
}

async function drawTimeline(place, name) {
  try {
    const timeline = await ask("timeline", { pipeline: name });
    if (timeline) place.replaceChildren(...timelineChart(timeline));
  } catch (error) {
    tags.clear();
    place.replaceChildren(el("p", { class: "muted" }, error.message));
  }
}

function timelineChart(timeline) {
  if (!timeline.spans.length) return [el("p", { class: "muted" }, "No stage has computed anything yet.")];
  const [left, right, lane, gap, axis] = [92, 8, 26, 5, 20];
  const width = 1320;
  const height = timeline.stages * (lane + gap) + axis;
  const scale = (width - left - right) / Math.max(1, timeline.length);
  const who = (span) => span.tasks.map((index) => timeline.tasks[index].name || "a task of another namespace").join(", ");
  const parts = [];
  for (let stage = 0; stage < timeline.stages; stage += 1) {
    const y = stage * (lane + gap);
    parts.push(
      svg("text", { x: 0, y: y + 17 }, `stage ${stage}`),
      svg("text", { x: left - 10, y: y + 17, "text-anchor": "end" }, `${Math.round(100 * timeline.busy[stage])} %`),
      svg("rect", { class: "lane", x: left, y, width: timeline.length * scale, height: lane, rx: 2 }));
  }
  for (const span of timeline.spans) {
    const x = left + span.start * scale;
    const wide = Math.max(0.5, (span.end - span.start) * scale - 0.7);
    const words = `${span.kind} ${span.number}: ${who(span)}, ${number(span.tokens)} tokens, ${((span.end - span.start) / 1000).toFixed(1)} ms`;
    const strips = span.kind === "update" || !span.tasks.length ? [null] : span.tasks;
    const group = svg("g", {}, svg("title", {}, words));
    strips.forEach((index, place) => {
      const hue = index === null ? "" : colour(timeline.tasks[index].colour);
      group.append(svg("rect", {
        class: `${span.kind} ${hue || "nobody"}`, x: x.toFixed(2), width: wide.toFixed(2),
        y: (span.stage * (lane + gap) + (lane * place) / strips.length).toFixed(2), height: (lane / strips.length).toFixed(2),
      }));
    });
    parts.push(group);
  }
  const ticks = 6;
  for (let tick = 0; tick <= ticks; tick += 1) {
    const moment = (timeline.length * tick) / ticks;
    parts.push(svg("text", { x: left + moment * scale, y: height - 4, "text-anchor": tick === ticks ? "end" : tick ? "middle" : "start" },
      `${(moment / 1000).toFixed(moment < 1e5 ? 1 : 0)} ms`));
  }
  const busy = timeline.busy.map((part, stage) => `stage ${stage} ${Math.round(100 * part)} %`).join(", ");
  const label = `Timeline of ${timeline.pipeline}, the last ${(timeline.length / 1000).toFixed(0)} milliseconds. Busy: ${busy}.`;
  return [
    svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, parts),
    el("ul", { class: "legend" },
      timeline.tasks.map((task) => el("li", {}, chip(task.colour), task.name || "a task of another namespace")),
      el("li", { class: "muted" }, "pale: forward, solid: backward, grey: update")),
  ];
}

// --- the round ---

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
  const turn = (page.turn = (page.turn || 0) + 1); // a newer look makes an older one's answers void
  try {
    const answers = await Promise.all([
      ask("overview", {}).then((found) => [showOverview, found]),
      ...Object.entries(page.offsets).map(([list, offset]) => ask("tasks", { list, offset, limit: ROWS }).then((found) => [showTasks, found])),
      ask("losses", {}).then((found) => [showLosses, found]),
    ]);
    if (turn !== page.turn) return tags.clear();
    for (const [show, found] of answers) if (found) show(found);
    byId("main").setAttribute("aria-busy", "false");
    page.since = null;
    tell("live", "live", null);
  } catch (error) {
    if (turn !== page.turn) return undefined;
    page.since = page.since || new Date();
    tags.clear();
    const why = (WORDS[error.kind] || ((message) => message))(error.message);
    const shown = byId("main").getAttribute("aria-busy") === "false";
    tell("away", error.kind === "following" ? "follows" : "no data",
      shown ? `${why} What is shown is of ${page.since.toLocaleTimeString()} or before.` : why);
    if (!shown) for (const note of document.querySelectorAll(".empty")) note.textContent = "No data yet.";
  }
  return undefined;
}

async function run() {
  for (;;) {
    if (!document.hidden) await look();
    await pause(EVERY);
  }
}

byId("namespace").addEventListener("change", (event) => {
  page.namespace = event.target.value;
  page.offsets = { waiting: 0, training: 0, finished: 0 };
  const query = page.namespace ? `?namespace=${encodeURIComponent(page.namespace)}` : location.pathname;
  history.replaceState(null, "", query);
  tags.clear();
  look();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
setInterval(() => {
  for (const node of document.querySelectorAll("time")) node.textContent = ago(node.dateTime);
}, 10000);
showNamespaces();
run();

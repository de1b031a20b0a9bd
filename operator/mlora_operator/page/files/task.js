// The page of one task.

import { compared, go, here, link, withCompared } from "./address.js";
import { curveChart, sizeIn } from "./chart.js";
import { byId, el, redrawn } from "./elements.js";
import { progress } from "./lists.js";
import { smoothing, smoothingSlider } from "./smoothing.js";
import { followTimeline } from "./timeline.js";
import { chip, known, loss, number, state, time, took, why } from "./words.js";

const HEIGHT = 300; // of the curve
let shown = null; // the parts of the page of the task that is shown, and the newest answer

function part(title, ...children) {
  const content = el("div");
  return { content, section: el("section", { "aria-label": title }, el("h3", {}, title), ...children, content) };
}

function make(name) {
  const parts = {
    name,
    title: el("h2", { tabindex: "-1" }),
    facts: el("div"),
    fetch: part("Fetch the adapter"),
    curve: part("Loss by step", smoothingSlider()),
    timeline: part("In its pipeline's timeline"),
    data: part("Data"),
    conditions: part("Conditions"),
    events: part("Events"),
    spec: part("Spec"),
    pipeline: null,
  };
  const sections = ["fetch", "curve", "timeline", "data", "conditions", "events", "spec"].map((one) => parts[one].section);
  byId("task-view").replaceChildren(
    el("p", { class: "back" }, link({ task: "", view: "" }, {}, "All tasks")), parts.title, parts.facts, ...sections);
  return parts;
}

// Another task than before, or none.
export function turnToTask() {
  const name = here().task;
  if (!name) {
    shown = null;
    byId("task-view").replaceChildren();
  } else if (!shown || shown.name !== name) {
    shown = make(name);
    redrawn(shown.title, { name }, () => shown.title.replaceChildren(name));
    shown.facts.replaceChildren(el("p", { class: "empty" }, "Loading …"));
    shown.title.focus();
  } else {
    drawCurve(); // what is chosen, and how smooth, may have changed
  }
}

export function showTask(detail) {
  const { task } = detail;
  shown.detail = detail;
  redrawn(shown.title, [task.namespace, task.name, task.colour], () => shown.title.replaceChildren(
    chip(task.colour), el("span", { class: "space" }, `${task.namespace}/`), task.name));
  redrawn(shown.facts, { ...detail, curve: null, spec: null, data: null, conditions: null, events: null }, (node) => node.replaceChildren(facts(detail)));
  draw(shown.fetch, detail.fetch || null, () => fetchBox(detail.fetch));
  shown.fetch.section.hidden = !detail.fetch;
  shown.curve.section.hidden = !detail.curve;
  drawCurve();
  draw(shown.data, detail.data || null, () => dataTable(detail.data));
  draw(shown.conditions, detail.conditions, () => table("Conditions", ["Condition", "Status", "Since", "Reason and message"],
    detail.conditions.map((one) => [one.type, one.status, time(one.since), why(one)]), "The operator has not processed the task yet."));
  draw(shown.events, detail.events, () => table("Events", ["When", "Type", "Reason and message"],
    [...detail.events].reverse().map((one) => [time(one.at), one.type, why(one)]), "None since the operator started. Older ones: kubectl events."));
  draw(shown.spec, detail.spec, () => table("Spec", ["Field", "Value"], detail.spec.map((one) => [one.name, one.value]),
    "The spec is not valid; the condition Accepted says why."));
  turnToPipeline(task.pipeline || null);
}

const draw = (one, item, content) => redrawn(one.content, item, (node) => node.replaceChildren(item === null ? el("p", { class: "muted" }, "None yet.") : content()));

function table(label, heads, rows, nothing) {
  if (!rows.length) return el("p", { class: "muted" }, nothing);
  return el("div", { class: "wide", role: "region", tabindex: "0", "aria-label": label },
    el("table", { class: "plain" },
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, rows.map(([first, ...others]) => el("tr", {}, el("th", { scope: "row" }, first), others.map((one) => el("td", {}, one)))))));
}

function facts({ task, bestStep, bestEvaluationLoss, checkpointStep, resumedStep, ...pairs }) {
  const shownFacts = [
    ["State", state(task.state)], ["Reason", task.reason], ["Progress", progress(task)], ["Time to the last step", task.eta],
    ["Loss", known(task.loss) && loss(task.loss)], ["Evaluation loss", known(task.evaluationLoss) && loss(task.evaluationLoss)],
    ["Best evaluation loss", known(bestEvaluationLoss) && `${loss(bestEvaluationLoss)} at step ${number(bestStep)}`],
    ["Reward margin", known(pairs.rewardMargin) && loss(pairs.rewardMargin)],
    ["Reward accuracy", known(pairs.rewardAccuracy) && `${(100 * pairs.rewardAccuracy).toFixed(0)} %`],
    ["Log-probability of chosen answers", known(pairs.chosenLogps) && loss(pairs.chosenLogps)],
    ["Log-probability of rejected answers", known(pairs.rejectedLogps) && loss(pairs.rejectedLogps)],
    ["Divergence from the reference (KL)", known(pairs.kl) && loss(pairs.kl)],
    ["Tokens/s", known(task.tokensPerSecond) && number(task.tokensPerSecond)], ["Pipeline", task.pipeline],
    ["Turn", known(task.place) && number(task.place)], ["Newest checkpoint", known(checkpointStep) && `step ${number(checkpointStep)}`],
    ["Resumed from", known(resumedStep) && `step ${number(resumedStep)}`],
    ["Restarts", task.restarts && number(task.restarts)], ["Preemptions", task.preemptions && number(task.preemptions)],
    ["Created", time(task.created)], ["Started", task.started && time(task.started)], ["Ended", task.completed && time(task.completed)],
    ["Took", task.completed && took(task)], ["Adapter", task.adapter && el("code", {}, task.adapter)],
  ];
  return el("div", {},
    task.message ? el("p", { class: "message" }, task.message) : "",
    el("dl", { class: "facts" }, shownFacts.filter(([, value]) => value).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
}

function fetchBox(command) {
  const field = el("input", { type: "text", readonly: true, value: command, "aria-label": "Command that fetches the adapter", spellcheck: "false" });
  const copied = el("span", { role: "status" });
  const button = el("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    field.select();
    try {
      await navigator.clipboard.writeText(command);
      copied.textContent = "Copied.";
    } catch { // only of pages over HTTPS, or of this machine
      copied.textContent = "Selected: copy it with the keyboard.";
      field.focus();
    }
  });
  return el("div", { class: "fetch" }, field, button, copied);
}

function drawCurve() {
  const { detail, curve } = shown;
  if (!detail || !detail.curve) return;
  const { task } = detail;
  const chosen = compared().includes(task.uid);
  const size = sizeIn(curve.content, HEIGHT);
  redrawn(curve.content, [detail.curve, smoothing(), chosen, size], (node) => {
    const button = node.querySelector("button") || el("button", { type: "button" });
    button.textContent = chosen ? "Compare with others" : "Add to the comparison";
    button.onclick = () => go(chosen ? { view: "compare", task: "" } : { compare: withCompared(task.uid) });
    const pale = smoothing() ? "Thin: as it was, thick: smoothed. " : "";
    const legend = el("p", { class: "muted" }, `${pale}Points: evaluations.`);
    node.replaceChildren(curveChart([detail.curve], size, smoothing(), `Loss of ${task.namespace}/${task.name}`), legend, button);
  });
}

function dataTable(data) {
  const counts = [
    ["Rows read", data.rows], ["Rows used", data.used], ["Cut to maxSeqLength", data.truncated], ["Held out for evaluation", data.heldOut],
    ["Left out by dataset.limit", data.beyondLimit], ["With special tokens in their text", data.specialTokens],
    ["Tokens of the rows used", data.tokens], ["Supervised tokens of these", data.supervisedTokens],
  ].filter(([, value], index) => index < 2 || value);
  const dropped = data.dropped.map((one) => [`Dropped as ${one.rule}`, number(one.count), one.first.length ? `first in line ${one.first.join(", ")}` : ""]);
  const format = data.format ? [["Format", data.format, ""]] : [];
  const rows = [...format, ...counts.map(([name, value]) => [name, number(value), ""]), ...dropped];
  return table("Data", ["Rows", "Number", dropped.length ? "Where" : ""], rows, "");
}

function turnToPipeline(name) {
  const { timeline, name: task } = shown;
  timeline.section.hidden = name === null;
  if (shown.pipeline === name) return;
  shown.pipeline = name;
  const place = el("div", { class: "timeline" }, el("p", { class: "muted" }, "Loading …"));
  timeline.content.replaceChildren(place);
  if (name !== null) followTimeline(place, name, () => true, task);
}

window.addEventListener("resize", () => { if (shown) drawCurve(); });

export const taskAsked = () => ({ task: here().task });

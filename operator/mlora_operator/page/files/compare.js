// Curves of several tasks over each other.

import { compared, link, stay, taskLink, withoutCompared } from "./address.js";
import { curveChart, letter, sizeIn } from "./chart.js";
import { byId, el, keyed, redrawn, svg } from "./elements.js";
import { smoothing, smoothingSlider } from "./smoothing.js";
import { colour, loss, number } from "./words.js";

const HEIGHT = 400;
let shown = null;

// To the comparison, or away from it.
export function turnToComparison(wanted) {
  if (!wanted) {
    shown = null;
    byId("compare-view").replaceChildren();
  } else if (!shown) {
    shown = { title: el("h2", { tabindex: "-1" }, "Curves over each other"), picture: el("div"), legend: el("ul", { class: "compared" }), note: el("p", { class: "muted" }), losses: null };
    byId("compare-view").replaceChildren(
      el("p", { class: "back" }, link({ view: "" }, {}, "All tasks")), shown.title, smoothingSlider(), shown.picture, shown.legend, shown.note);
    shown.title.focus();
  }
  if (wanted && !compared().length) showComparison({ curves: [] });
  else draw();
}

export function showComparison(losses) {
  shown.losses = losses;
  draw();
}

function draw() {
  if (!shown || !shown.losses) return;
  const { curves } = shown.losses;
  const missing = compared().length - curves.length;
  const size = sizeIn(shown.picture, HEIGHT);
  redrawn(shown.picture, [curves, smoothing(), size], (node) => node.replaceChildren(
    curves.length ? curveChart(curves, size, smoothing(), "Loss by step") : el("p", { class: "empty" }, "Choose curves on the page of all tasks.")));
  keyed(shown.legend, curves.map((curve, index) => ({ ...curve, index })), (curve) => curve.uid, makeEntry, drawEntry);
  shown.note.textContent = missing > 0 ? `${number(missing)} of the chosen curves ${missing === 1 ? "is" : "are"} no longer kept.` : "";
}

function makeEntry(curve) {
  const remove = el("button", { type: "button", "aria-label": `Remove ${curve.namespace}/${curve.name}` }, "Remove");
  remove.addEventListener("click", () => {
    stay({ compare: withoutCompared(curve.uid) });
    shown.title.focus();
  });
  return el("li", {}, el("span", { class: "entry" }), remove);
}

function drawEntry(node, curve) {
  const evaluated = curve.evaluations.length ? `, evaluated ${loss(curve.evaluations.at(-1)[1])}` : "";
  const sample = svg("svg", { class: "sample", viewBox: "0 0 36 8", "aria-hidden": "true" },
    svg("path", { class: `curve d${curve.index} ${colour(curve.colour)}`, d: "M0 4L36 4" }));
  node.firstChild.replaceChildren(sample, el("b", {}, letter(curve.index)), " ", taskLink(curve), ` ${loss(curve.losses.at(-1))}${evaluated}`);
}

window.addEventListener("resize", draw);

export const comparisonAsked = () => ({ uids: compared().join(",") });

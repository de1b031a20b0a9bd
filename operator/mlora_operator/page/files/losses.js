// A small curve for each task, with a box to put it beside others.

import { compared, link, MOST_COMPARED, stay, taskLink, withCompared, withoutCompared } from "./address.js";
import { curveChart } from "./chart.js";
import { byId, el, keyed } from "./elements.js";
import { chip, loss, number } from "./words.js";

const SIZE = { width: 280, height: 110 };

function makeCard(curve) {
  const box = el("input", { type: "checkbox", "aria-label": `Compare ${curve.namespace}/${curve.name}` });
  box.addEventListener("change", () => stay({ compare: box.checked ? withCompared(curve.uid) : withoutCompared(curve.uid) }));
  return el("li", { "data-uid": curve.uid }, el("figure", {}, el("figcaption"), el("div")), el("label", { class: "compare" }, box, "compare"));
}

function drawCard(node, curve) {
  const [caption, picture] = node.querySelector("figure").children;
  caption.replaceChildren(
    chip(curve.colour), el("span", { class: "task", title: `${curve.namespace}/${curve.name}` }, taskLink(curve)),
    curve.training ? "" : el("span", { class: "done" }, "not training"), el("b", {}, loss(curve.losses.at(-1))));
  picture.replaceChildren(curveChart([curve], SIZE, 0, `Loss of ${curve.namespace}/${curve.name}`));
}

export function showLosses(losses) {
  byId("losses-title").hidden = losses.curves.length === 0;
  keyed(byId("losses"), losses.curves, (curve) => curve.uid, makeCard, drawCard);
  const more = byId("losses-more");
  more.hidden = losses.total <= losses.curves.length;
  more.textContent = `${number(losses.total - losses.curves.length)} more are not drawn.`;
  showChosen();
}

// Which curves are chosen, as the address says.
export function showChosen() {
  const uids = compared();
  for (const card of byId("losses").children) card.querySelector("input").checked = uids.includes(card.dataset.uid);
  const bar = byId("chosen");
  bar.hidden = uids.length === 0;
  if (bar.hidden) return;
  if (!bar.firstChild) {
    const clear = el("button", { type: "button" }, "Clear");
    clear.addEventListener("click", () => {
      stay({ compare: "" });
      byId("losses").querySelector("input")?.focus();
    });
    bar.append(el("span", { "aria-live": "polite" }), link({ view: "compare", task: "" }, {}, "Compare them"), clear);
  }
  bar.firstChild.textContent = `${uids.length} of at most ${MOST_COMPARED} curves ${uids.length === 1 ? "is" : "are"} chosen.`;
}

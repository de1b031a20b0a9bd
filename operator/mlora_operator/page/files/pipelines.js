// A pipeline: its state, and for each stage the memory that its tasks may take, took and have.

import { el, svg } from "./elements.js";
import { followTimeline } from "./timeline.js";
import { bytes, known, number, state, time } from "./words.js";

export function makePipeline(pipeline) {
  const name = `${pipeline.namespace}/${pipeline.name}`;
  const drawing = el("div", { class: "timeline" }, el("p", { class: "muted" }, "Loading …"));
  const details = el("details", {}, el("summary", {}, "Timeline"), drawing);
  const node = el("article", { class: "pipeline", "aria-label": `Pipeline ${name}` }, el("div", { class: "top" }), details);
  details.addEventListener("toggle", () => {
    node.classList.toggle("open", details.open);
    if (details.open) followTimeline(drawing, name, () => details.open);
  });
  return node;
}

export function drawPipeline(node, pipeline) {
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
  const label = `Stages of ${pipeline.name}`;
  return el("div", {},
    el("div", { class: "stages", role: "region", tabindex: "0", "aria-label": label }, el("table", { "aria-label": label },
      el("thead", {}, el("tr", {},
        el("th", { scope: "col", class: "number" }, "Stage"), el("th", { scope: "col" }, "Layers"), el("th", { scope: "col" }, "Device"),
        el("th", { scope: "col" }, "Memory"), el("th", { scope: "col", class: "number" }, "Predicted"),
        el("th", { scope: "col", class: "number" }, "Used"), el("th", { scope: "col", class: "number" }, "Budget"))),
      el("tbody", {}, rows))),
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

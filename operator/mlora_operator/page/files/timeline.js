// What the stages of a pipeline computed lately, asked for as long as somebody looks.

import { ask, forget, pause } from "./asking.js";
import { el, svg } from "./elements.js";
import { chip, colour, number } from "./words.js";

const EVERY = 5000; // milliseconds
const KINDS = ["forward", "backward", "update", "evaluate"];

// Draws the timeline of pipeline `name` in `place` for as long as `wanted` says so. `only`: the task that it is about; others
// are grey.
export async function followTimeline(place, name, wanted, only = null) {
  if (place.looking) return;
  place.looking = true;
  try {
    while (place.isConnected && wanted()) {
      if (!document.hidden) await draw(place, name, only);
      await pause(EVERY);
    }
  } finally {
    place.looking = false;
  }
}

async function draw(place, name, only) {
  try {
    const timeline = await ask("timeline", { pipeline: name });
    if (timeline) place.replaceChildren(...(only ? [share(timeline, only)] : []), ...timelineChart(timeline, only));
  } catch (error) {
    forget();
    place.replaceChildren(el("p", { class: "muted" }, error.message));
  }
}

// Microseconds of a timeline that is `length` long.
function span(microseconds, length) {
  if (length >= 1e7) return `${(microseconds / 1e6).toFixed(1)} s`;
  return `${(microseconds / 1000).toFixed(length < 1e6 ? 1 : 0)} ms`;
}

// The same in words.
function share(timeline, only) {
  const own = timeline.spans.filter((one) => one.tasks.some((index) => timeline.tasks[index].name === only));
  const counts = KINDS.map((kind) => [kind, own.filter((one) => one.kind === kind).length]).filter(([, found]) => found);
  const lately = `In the last ${span(timeline.length, timeline.length)} of this pipeline`;
  if (!counts.length) return el("p", { class: "muted" }, `${lately}, no stage computed anything for this task.`);
  const words = counts.map(([kind, found]) => `${number(found)} ${kind}`).join(", ");
  return el("p", { class: "muted" }, `${lately}, the stages computed for this task: ${words}.`);
}

function timelineChart(timeline, only) {
  if (!timeline.spans.length) return [el("p", { class: "muted" }, "No stage has computed anything yet.")];
  const [left, right, lane, gap, axis] = [92, 8, 26, 5, 20];
  const width = 1320;
  const height = timeline.stages * (lane + gap) + axis;
  const scale = (width - left - right) / Math.max(1, timeline.length);
  const who = (one) => one.tasks.map((index) => timeline.tasks[index].name || "a task of another namespace").join(", ");
  const parts = [];
  for (let stage = 0; stage < timeline.stages; stage += 1) {
    const y = stage * (lane + gap);
    parts.push(
      svg("text", { x: 0, y: y + 17 }, `stage ${stage}`),
      svg("text", { x: left - 10, y: y + 17, "text-anchor": "end" }, `${Math.round(100 * timeline.busy[stage])} %`),
      svg("rect", { class: "lane", x: left, y, width: timeline.length * scale, height: lane, rx: 2 }));
  }
  for (const one of timeline.spans) {
    const x = left + one.start * scale;
    const wide = Math.max(0.5, (one.end - one.start) * scale - 0.7);
    const words = `${one.kind} ${one.number}: ${who(one)}, ${number(one.tokens)} tokens, ${span(one.end - one.start, one.end - one.start)}`;
    const strips = one.kind === "update" || !one.tasks.length ? [null] : one.tasks;
    const group = svg("g", {}, svg("title", {}, words));
    const owned = (index) => !only || timeline.tasks[index].name === only;
    strips.forEach((index, place) => {
      const mine = index === null ? !one.tasks.length || one.tasks.some(owned) : owned(index);
      const hue = index === null || !mine ? "" : colour(timeline.tasks[index].colour) || (only ? "mine" : "");
      group.append(svg("rect", {
        class: `${one.kind} ${hue || "nobody"}${mine ? "" : " other"}`, x: x.toFixed(2), width: wide.toFixed(2),
        y: (one.stage * (lane + gap) + (lane * place) / strips.length).toFixed(2), height: (lane / strips.length).toFixed(2),
      }));
    });
    parts.push(group);
  }
  const ticks = 6;
  for (let tick = 0; tick <= ticks; tick += 1) {
    const moment = (timeline.length * tick) / ticks;
    parts.push(svg("text", { x: left + moment * scale, y: height - 4, "text-anchor": tick === ticks ? "end" : tick ? "middle" : "start" },
      span(moment, timeline.length)));
  }
  const busy = timeline.busy.map((part, stage) => `stage ${stage} ${Math.round(100 * part)} %`).join(", ");
  const label = `Timeline of ${timeline.pipeline}, the last ${span(timeline.length, timeline.length)}. Busy: ${busy}.`;
  return [
    svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, parts),
    el("ul", { class: "legend" },
      only ? el("li", {}, chip(timeline.tasks.find((task) => task.name === only)?.colour), `${only}; grey and pale: others`)
        : timeline.tasks.map((task) => el("li", {}, chip(task.colour), task.name || "a task of another namespace")),
      el("li", { class: "muted" }, "pale: forward, solid: backward, grey: update")),
  ];
}

// Curves over steps, one or several in one picture. Several are told apart by colour, by dashes, by the
// shape of their points and by a letter at their end.

import { fill, svg } from "./elements.js";
import { smoothed } from "./smoothing.js";
import { colour, loss, number } from "./words.js";

const [NARROW, WIDE] = [280, 1230]; // units of a chart that fills its place
const FRAME = 26; // around it
const LETTER = 12; // units between two letters at least

export const letter = (index) => String.fromCharCode(65 + index);

// As wide as `place`, so that its words have the size of all others.
export const sizeIn = (place, height) => ({ width: Math.max(NARROW, Math.min(WIDE, place.clientWidth - FRAME)), height });

// `size`: width and height. `weight`: of smoothing, see there.
export function curveChart(curves, size, weight, label) {
  const [width, height, left, right, top, bottom] = [size.width, size.height, 38, curves.length > 1 ? 20 : 6, 6, 18];
  const values = curves.flatMap((curve) => [...curve.losses, ...curve.evaluations.map(([, value]) => value)]);
  const steps = curves.flatMap((curve) => [...curve.steps, ...curve.evaluations.map(([step]) => step)]);
  const chart = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img" });
  if (!values.length) return fill(chart, { "aria-label": `${label}: none yet` }, []);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = (high - low) * 0.08 || Math.abs(high) * 0.05 || 1;
  const [first, last] = [Math.min(...steps), Math.max(Math.max(...steps), Math.min(...steps) + 1)];
  const x = (step) => left + ((width - left - right) * (step - first)) / (last - first);
  const y = (value) => top + ((height - top - bottom) * (high + room - value)) / (high - low + 2 * room);
  const lines = high > low ? ticks(low, high, height > 150 ? 5 : 3) : [high];
  const ends = [];
  const drawn = curves.map((curve, index) => {
    const hue = colour(curve.colour);
    const shown = weight ? smoothed(curve.losses, weight) : curve.losses;
    const path = (points) => points.map((value, point) => `${point ? "L" : "M"}${x(curve.steps[point]).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const evaluated = curve.evaluations.map(([step, value], point) => `${point ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const single = shown.length === 1 ? [[curve.steps[0], shown[0]]] : [];
    if (shown.length) ends.push({ index, hue, x: x(curve.steps.at(-1)), y: y(shown.at(-1)) });
    return [
      weight ? svg("path", { class: `curve raw ${hue}`, d: path(curve.losses) }) : "",
      curve.evaluations.length > 1 ? svg("path", { class: `evaluated ${hue}`, d: evaluated }) : "",
      svg("path", { class: `curve d${curves.length > 1 ? index : 0} ${hue}`, d: path(shown) }),
      [...single, ...curve.evaluations].map(([step, value]) => svg("path", { class: `point ${hue}`, d: mark(index, x(step), y(value)) },
        svg("title", {}, `${curves.length > 1 ? `${letter(index)}, ` : ""}step ${step}: ${loss(value)}`))),
    ];
  });
  const words = curves.map((curve, index) => (curves.length > 1 ? `${letter(index)} ${told(curve)}` : told(curve))).join("; ");
  return fill(chart, { "aria-label": `${label}: ${words}` }, [
    lines.map((value) => svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) })),
    lines.map((value) => svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(high < 1 ? 3 : 2))),
    svg("text", { x: left, y: height - 3 }, number(first)),
    svg("text", { x: width - right, y: height - 3, "text-anchor": "end" }, `step ${number(last)}`),
    drawn.flat(2),
    curves.length > 1 ? letters(ends) : [],
  ]);
}

// A point of the curve with that number: a circle, a square, a diamond, a triangle, and these once more.
function mark(index, x, y) {
  const shapes = ["m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z", "m-3.2-3.2h6.4v6.4h-6.4z", "m0-4.6l4.6 4.6l-4.6 4.6l-4.6-4.6z", "m0-4.4l4.4 7.4h-8.8z"];
  return `M${x.toFixed(1)} ${y.toFixed(1)}${shapes[index % shapes.length]}`;
}

function told(curve) {
  const way = curve.losses.length
    ? `from ${loss(curve.losses[0])} at step ${curve.steps[0]} to ${loss(curve.losses.at(-1))} at step ${curve.steps.at(-1)}`
    : "no step yet";
  return curve.evaluations.length ? `${way}, evaluated ${loss(curve.evaluations.at(-1)[1])}` : way;
}

const ticks = (low, high, count) => Array.from({ length: count }, (_, index) => low + ((high - low) * index) / (count - 1));

// From the top down, none over another.
function letters(ends) {
  let free = 0;
  return [...ends].sort((one, other) => one.y - other.y).map((end) => {
    const y = Math.max(free, end.y + 4);
    free = y + LETTER;
    return svg("text", { class: `letter ${end.hue}`, x: end.x + 5, y }, letter(end.index));
  });
}

// Numbers, moments and states in words.

import { el } from "./elements.js";

const COLOURS = 12;

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
export const known = (value) => value !== null && value !== undefined;
export const number = (value) => (known(value) ? whole.format(value) : "–");
export const loss = (value) => (known(value) ? value.toFixed(Math.abs(value) < 0.1 ? 4 : 3) : "–");

export function bytes(value) {
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

export const ago = (moment) => `${duration((Date.now() - Date.parse(moment)) / 1000)} ago`;

export function time(moment) {
  if (!moment) return "–";
  return el("time", { datetime: moment, title: new Date(moment).toLocaleString() }, ago(moment));
}

export function took(task) {
  if (!task.started || !task.completed) return "–";
  return duration((Date.parse(task.completed) - Date.parse(task.started)) / 1000);
}

// Of a task, a condition or an event.
export const why = (one) => [el("b", {}, one.reason), one.message ? ` — ${one.message}` : ""];

const KINDS = {
  Succeeded: "good", Ready: "good", Failed: "bad", Rejected: "bad", Stalled: "bad", UploadBlocked: "bad",
  Training: "busy", Saving: "busy", Queued: "wait", Preempted: "wait", Waiting: "wait", Starting: "wait",
};
export const state = (word) => el("span", { class: "state", "data-is": KINDS[word] || "other" }, word);
export const colour = (index) => (Number.isInteger(index) && index >= 0 && index < COLOURS ? `k${index}` : "");
export const chip = (index) => colour(index) && el("span", { class: `chip ${colour(index)}`, "aria-hidden": "true" });

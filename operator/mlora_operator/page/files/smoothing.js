// A curve without its wobble: an exponential mean, without the pull towards zero of its first points.

import { here, stay } from "./address.js";
import { el } from "./elements.js";

const MOST = 95; // percent

// 0 (as it is) to 0.95, as the address says.
export function smoothing() {
  const percent = Number.parseInt(here().smooth, 10);
  return Number.isFinite(percent) ? Math.min(MOST, Math.max(0, percent)) / 100 : 0;
}

export function smoothed(values, weight) {
  let mean = 0;
  return values.map((value, index) => {
    mean = weight * mean + (1 - weight) * value;
    return mean / (1 - weight ** (index + 1));
  });
}

// A slider. What moves it moves the address, and whoever draws by that draws anew.
export function smoothingSlider() {
  const told = () => (smoothing() ? `${Math.round(100 * smoothing())} %` : "none");
  const slider = el("input", { type: "range", min: 0, max: MOST, step: 5, value: Math.round(100 * smoothing()), "aria-valuetext": told() });
  const output = el("output", {}, told());
  slider.addEventListener("input", () => {
    stay({ smooth: slider.value === "0" ? "" : slider.value });
    slider.setAttribute("aria-valuetext", told());
    output.textContent = told();
  });
  return el("label", { class: "smoothing" }, "Smoothing ", slider, output);
}

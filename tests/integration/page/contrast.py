"""How far words stand out from what lies behind them, worked out in the browser."""

# The lowest contrast of any visible text with what lies behind it (WCAG 2.2, 1.4.3).
LOWEST_CONTRAST = """
() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = parts(colour).map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if ((parts(colour)[3] ?? 1) > 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  let lowest = 21;
  for (const node of document.querySelectorAll("main *, header *")) {
    const words = [...node.childNodes].some((one) => one.nodeType === 3 && one.textContent.trim());
    if (!words || !node.checkVisibility()) continue;
    if (node.ariaDisabled === "true" || node.closest("svg")) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(behind(node))];
    lowest = Math.min(lowest, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
  return lowest;
}
"""

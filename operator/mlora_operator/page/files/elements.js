// Elements, made by `el` and `svg` alone, which know no HTML: whatever comes from the API becomes text or a number, never
// markup.

const SVG = "http://www.w3.org/2000/svg";

export function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== "") node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}
export const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

// `draw(node, item)`, unless `item` is what it was the last time.
export function redrawn(node, item, draw) {
  const content = JSON.stringify(item);
  if (node.seen === content) return;
  draw(node, item);
  node.seen = content;
}

// Children of `parent` for `items`, in their order: one that is there stays the same element, so that nobody loses focus,
// and is drawn anew only when its item has changed.
export function keyed(parent, items, keyOf, make, draw) {
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
    redrawn(node, item, draw);
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  }
  for (const node of former.values()) node.remove();
}

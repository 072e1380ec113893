// Elements out of plain values. Text becomes text nodes alone, so that a name from a store is never markup.

import { say } from "./language.js";

const SVG = "http://www.w3.org/2000/svg";
const [LONG, TAIL] = [28, 20]; // characters of a name that may be shortened, and of its end, which is always seen
let ruler = null;

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element; functions among the attributes are listeners, children are nodes or text. */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element, likewise. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** How wide a text is, in the font of the page and in units of its size. */
function width(text) {
  ruler ??= document.createElement("canvas").getContext("2d");
  ruler.font = `100px ${getComputedStyle(document.body).fontFamily}`;
  return ruler.measureText(text).width / 100;
}

/**
 * A name from the store, which may be of any script and direction: it cannot turn the text around it. A long one is two
 * parts, of which a table shortens the first, so that the middle is left out. The whole is its title.
 */
export function named(text) {
  const letters = [...(text === null || text === undefined ? "–" : String(text))];
  if (letters.length <= LONG) return el("bdi", { class: "name" }, letters.join(""));
  const [head, tail] = [letters.slice(0, -TAIL), letters.slice(-TAIL)].map((part) => part.join(""));
  const node = el("bdi", { class: "name long", title: letters.join("") }, el("span", { class: "head" }, head), el("span", { class: "tail" }, tail));
  node.style.setProperty("--tail", `${width(tail)}em`);
  return node;
}

/** A sentence from the store or its reader, such as a reason: it wraps. */
export function phrase(text) {
  return el("bdi", { class: "phrase" }, text === null || text === undefined ? "–" : String(text));
}

/** Several things that have one direction of reading, side by side where there is room. */
export function section(title, note, ...children) {
  return el("section", {}, el("h2", {}, title), note ? el("p", { class: "note" }, note) : null, ...children);
}

/** What is said where a section has nothing to show. */
export function nothing(text) {
  return el("p", { class: "nothing" }, text);
}

/** A box that scrolls by itself, by keyboard too, so that the page never does sideways. */
export function scroller(label, ...children) {
  return el("div", { class: "scroller", role: "region", tabindex: 0, "aria-label": label }, ...children);
}

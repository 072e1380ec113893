// Choices that a reader makes, and what is drawn of them.

import { el } from "./dom.js";
import { say } from "./language.js";

/** What differs among values, in the order of its first mention. */
export function distinct(values) {
  return [...new Set(values)];
}

/** Options of a select whose texts are those of the values. */
export function options(values, text = (value) => (value === null ? say("none") : String(value))) {
  return values.map((value) => ({ value, text: text(value) }));
}

function select(control, changed) {
  const { label, options: given } = control;
  const node = el("select", { "aria-label": label, change: () => changed(given[node.selectedIndex].value) },
    given.map((option) => el("option", { dir: "auto" }, option.text)));
  node.selectedIndex = Math.max(0, given.findIndex((option) => option.value === control.value));
  return el("label", { class: "control" }, `${label} `, node);
}

/**
 * controls: [{ name, label, options: [{ value, text }], value? }]. draw(values by name) → nodes, drawn again after each
 * change; the controls stay, and with them the keyboard's focus. ready(redraw)? is told how to draw again.
 */
export function chosen(controls, draw, ready = () => {}) {
  const out = el("div", { class: "drawn" });
  const values = Object.fromEntries(controls.map((control) => [control.name, control.value ?? control.options[0]?.value]));
  const redraw = () => out.replaceChildren(...[draw(values)].flat(Infinity).filter(Boolean));
  const row = controls.filter((control) => control.options.length > 1).map((control) => select(control, (value) => {
    values[control.name] = value;
    redraw();
  }));
  redraw();
  ready(redraw);
  return el("div", { class: "chosen" }, row.length ? el("div", { class: "controls" }, row) : null, out);
}

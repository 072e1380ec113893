// Heat maps as tables: each cell has its number, so the colour is never alone, and screen readers read them as they are.

import { el, scroller } from "../dom.js";
import { ink, shade } from "./colours.js";
import { say } from "../language.js";
import { aligned, num } from "../numbers.js";

const STEPS = 24;
const FEW = 0.1; // of all cells; more than these are no outliers

/** A colour, [red, green, blue], as style sheets write it. */
export function css(colour) {
  return `rgb(${colour.join(",")})`;
}

/** The ends of the scale: those of all values, but for a few far outliers (Tukey's outer fences), which take the end's colour. */
function fences(values) {
  const sorted = values.slice().sort((one, other) => one - other);
  const [q1, q3] = [0.25, 0.75].map((part) => sorted[Math.floor(part * (sorted.length - 1))]);
  const [least, most] = [sorted[0], sorted[sorted.length - 1]];
  const few = (test) => sorted.filter(test).length <= FEW * sorted.length;
  const [low, high] = [q1 - 3 * (q3 - q1), q3 + 3 * (q3 - q1)];
  if (low === high) return [least, most];
  return [few((value) => value < low) ? Math.max(least, low) : least, few((value) => value > high) ? Math.min(most, high) : most];
}

/** At least `least` apart, so that small differences look small. */
function widened([low, high], least) {
  const missing = Math.max(0, (least - (high - low)) / 2);
  return [low - missing, high + missing];
}

/** A colour scale between the texts of its ends. */
export function scaleKey(scale, low, high) {
  const bar = el("span", { class: "bar", "aria-hidden": "true" });
  bar.style.background = `linear-gradient(to right, ${Array.from({ length: STEPS }, (_, step) => css(shade(scale, step / (STEPS - 1)))).join(",")})`;
  return el("div", { class: "key" }, low, bar, high);
}

/** The legend of a colour scale from low to high, and whether some of the values lie beyond. */
export function key(scale, [low, high], values, unit) {
  if (low === high) return el("div", { class: "key" }, say("all {0} {1}", num(low), unit));
  return scaleKey(scale, `${Math.min(...values) < low ? "≤ " : ""}${num(low)}`, `${Math.max(...values) > high ? "≥ " : ""}${num(high)} ${unit}`);
}

/**
 * rows and columns: [{ value, text: node or text }]; number(row value, column value) → number, name of one, or null for
 * none; what is not finite is written without colour. least: how far apart the ends of the colours are at least.
 */
export function heat({ label, corner, rows, columns, number, scale, unit, least = 0 }) {
  const cells = rows.map((row) => columns.map((column) => number(row.value, column.value)));
  const finite = cells.flat().filter((value) => typeof value === "number");
  const [low, high] = widened(fences(finite), least);
  const shown = aligned(finite);
  const drawn = (value) => {
    const cell = el("td", { class: "number" }, shown(value));
    if (typeof value === "number") {
      const colour = shade(scale, high > low ? (value - low) / (high - low) : 0.5);
      cell.style.background = css(colour);
      cell.style.color = ink(colour);
    }
    return cell;
  };
  const head = el("tr", {}, el("th", { scope: "col" }, corner), columns.map((column) => el("th", { scope: "col", class: "number" }, column.text)));
  const body = rows.map((row, place) => el("tr", {}, el("th", { scope: "row" }, row.text), cells[place].map(drawn)));
  return el("div", { class: "heat" }, finite.length ? key(scale, [low, high], finite, unit) : null,
    scroller(label, el("table", {}, el("caption", {}, label), el("thead", {}, head), el("tbody", {}, body))));
}

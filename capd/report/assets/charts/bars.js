// Bars with their numbers: what a line of one point would show.

import { el, named } from "../dom.js";
import { num } from "../numbers.js";

/** rows: [{ text, value }]; a value that is no number has no bar. */
export function bars(label, rows) {
  const known = rows.map((row) => row.value).filter((value) => typeof value === "number");
  const [low, high] = [Math.min(0, ...known), Math.max(0, ...known)];
  const part = (value) => (high > low ? (100 * (value - low)) / (high - low) : 0);
  const drawn = ({ text, value }) => {
    const fill = el("span");
    if (typeof value === "number") {
      fill.style.left = `${part(Math.min(0, value))}%`;
      fill.style.width = `${part(Math.max(0, value)) - part(Math.min(0, value))}%`;
    }
    return el("tr", {}, el("th", { scope: "row" }, named(text)), el("td", { class: "number" }, num(value)), el("td", { class: "bar" }, el("span", { class: "track", "aria-hidden": "true" }, fill)));
  };
  return el("table", { class: "bars" }, el("caption", {}, label), el("tbody", {}, rows.map(drawn)));
}

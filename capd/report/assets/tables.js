// Tables: sorted by any column, turned page by page, numbers to the right.

import { el, scroller } from "./dom.js";
import { say } from "./language.js";
import { aligned, count, num } from "./numbers.js";

const ROWS = 50;
const SPAN = 10; // of a column whose decimals are aligned: no number loses more than one of its four digits

function compared(one, other) {
  const [left, right] = [one ?? null, other ?? null];
  if (left === null || right === null) return (left === null) - (right === null);
  return typeof left === "number" && typeof right === "number" ? left - right : String(left).localeCompare(String(right), "en", { numeric: true });
}

/**
 * columns: [{ text, value(row), show(value, row) → node or text, number }]; a header cell is a button that sorts.
 * rows may be thousands; fifty are in the page at a time.
 */
export function table(label, columns, rows) {
  let [sorted, by, down, first] = [rows, -1, false, 0];
  const shows = columns.map(({ show, value }) => (show === num ? aligned(rows.map(value), SPAN) : show));
  const body = el("tbody");
  const place = el("span", { class: "place", role: "status" });
  const turn = (text, step) => el("button", { type: "button", click: () => { first += step; fill(); } }, text);
  const [back, on] = [turn(say("← Back"), -ROWS), turn(say("More →"), ROWS)];
  const heads = columns.map((column, number) => el("th", { scope: "col", class: column.number ? "number" : null },
    el("button", { type: "button", click: () => sort(number) }, column.text)));

  function sort(number) {
    down = by === number ? !down : false;
    by = number;
    const { value } = columns[number];
    sorted = rows.slice().sort((one, other) => compared(value(one), value(other)) * (down ? -1 : 1));
    heads.forEach((head, at) => (at === number ? head.setAttribute("aria-sort", down ? "descending" : "ascending") : head.removeAttribute("aria-sort")));
    first = 0;
    fill();
  }

  function fill() {
    body.replaceChildren(...sorted.slice(first, first + ROWS).map((row) => el("tr", {}, columns.map((column, at) => {
      const value = column.value(row);
      return el("td", { class: column.number ? "number" : null }, shows[at] ? shows[at](value, row) : String(value ?? "–"));
    }))));
    [back.disabled, on.disabled] = [first === 0, first + ROWS >= sorted.length];
    place.textContent = say("{0} to {1} of {2}", count(Math.min(first + 1, sorted.length)), count(Math.min(first + ROWS, sorted.length)), count(sorted.length));
  }

  fill();
  const turning = rows.length > ROWS ? el("div", { class: "turning" }, back, place, on) : null;
  return el("div", { class: "table" }, scroller(label, el("table", {}, el("caption", {}, label), el("thead", {}, el("tr", {}, heads)), body)), turning);
}

/** A figure with its title, one line on how to read it, and the table of its numbers behind it, made when it is opened. */
export function figure(title, note, drawing, numbers) {
  const details = numbers && el("details", { toggle: () => {
    if (details.open && details.children.length === 1) details.append(numbers());
  } }, el("summary", {}, say("Numbers of “{0}”", title)));
  return el("figure", { "aria-label": title }, el("figcaption", {}, el("h3", {}, title), note ? el("p", {}, note) : null), drawing, details);
}

// Heat maps of many cells on a canvas, with the cell under the pointer in words beside it.

import { el } from "../../report/dom.js";
import { SCALES, shade, themed } from "../../report/charts/colours.js";
import { scaleKey } from "../../report/charts/heat.js";

const [LEAST_HEIGHT, MOST_HEIGHT, ROW] = [120, 420, 14];

/**
 * columns, rows: their numbers; the first row is at the top. part(column, row) → 0 to 1, or null for no cell.
 * told(column, row) → text of a cell; clicked(column, row)? opens it. ends: texts of the left and right end.
 * low, high: texts of the ends of the scale.
 */
export function map({ label, columns, rows, part, told, clicked, ends, low, high, scale = SCALES.viridis }) {
  const canvas = el("canvas", { width: Math.max(1, columns), height: Math.max(1, rows), role: "img", "aria-label": label });
  canvas.style.height = `${Math.min(MOST_HEIGHT, Math.max(LEAST_HEIGHT, rows * ROW))}px`;
  const readout = el("p", { class: "readout" }, " ");
  paint(canvas, columns, rows, part, scale);
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return [[event.clientX - box.left, box.width, columns], [event.clientY - box.top, box.height, rows]].map(([offset, size, count]) => Math.min(count - 1, Math.max(0, Math.floor((offset / size) * count))));
  };
  canvas.addEventListener("mousemove", (event) => { readout.textContent = told(...at(event)) || " "; });
  if (clicked) canvas.addEventListener("click", (event) => clicked(...at(event)));
  return el("div", { class: clicked ? "map clicked" : "map" }, scaleKey(scale, low, high), canvas, el("div", { class: "ends" }, el("span", {}, ends[0]), el("span", {}, ends[1])), readout);
}

function paint(canvas, columns, rows, part, scale) {
  if (!columns || !rows) return;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  const empty = (themed("grid").match(/[0-9a-f]{2}/gi) ?? ["e0", "e2", "e5"]).map((pair) => parseInt(pair, 16));
  for (let row = 0; row < rows; row += 1) {
    for (let column = 0; column < columns; column += 1) {
      const value = part(column, row);
      const [red, green, blue] = value === null ? empty : shade(scale, value);
      image.data.set([red, green, blue, 255], 4 * (row * columns + column));
    }
  }
  context.putImageData(image, 0, 0);
}

// A line of the last minute in a table's cell.

import { svg } from "../../report/dom.js";

const [WIDTH, HEIGHT] = [120, 22];

/** values: oldest first, null where nothing is known. */
export function spark(values) {
  const most = Math.max(1e-9, ...values.filter((value) => value !== null));
  const step = WIDTH / Math.max(1, values.length - 1);
  const parts = [[]];
  values.forEach((value, place) => {
    if (value === null) parts.push([]);
    else parts.at(-1).push(`${(place * step).toFixed(1)},${(HEIGHT - 1 - (value / most) * (HEIGHT - 2)).toFixed(1)}`);
  });
  return svg("svg", { class: "spark", width: WIDTH, height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" },
    parts.filter((part) => part.length).map((part) => svg("polyline", { points: part.join(" ") })));
}

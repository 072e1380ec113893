// Box plots across layers: a box for each layer and quant type, side by side, on a linear or a signed logarithmic axis.

import { el, scroller, svg } from "../dom.js";
import { stroke } from "./colours.js";
import { say } from "../language.js";
import { num } from "../numbers.js";

const [HEIGHT, BOTTOM, TOP] = [360, 44, 14];
const [NARROWEST, WIDEST, GAP, ROOM] = [14, 64, 16, 1500];
const [TITLE, DIGIT] = [32, 7]; // the room of the axis title, and of a character of its numbers

/** Linear around zero, logarithmic beyond `near`: what has a sign has no logarithm of its own. */
export function signedLog(value, near) {
  return Math.asinh(value / near);
}

function marks(low, high, near, log) {
  if (!log) return Array.from({ length: 7 }, (_, place) => low + ((high - low) * place) / 6);
  const found = [0];
  for (let size = 10 ** Math.ceil(Math.log10(near)); size <= Math.max(-low, high); size *= 10) found.push(size, -size);
  const inside = found.filter((mark) => mark >= low && mark <= high).sort((one, other) => one - other);
  const every = Math.ceil(inside.length / 11);
  const zero = inside.indexOf(0);
  return inside.filter((_, place) => (place - Math.max(0, zero)) % every === 0);
}

/** groups: [{ text, boxes: [{ number of its look, low, q1, median, q3, high }] }]; types: texts of the looks. */
export function boxplot({ label, groups, types, log, unit }) {
  const all = groups.flatMap((group) => group.boxes);
  const near = Math.max(Number.MIN_VALUE, median(all.map((box) => box.q3 - box.q1).filter((size) => size > 0)) ?? 1);
  const [least, most] = [Math.min(...all.map((box) => box.low)), Math.max(...all.map((box) => box.high))];
  const [low, high] = least === most ? [least - 1, most + 1] : [least, most];
  const put = (value) => (log ? signedLog(value, near) : value);
  const y = (value) => TOP + ((put(high) - put(value)) / (put(high) - put(low))) * (HEIGHT - TOP - BOTTOM);
  const ticks = marks(low, high, near, log);
  const edge = TITLE + DIGIT * Math.max(...ticks.map((mark) => num(mark).length));
  const room = Math.min(ROOM, innerWidth - 60) - edge;
  const slot = Math.min(WIDEST, Math.max(NARROWEST, (room / groups.length - GAP) / types.length));
  const step = types.length * slot + GAP;
  const width = Math.max(edge + groups.length * step + GAP, 320);
  const node = svg("svg", { class: "boxes", width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": say("{0}; the numbers stand in the table below", label) });
  for (const mark of ticks) {
    node.append(svg("line", { class: "grid", x1: edge, x2: width, y1: y(mark), y2: y(mark) }),
      svg("text", { x: edge - 8, y: y(mark) + 4, "text-anchor": "end" }, num(mark)));
  }
  const every = Math.ceil(groups.length / Math.max(1, (groups.length * step) / 34));
  groups.forEach((group, place) => {
    const left = edge + GAP / 2 + place * step;
    for (const box of group.boxes) node.append(drawn(box, left + box.look * slot, slot, y, types[box.look], group.text));
    if (place % every === 0) node.append(svg("text", { x: left + (types.length * slot) / 2, y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, group.text));
  });
  node.append(svg("text", { x: edge + (width - edge) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, say("layer")),
    svg("text", { x: 14, y: (HEIGHT - BOTTOM) / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${(HEIGHT - BOTTOM) / 2})` }, unit));
  return el("div", { class: "chart" }, el("div", { class: "legend" }, types.map((text, look) => el("span", { class: "entry" }, patch(look), el("bdi", {}, text)))), scroller(label, node));
}

function patch(look) {
  return svg("svg", { class: "swatch", width: 16, height: 12, "aria-hidden": "true" }, svg("rect", { x: 1, y: 1, width: 14, height: 10, ...painted(look) }));
}

function painted(look) {
  const { colour, dash } = stroke(look);
  return { fill: colour, "fill-opacity": 0.3, stroke: colour, "stroke-width": 1.5, "stroke-dasharray": dash.join(" ") || null };
}

function drawn(box, left, slot, y, type, layer) {
  const { colour } = stroke(box.look);
  const [middle, right] = [left + slot / 2, left + slot - 2];
  const line = (x1, x2, y1, y2, width = 1.5) => svg("line", { x1, x2, y1, y2, stroke: colour, "stroke-width": width });
  return svg("g", {}, svg("title", {}, say("{0}, layer {1}: median {2}, middle half {3} to {4}", type, layer, num(box.median), num(box.q1), num(box.q3))),
    line(middle, middle, y(box.high), y(box.q3)), line(middle, middle, y(box.q1), y(box.low)),
    line(middle - slot / 4, middle + slot / 4, y(box.high), y(box.high)), line(middle - slot / 4, middle + slot / 4, y(box.low), y(box.low)),
    svg("rect", { x: left + 2, y: y(box.q3), width: slot - 4, height: Math.max(1, y(box.q1) - y(box.q3)), ...painted(box.look) }),
    line(left + 2, right, y(box.median), y(box.median), 3));
}

function median(values) {
  return values.length ? values.slice().sort((one, other) => one - other)[Math.floor(values.length / 2)] : null;
}

// How the magnitudes of a tensor spread while iterations go on: a column for each, coloured by the share of its values.

import { SCALES, shade } from "./colours.js";
import { el, scroller, svg } from "../dom.js";
import { css, scaleKey } from "./heat.js";
import { say } from "../language.js";
import { count, num, power } from "../numbers.js";
import { figure, table } from "../tables.js";

const [LEFT, TOP, BOTTOM, ROW] = [70, 8, 42, 11];
const [NARROWEST, WIDEST, ROOM] = [6, 90, 1500];
const PERCENT = 100; // the data has hundredths of a percent
const LEAST = Math.log10(0.01);

/** spread: { iteration, shares: [[first exponent, share…]…] } of two records or more; nothing of fewer. beside: how many share the width. */
export function spreadOver(title, spread, step, beside = 1) {
  const known = spread.shares.map((shares, place) => ({ at: spread.iteration[place], first: shares[0], shares: shares.slice(1).map((share) => share / PERCENT) })).filter((one) => one.shares.length);
  if (known.length < 2) return null;
  const cells = known.flatMap((one, column) => one.shares.map((share, place) => ({ column, at: one.at, exponent: one.first + place, share }))).filter((cell) => cell.share > 0);
  const columns = [{ text: step, number: true, value: (row) => row.at, show: count }, { text: say("from"), number: true, value: (row) => row.exponent, show: power }, { text: say("share (%)"), number: true, value: (row) => row.share, show: num }];
  return figure(title, say("Each column is a record or an iteration: the brighter a cell, the more of its values have 2ᵉ ≤ |x| < 2ᵉ⁺¹. A band that moves up or down, or grows wider, asks for another scale."), drawing(title, known, cells, step, beside), () => table(title, columns, cells));
}

function drawing(label, known, cells, step, beside) {
  const [low, high] = [Math.min, Math.max].map((end) => end(...cells.map((cell) => cell.exponent)));
  const most = Math.log10(Math.max(...cells.map((cell) => cell.share)));
  const slot = Math.min(WIDEST, Math.max(NARROWEST, (Math.min(ROOM, innerWidth - 60) / beside - LEFT) / known.length));
  const [width, height] = [LEFT + known.length * slot + 12, TOP + (high - low + 1) * ROW + BOTTOM];
  const y = (exponent) => TOP + (high - exponent) * ROW;
  const node = svg("svg", { class: "boxes", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": say("{0}; the numbers stand in the table below", label) });
  for (const { column, at, exponent, share } of cells) {
    const colour = css(shade(SCALES.viridis, (Math.log10(share) - LEAST) / Math.max(0.1, most - LEAST)));
    node.append(svg("rect", { x: LEFT + column * slot, y: y(exponent), width: slot - 0.5, height: ROW - 0.5, fill: colour }, svg("title", {}, `${step} ${count(at)}, ${power(exponent)}: ${num(share)} %`)));
  }
  const every = Math.max(1, Math.ceil((high - low + 1) / 12));
  for (let exponent = high; exponent >= low; exponent -= every) node.append(svg("text", { x: LEFT - 8, y: y(exponent) + ROW - 2, "text-anchor": "end" }, power(exponent)));
  const apart = Math.ceil(44 / slot);
  known.forEach((one, column) => { if (column % apart === 0) node.append(svg("text", { x: LEFT + (column + 0.5) * slot, y: height - BOTTOM + 16, "text-anchor": "middle" }, count(one.at))); });
  const middle = TOP + (height - TOP - BOTTOM) / 2;
  node.append(svg("text", { x: LEFT + (width - LEFT) / 2, y: height - 6, "text-anchor": "middle" }, step), svg("text", { x: 14, y: middle, "text-anchor": "middle", transform: `rotate(-90 14 ${middle})` }, say("magnitude |x|")));
  return el("div", { class: "chart" }, scaleKey(SCALES.viridis, "≤ 0.01", `${num(10 ** most)} ${say("% of the values")}`), scroller(label, node));
}

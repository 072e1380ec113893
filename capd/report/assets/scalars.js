// Scalars over the iterations: what the job recorded beside its tensors, such as its loss.

import { chart } from "./charts.js";
import { el, section } from "./dom.js";
import { count, drawable, num } from "./numbers.js";
import { figure, table } from "./tables.js";

const TEXTS = {
  title: "Scalars", note: "Numbers of the step that the job recorded beside its tensors.",
  value: "value", spread: "The mean over ranks and micro-batches, and the smallest and largest value.", iteration: "iteration",
};
const LINES = [{ name: "mean", text: "mean" }, { name: "min", text: "smallest" }, { name: "max", text: "largest" }];
const HEIGHT = 200;

/** The first and the last iteration of all that the page draws, for axes that compare. */
export function iterationRange(data) {
  const all = [...data.scalars, ...data.iterations].flatMap((one) => one.iteration).filter((value) => typeof value === "number");
  if (!all.length) return undefined;
  const [low, high] = all.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
  return low < high ? [low, high] : undefined;
}

export function scalars(data) {
  if (!data.scalars.length) return null;
  const range = iterationRange(data);
  return section(TEXTS.title, TEXTS.note, el("div", { class: "scalars" }, data.scalars.map((one) => drawn(one, data.sources.length > 1, range))));
}

function drawn(one, several, range) {
  const title = several ? `${one.name} · ${one.source}` : one.name;
  const spread = one.mean.some((value, place) => value !== one.min[place] || value !== one.max[place]);
  const lines = spread ? LINES : LINES.slice(0, 1);
  const columns = [{ text: TEXTS.iteration, number: true, value: (row) => one.iteration[row], show: count },
    ...lines.map(({ name, text }) => ({ text: spread ? text : one.name, number: true, value: (row) => one[name][row], show: num }))];
  return figure(title, spread ? TEXTS.spread : null,
    chart({ label: title, height: HEIGHT, x: { label: TEXTS.iteration, values: one.iteration, whole: true, show: count, range }, y: { label: TEXTS.value },
      lines: lines.map(({ name, text }) => ({ label: spread ? text : one.name, values: one[name].map((value) => drawable(value)) })) }),
    () => table(title, columns, one.iteration.map((_, place) => place)));
}

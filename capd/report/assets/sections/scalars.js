// Scalars over the iterations: what the job recorded beside its tensors, such as its loss.

import { chart } from "../charts/lines.js";
import { el, section } from "../dom.js";
import { say, word } from "../language.js";
import { count, drawable, num } from "../numbers.js";
import { figure, table } from "../tables.js";

const LINES = [{ name: "mean", text: word("mean") }, { name: "min", text: word("smallest") }, { name: "max", text: word("largest") }];
const HEIGHT = 200;

/** The names of runs without their directories, unless two have the same. */
export function runNames(sources) {
  const names = sources.map((source) => source.split("/").pop().replace(/\.zarr$/, ""));
  return new Set(names).size === names.length ? names : sources;
}

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
  return section(say("Scalars"), say("Numbers of the step that the job recorded beside its tensors."), el("div", { class: "scalars" }, data.scalars.map((one) => drawn(one, data.sources, range))));
}

function drawn(one, sources, range) {
  const title = sources.length > 1 ? `${one.name} · ${runNames(sources)[sources.indexOf(one.source)]}` : one.name;
  const spread = one.mean.some((value, place) => value !== one.min[place] || value !== one.max[place]);
  const lines = spread ? LINES : LINES.slice(0, 1);
  const columns = [{ text: say("iteration"), number: true, value: (row) => one.iteration[row], show: count },
    ...lines.map(({ name, text }) => ({ text: spread ? say(text) : one.name, number: true, value: (row) => one[name][row], show: num }))];
  return figure(title, spread ? say("The mean over ranks and micro-batches, and the smallest and largest value.") : null,
    chart({ label: title, height: HEIGHT, x: { label: say("iteration"), values: one.iteration, whole: true, show: count, range }, y: { label: say("value") },
      lines: lines.map(({ name, text }) => ({ label: spread ? say(text) : one.name, values: one[name].map((value) => drawable(value)) })) }),
    () => table(title, columns, one.iteration.map((_, place) => place)));
}

// One statistic, layer by iteration; a cell leads to its tensor.

import { el, named, nothing, section } from "../../report/dom.js";
import { SCALES } from "../../report/charts/colours.js";
import { say, word } from "../../report/language.js";
import { count, num } from "../../report/numbers.js";
import { ask, asker } from "../api.js";
import { map } from "../charts/map.js";
import { placeOf } from "../places.js";

const WAIT_MS = 200; // after a key, so that a word is one question
const FIELDS = { tensor_name: word("tensor"), rank: word("rank"), operation: word("operation"), layer_type: word("layer type"), quant_type: word("quant type"), component: word("component"), phase: word("phase") };

export async function layers({ runs: [name] }, signal) {
  const run = await ask("run", { run: name }, signal);
  const wanted = { run: name, statistic: "absmax" };
  const out = el("div", { class: "drawn" });
  const asking = asker("layers", signal);

  async function fill() {
    try {
      const found = await asking({ ...wanted });
      if (found !== undefined) out.replaceChildren(...drawn(name, found));
    } catch (error) {
      out.replaceChildren(nothing(error.message));
    }
  }

  const choice = (label, values, texts, take) => {
    const node = el("select", { "aria-label": label, change: () => { take(values[node.selectedIndex]); fill(); } }, texts.map((text) => el("option", { dir: "auto" }, text)));
    take(values[0]);
    return el("label", { class: "control" }, `${label} `, node);
  };
  const selects = Object.entries(FIELDS).filter(([field]) => run.fields[field].some((value) => value !== null && value !== "")).map(([field, text]) => {
    const values = run.fields[field].filter((value) => value !== null && value !== "");
    return choice(say(text), values, values.map(String), (value) => { wanted[field] = value; });
  });
  const statistic = choice(say("statistic"), run.statistics, run.statistics.map(worded), (value) => { wanted.statistic = value; });
  let waiting = null;
  const search = el("input", { type: "search", "aria-label": say("Search names"), placeholder: say("words of a name"), input: () => { wanted.words = search.value; clearTimeout(waiting); waiting = setTimeout(fill, WAIT_MS); } });
  await fill();
  return { nodes: section(say("Layers by iteration"), say("From stored statistics. Press a cell to open its tensor."), el("div", { class: "controls" }, statistic, selects, el("label", { class: "control" }, `${say("search")} `, search)), out) };
}

const TEXTS = { absmax: word("absmax"), std: word("std"), mean: word("mean"), kurtosis: word("kurtosis"), crest: word("crest factor"), nonfinite: word("NaN and Inf"), zero: word("zeros (%)"), above: word("above {0} (%)"), below: word("below {0} (%)"), flushed: word("flushed by {0} (%)") };

function worded(statistic) {
  const [name, format] = statistic.split(":");
  return say(TEXTS[name], format);
}

function drawn(run, found) {
  if (!found.layers.length) return [nothing(say("No series of this choice has a layer."))];
  const size = (value) => (typeof value === "number" ? Math.abs(value) : null);
  const known = found.values.flat().map(size).filter((value) => value !== null && value > 0);
  const [least, most] = known.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, 0]);
  const part = (value) => {
    if (size(value) === null) return null;
    if (!known.length || size(value) === 0) return 0;
    return most > least ? Math.max(0, Math.log(size(value) / least) / Math.log(most / least)) : 0.5;
  };
  const range = (column) => { const [first, last] = found.iterations[column]; return first === last ? count(first) : `${count(first)}–${count(last)}`; };
  const label = say("{0}, layer by iteration", worded(found.statistic));
  return [
    map({ label, columns: found.iterations.length, rows: found.layers.length, scale: SCALES.cividis, low: known.length ? num(least) : "0", high: known.length ? num(most) : "0",
      part: (column, row) => part(found.values[row][column]),
      told: (column, row) => `${say("layer {0}", found.layers[row])} · ${say("iteration")} ${range(column)}: ${num(found.values[row][column])}`,
      clicked: (_, row) => { location.hash = placeOf("tensor", run, found.paths[row]); },
      ends: [`${say("iteration")} ${found.iterations.length ? range(0) : "–"}`, found.iterations.length ? range(found.iterations.length - 1) : "–"] }),
    el("p", { class: "note" }, say("The first layer is at the top; colours are logarithmic."), found.step > 1 ? ` ${say("Every {0}th record is drawn.", count(found.step))}` : null),
    found.more ? nothing(say("More series match than are drawn: the last layers are missing. Search for the module.")) : null,
    el("details", {}, el("summary", {}, say("Layers")), el("ul", { class: "links" }, found.layers.map((layer, row) => el("li", {}, el("a", { href: placeOf("tensor", run, found.paths[row]) }, `${say("layer {0}", layer)}: `, named(num(found.values[row].at(-1)))))))),
  ].filter(Boolean);
}

// All tensors, found by name, rank, layer and type; and a page for each.

import { chosen, distinct, options } from "../controls.js";
import { magnitudes, scaleControls } from "./distributions.js";
import { el, named, nothing, section } from "../dom.js";
import { errorColumns, errorRows, metricText, QUICK } from "./errors.js";
import { say, word } from "../language.js";
import { axisControl, isLogarithmic, overIterations } from "./layers.js";
import { count, layerText, nbytes, num } from "../numbers.js";
import { recipeText } from "./recipe.js";
import { spreadOver } from "../charts/spread.js";
import { table } from "../tables.js";

const FILTERS = { quant_type: word("quant type"), rank: word("rank"), layer: word("layer"), layer_type: word("layer type"), tensor_name: word("tensor") };
const COUNTS = { count: word("count"), zero: word("zero"), nan: "NaN", inf: "Inf" };
const STATISTICS = [word("mean"), word("std"), word("min"), word("max"), word("absmax")];
const WHERE = { ...FILTERS, phase: word("phase"), operation: word("operation"), component: word("component"), module: word("module"), stack: word("stack"), dtype: word("dtype") };

/** Where the page of a series is. */
export function seriesPath(place) {
  return `#tensor/${place}`;
}

function row(text, name, show) {
  return { text: say(text), number: true, value: (one) => one[name], show };
}

/**
 * The name of each series where its quant type, rank and layer stand beside it: module and tensor, with the operation
 * where both are those of several, or the path if it has no module.
 */
function shortNames(all) {
  const plain = (one) => `${one.module}.${one.tensor_name}`;
  const operations = new Map();
  for (const one of all) operations.set(plain(one), (operations.get(plain(one)) ?? new Set()).add(one.operation));
  return all.map((one) => (!one.module ? one.path : operations.get(plain(one)).size > 1 ? `${one.module}.${one.operation}.${one.tensor_name}` : plain(one)));
}

export function tensors(data) {
  const names = shortNames(data.series);
  const all = data.series.map((one, place) => ({ ...one, place, name: names[place], words: [one.path, one.module, one.tensor_name, one.quant_type, one.dtype].join(" ").toLowerCase() }));
  const out = el("div", { class: "drawn" });
  let [words, kept] = [[], all];
  const columns = [{ text: say("tensor"), value: (one) => one.name, show: (name, one) => el("a", { href: seriesPath(one.place), title: one.path }, named(name)) }, { text: say("quant type"), value: (one) => one.quant_type, show: named },
    row(word("rank"), "rank", num), row(word("layer"), "layer", layerText), { text: say("dtype"), value: (one) => one.dtype }, row(word("records"), "records", count), row(word("mean"), "mean", num), row(word("std"), "std", num), row(word("max |x|"), "absmax", num),
    ...data.formats.map((format) => ({ text: say("{0} SQNR (dB)", format), number: true, value: (one) => one.errors[format]?.[0], show: num }))];
  const fill = () => {
    const found = kept.filter((one) => words.every((each) => one.words.includes(each)));
    out.replaceChildren(el("p", { class: "fact", role: "status" }, say("{0} of {1} series", count(found.length), count(all.length))), found.length ? table(say("Series"), columns, found) : nothing(say("Nothing matches: shorten the search, or set a filter back to any.")));
  };
  const search = el("input", { type: "search", "aria-label": say("Search names"), placeholder: say("words of a name"), input: () => { words = search.value.toLowerCase().split(/\s+/).filter(Boolean); fill(); } });
  const any = { value: undefined, text: say("any") };
  const filters = chosen(Object.entries(FILTERS).map(([name, label]) => ({ name, label: say(label), options: [any, ...options(distinct(all.map((one) => one[name])))] })), (values) => {
    kept = all.filter((one) => Object.keys(FILTERS).every((name) => values[name] === undefined || one[name] === values[name]));
    fill();
    return [];
  });
  const more = data.series_total > all.length ? el("p", { class: "note" }, say("{0} more series are in the groups of the other pages, but have no page of their own.", count(data.series_total - all.length))) : null;
  return section(say("Tensors"), say("A series is one tensor of one module on one rank. Press a column's name to sort by it."), more, el("div", { class: "controls" }, el("label", { class: "control" }, say("search"), " ", search)), filters, out);
}

function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.map(([text, value]) => el("div", {}, el("dt", {}, text), el("dd", {}, value))));
}

function identity(data, one, place) {
  const turn = (text, to) => (data.series[to] ? el("a", { href: seriesPath(to) }, text) : el("span", {}));
  const known = Object.entries(WHERE).filter(([name]) => one[name] !== null && one[name] !== undefined && one[name] !== "");
  return section(named(one.tensor_name), null, el("p", { class: "path" }, named(one.path)), el("nav", { class: "turning", "aria-label": say("Other tensors") }, turn(say("← previous"), place - 1), el("a", { href: "#tensors" }, say("all")), turn(say("next →"), place + 1)),
    facts([...known.map(([name, text]) => [say(text), named(one[name])]), [say("shape"), one.shape ? one.shape.join(" × ") || say("scalar") : "–"], [say("records"), count(one.records)], [say("raw"), nbytes(one.raw_bytes)]]),
    el("p", { class: "path", title: data.emulations[one.emulation] }, say("Emulation"), ": ", recipeText(data.emulations[one.emulation])));
}

function statistics(data, one) {
  const columns = data.quantiles.map((quantile, number) => ({ text: String(quantile), number: true, value: (row) => row[number], show: num }));
  return section(say("Statistics"), say("Over all of its records; std is √(Σ(x − mean)² / N) over finite values."), facts([...Object.entries(COUNTS).map(([name, text]) => [say(text), count(one[name])]), ...STATISTICS.map((name) => [say(name), num(one[name])])]),
    one.quantiles ? table(say("Quantiles of the finite values"), columns, [one.quantiles]) : nothing(data.quick ? say(QUICK) : say("Quantiles: its records do not lie together, so they were not kept.")));
}

function errorsOf(data, one) {
  const found = Object.keys(one.errors).length ? table(say("Errors by format"), errorColumns(data), errorRows(data, one.errors)) : nothing(say("Its values are not of high precision, or were not measured (see Overview, Left out)."));
  return section(say("Error of each format"), say("Of its values, had they been put into the format after the fact."), data.quick ? nothing(say(QUICK)) : found);
}

function records(data, one) {
  const moments = one.moments;
  const repeated = new Set(moments.iteration).size < moments.iteration.length || moments.iteration.includes(null);
  const at = repeated ? moments.iteration.map((_, number) => number * one.moments_step) : moments.iteration;
  const step = repeated ? say("record") : say("iteration");
  const spread = repeated ? { ...one.spread, iteration: one.spread.shares.map((_, number) => number * one.moments_step * Math.ceil(at.length / one.spread.shares.length)) } : one.spread;
  const columns = [{ text: say("iteration"), number: true, value: (row) => moments.iteration[row], show: count }, { text: say("micro-batch"), number: true, value: (row) => moments.micro_batch[row], show: count }, ...["mean", "std", "absmax"].map((name) => ({ text: say(name), number: true, value: (row) => moments[name][row], show: num }))];
  const drawn = chosen([{ name: "what", label: say("statistic"), options: options(["std", "mean", "absmax"], say) }, axisControl()], ({ what, axis }) => overIterations(say("{0} over its records", metricText(what)), metricText(what), [{ text: metricText(what), at, values: moments[what] }], { step, log: isLogarithmic(data, axis, one.tensor_name), behind: false }));
  return section(say("Over its records"), one.moments_step > 1 ? say("Every {0}th record is drawn.", count(one.moments_step)) : null,
    at.length > 1 ? [drawn, spreadOver(say("Magnitudes of its values, record by record"), spread, step)] : null, table(say("Records"), columns, moments.mean.map((_, number) => number)));
}

/** The page of one series. */
export function tensor(data, place) {
  const one = data.series[place];
  if (!one) return section(say("No such tensor"), null, nothing(say("This report has no page of that number; look among Tensors.")));
  return [
    identity(data, one, place), statistics(data, one),
    section(say("Histogram"), null, chosen(scaleControls(), (look) => magnitudes(say("Magnitudes of its values"), [{ ...one, text: String(one.tensor_name) }], data.grids, look))),
    errorsOf(data, one), records(data, one),
  ];
}

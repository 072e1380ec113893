// All tensors, found by name, rank, layer and type; and a page for each.

import { chosen, distinct, options } from "./controls.js";
import { magnitudes, SCALE_CONTROLS } from "./distributions.js";
import { el, named, nothing, section } from "./dom.js";
import { errorColumns, errorRows, QUICK } from "./errors.js";
import { overIterations } from "./layers.js";
import { count, layerText, nbytes, num } from "./numbers.js";
import { table } from "./tables.js";

const FILTERS = [["quant_type", "quant type"], ["rank", "rank"], ["layer", "layer"], ["layer_type", "layer type"], ["tensor_name", "tensor"]];
const ANY = { value: undefined, text: "any" };
const STATISTICS = ["count", "zero", "nan", "inf", "mean", "std", "min", "max", "absmax"];
const WHERE = ["quant_type", "rank", "layer", "phase", "layer_type", "operation", "component", "tensor_name", "module", "stack", "dtype"];

export function seriesPath(place) {
  return `#tensor/${place}`;
}

function row(text, name, show) {
  return { text, number: true, value: (one) => one[name], show };
}

export function tensors(data) {
  const all = data.series.map((one, place) => ({ ...one, place, words: [one.path, one.module, one.tensor_name, one.quant_type, one.dtype].join(" ").toLowerCase() }));
  const out = el("div", { class: "drawn" });
  let [words, kept] = [[], all];
  const columns = [{ text: "tensor", value: (one) => one.path, show: (path, one) => el("a", { href: seriesPath(one.place) }, named(path)) }, { text: "quant type", value: (one) => one.quant_type, show: named },
    row("rank", "rank", num), row("layer", "layer", layerText), { text: "dtype", value: (one) => one.dtype }, row("records", "records", count), row("mean", "mean", num), row("std", "std", num), row("max |x|", "absmax", num),
    ...data.formats.map((format) => ({ text: `${format} SQNR (dB)`, number: true, value: (one) => one.errors[format]?.[0], show: num }))];
  const fill = () => {
    const found = kept.filter((one) => words.every((word) => one.words.includes(word)));
    out.replaceChildren(el("p", { class: "fact", role: "status" }, `${count(found.length)} of ${count(all.length)} series`), found.length ? table("Series", columns, found) : nothing("Nothing matches: shorten the search, or set a filter back to any."));
  };
  const search = el("input", { type: "search", "aria-label": "Search names", placeholder: "words of a name", input: () => { words = search.value.toLowerCase().split(/\s+/).filter(Boolean); fill(); } });
  const filters = chosen(FILTERS.map(([name, label]) => ({ name, label, options: [ANY, ...options(distinct(all.map((one) => one[name])))] })), (values) => {
    kept = all.filter((one) => FILTERS.every(([name]) => values[name] === undefined || one[name] === values[name]));
    fill();
    return [];
  });
  const more = data.series_total > all.length ? el("p", { class: "note" }, `${count(data.series_total - all.length)} more series are in the groups of the other pages, but have no page of their own.`) : null;
  return section("Tensors", "A series is one tensor of one module on one rank. Press a column's name to sort by it.", more, el("div", { class: "controls" }, el("label", { class: "control" }, "search ", search)), filters, out);
}

function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.map(([text, value]) => el("div", {}, el("dt", {}, text), el("dd", {}, value))));
}

/** The page of one series. */
export function tensor(data, place) {
  const one = data.series[place];
  if (!one) return section("No such tensor", null, nothing("This report has no page of that number; look among Tensors."));
  const turn = (text, to) => (data.series[to] ? el("a", { href: seriesPath(to) }, text) : el("span", {}));
  const label = "Magnitudes of its values";
  const drawn = [{ ...one, text: String(one.tensor_name) }];
  const names = { quant_type: "quant type", layer_type: "layer type", tensor_name: "tensor" };
  const where = WHERE.filter((name) => one[name] !== null && one[name] !== undefined && one[name] !== "");
  const moments = one.moments;
  const repeated = new Set(moments.iteration).size < moments.iteration.length || moments.iteration.includes(null);
  const at = repeated ? moments.iteration.map((_, number) => number * one.moments_step) : moments.iteration;
  const columns = [{ text: "iteration", number: true, value: (row) => moments.iteration[row], show: count }, { text: "micro-batch", number: true, value: (row) => moments.micro_batch[row], show: count }, ...["mean", "std", "absmax"].map((name) => ({ text: name, number: true, value: (row) => moments[name][row], show: num }))];
  return [
    section(named(one.tensor_name), null, el("p", { class: "path" }, named(one.path)), el("nav", { class: "turning", "aria-label": "Other tensors" }, turn("← previous", place - 1), el("a", { href: "#tensors" }, "all"), turn("next →", place + 1)),
      facts([...where.map((name) => [names[name] ?? name, named(one[name])]), ["shape", one.shape ? one.shape.join(" × ") || "scalar" : "–"], ["records", count(one.records)], ["raw", nbytes(one.raw_bytes)]]),
      el("p", { class: "path" }, "emulation: ", one.emulation === null ? "not said" : named(one.emulation))),
    section("Statistics", "Over all of its records; std is √(Σ(x − mean)² / N) over finite values.", facts(STATISTICS.map((name, number) => [name, (number < 4 ? count : num)(one[name])])),
      one.quantiles ? table("Quantiles of the finite values", data.quantiles.map((quantile, number) => ({ text: String(quantile), number: true, value: (row) => row[number], show: num })), [one.quantiles]) : nothing(data.quick ? `Quantiles: ${QUICK}` : "Quantiles: its records do not lie together, so they were not kept.")),
    section("Histogram", null, chosen(SCALE_CONTROLS, (look) => magnitudes(label, drawn, data.grids, look))),
    section("Error of each format", "Of its values, had they been put into the format after the fact.", data.quick ? nothing(QUICK) : Object.keys(one.errors).length ? table("Errors by format", errorColumns(data), errorRows(data, one.errors)) : nothing("Its values are not of high precision, or were not measured (see Overview, Left out).")),
    section("Over its records", one.moments_step > 1 ? `Every ${count(one.moments_step)}th record is drawn.` : null,
      at.length > 1 ? chosen([{ name: "what", label: "statistic", options: options(["std", "mean", "absmax"]) }], ({ what }) => overIterations(`${what} over its records`, what, [{ text: what, at, values: moments[what] }], repeated ? "record" : "iteration", false)) : null,
      table("Records", columns, moments.mean.map((_, number) => number))),
  ];
}

// What each format would do to the captured values: layer by tensor, and tensor by format, coloured.

import { SCALES } from "../charts/colours.js";
import { chosen, distinct, options } from "../controls.js";
import { named, nothing, section } from "../dom.js";
import { heat } from "../charts/heat.js";
import { say, word } from "../language.js";
import { layerText, num } from "../numbers.js";
import { figure, table } from "../tables.js";

const UNITS = { sqnr_db: "dB", underflow_percent: "%", saturation_percent: "%", flush_percent: "%", lost_percent: "%" };
const LEAST = { sqnr_db: 6 }; // about one bit
export const METRIC_TEXTS = {
  sqnr_db: word("SQNR (dB)"), underflow_percent: word("underflow (%)"), saturation_percent: word("saturation (%)"), mse: word("MSE"), cosine: word("cosine"),
  relative: word("relative error"), max_abs: word("max |d|"), flush_percent: word("flushed (%)"), lost_percent: word("lost (%)"),
};
export const QUICK = word("Needs the elements, and --quick reads stored statistics alone: run capd report without --quick.");

/** A metric or a statistic in words. */
export function metricText(name) {
  return say(METRIC_TEXTS[name] ?? name);
}

/** The columns of a table of errors by format. */
export function errorColumns(data) {
  return [{ text: say("format"), value: (row) => row.format }, ...data.metrics.map((metric, place) => ({
    text: metricText(metric), number: true, value: (row) => row.errors[place], show: num,
  }))];
}

export function errorRows(data, errors) {
  return data.formats.filter((format) => errors[format]).map((format) => ({ format, errors: errors[format] }));
}

/** The look of a metric: brighter is better in the one scale, more in the other. */
function look(metric) {
  return { unit: UNITS[metric] ?? "", least: LEAST[metric], scale: metric === "sqnr_db" || metric === "cosine" ? SCALES.viridis : SCALES.cividis };
}

function byLayer(data, { type, format, metric }) {
  const place = data.metrics.indexOf(metric);
  const own = data.cells.filter((cell) => cell.quant_type === type);
  const found = new Map(own.map((cell) => [JSON.stringify([cell.layer, cell.tensor_name]), cell.errors[format]?.[place] ?? null]));
  return heat({
    label: say("{0} of {1}, by layer and tensor", metricText(metric), format), corner: say("layer"), ...look(metric),
    rows: distinct(own.map((cell) => cell.layer)).map((value) => ({ value, text: layerText(value) })),
    columns: distinct(own.map((cell) => cell.tensor_name)).map((value) => ({ value, text: named(value) })),
    number: (layer, name) => found.get(JSON.stringify([layer, name])) ?? null,
  });
}

function byFormat(data, { type, metric }) {
  const place = data.metrics.indexOf(metric);
  const own = new Map(data.distributions.filter((one) => one.quant_type === type && Object.keys(one.errors).length).map((one) => [one.tensor_name, one]));
  const title = say("{0}, by tensor and format", metricText(metric));
  const rows = [...own.values()].flatMap((one) => errorRows(data, one.errors).map((row) => ({ ...row, tensor: one.tensor_name })));
  const columns = [{ text: say("tensor"), value: (row) => row.tensor, show: named }, ...errorColumns(data)];
  return figure(title, null, heat({ label: title, corner: say("tensor"), ...look(metric), rows: [...own.keys()].map((value) => ({ value, text: named(value) })), columns: options(data.formats), number: (name, format) => own.get(name).errors[format]?.[place] ?? null }),
    () => table(say("Errors by tensor and format, all layers together"), columns, rows));
}

export function errors(data) {
  const title = say("Errors of formats");
  if (data.quick) return section(title, null, nothing(say(QUICK)));
  const measured = data.cells.filter((cell) => Object.keys(cell.errors).length);
  if (!measured.length) return section(title, null, nothing(say("No record holds values of high precision (bf16, fp16, fp32, fp64), which a format's error is measured on.")));
  const type = { name: "type", label: say("quant type"), options: options(distinct(measured.map((cell) => cell.quant_type))) };
  const format = { name: "format", label: say("format"), options: options(data.formats) };
  const metric = (value) => ({ name: "metric", label: say("metric"), options: data.metrics.map((name) => ({ value: name, text: metricText(name) })), value });
  return [
    section(title, say("Each format is applied to the captured values after the fact: the same tensors, every format, no second run. SQNR = 10·log10(Σx² / Σd²), 6 dB are about a bit; underflow: not zero before, zero after, in % of all values. The same captured values are the reference throughout."),
      ["sqnr_db", "underflow_percent"].map((name) => chosen([type, format, metric(name)], (values) => byLayer(data, values)))),
    section(say("Tensors by format"), say("All layers together: sums over all records first, then the metric, not a mean of metrics. A row is a tensor: where its best cell is no brighter than the others, the cheaper format does."), chosen([type, metric("sqnr_db")], (values) => byFormat(data, values))),
  ];
}

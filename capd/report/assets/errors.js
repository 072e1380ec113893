// What each format would do to the captured values: layer by tensor, coloured.

import { SCALES } from "./colours.js";
import { chosen, distinct, options } from "./controls.js";
import { named, nothing, section } from "./dom.js";
import { heat } from "./heat.js";
import { layerText, num } from "./numbers.js";
import { table } from "./tables.js";

const UNITS = { sqnr_db: "dB", underflow_percent: "%", saturation_percent: "%", flush_percent: "%", lost_percent: "%" };
export const METRIC_TEXTS = {
  sqnr_db: "SQNR (dB)", underflow_percent: "underflow (%)", saturation_percent: "saturation (%)", mse: "MSE", cosine: "cosine",
  relative: "relative error", max_abs: "max |d|", flush_percent: "flushed (%)", lost_percent: "lost (%)",
};
export const QUICK = "Needs the elements, and --quick reads stored statistics alone: run capd report without --quick.";

/** The columns of a table of errors by format. */
export function errorColumns(data) {
  return [{ text: "format", value: (row) => row.format }, ...data.metrics.map((metric, place) => ({
    text: METRIC_TEXTS[metric] ?? metric, number: true, value: (row) => row.errors[place], show: num,
  }))];
}

export function errorRows(data, errors) {
  return data.formats.filter((format) => errors[format]).map((format) => ({ format, errors: errors[format] }));
}

function map(data, { type, format, metric }) {
  const place = data.metrics.indexOf(metric);
  const own = data.cells.filter((cell) => cell.quant_type === type);
  const found = new Map(own.map((cell) => [JSON.stringify([cell.layer, cell.tensor_name]), cell.errors[format]?.[place] ?? null]));
  const unit = UNITS[metric] ?? "";
  return heat({
    label: `${METRIC_TEXTS[metric]} of ${format}, by layer and tensor`, corner: "layer", unit, scale: metric === "sqnr_db" || metric === "cosine" ? SCALES.viridis : SCALES.cividis,
    rows: distinct(own.map((cell) => cell.layer)).map((value) => ({ value, text: layerText(value) })),
    columns: distinct(own.map((cell) => cell.tensor_name)).map((value) => ({ value, text: named(value) })),
    number: (layer, name) => found.get(JSON.stringify([layer, name])) ?? null,
  });
}

function overall(data, type) {
  const rows = data.distributions.filter((one) => one.quant_type === type).flatMap((one) => errorRows(data, one.errors).map((row) => ({ ...row, tensor: one.tensor_name })));
  return table("Errors by tensor and format, all layers together", [{ text: "tensor", value: (row) => row.tensor, show: named }, ...errorColumns(data)], rows);
}

export function errors(data) {
  const title = "Errors of formats";
  if (data.quick) return section(title, null, nothing(QUICK));
  const measured = data.cells.filter((cell) => Object.keys(cell.errors).length);
  if (!measured.length) return section(title, null, nothing("No record holds values of high precision (bf16, fp16, fp32, fp64), which a format's error is measured on."));
  const types = options(distinct(measured.map((cell) => cell.quant_type)));
  const metrics = data.metrics.map((metric) => ({ value: metric, text: METRIC_TEXTS[metric] ?? metric }));
  const formats = options(data.formats);
  const pair = ["sqnr_db", "underflow_percent"];
  return [
    section(title, "Each format is applied to the captured values after the fact: the same tensors, every format, no second run. SQNR = 10·log10(Σx² / Σd²), 6 dB are about a bit; underflow: not zero before, zero after, in % of all values. The same captured values are the reference throughout.",
      pair.map((metric) => chosen([{ name: "type", label: "quant type", options: types }, { name: "format", label: "format", options: formats }, { name: "metric", label: "metric", options: metrics, value: metric }], (values) => map(data, values)))),
    section("All layers together", "Sums over all records first, then the metric: not a mean of metrics.", chosen([{ name: "type", label: "quant type", options: types }], ({ type }) => overall(data, type))),
  ];
}

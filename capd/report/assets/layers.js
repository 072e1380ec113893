// Values across layers as boxes, channels that stick out, and statistics over iterations.

import { boxplot } from "./boxplot.js";
import { chart } from "./charts.js";
import { chosen, distinct, options } from "./controls.js";
import { named, nothing, section } from "./dom.js";
import { METRIC_TEXTS, QUICK } from "./errors.js";
import { count, drawable, layerText, num } from "./numbers.js";
import { iterationRange, scalars } from "./scalars.js";
import { figure, table } from "./tables.js";

const AXES = [{ value: true, text: "signed logarithmic" }, { value: false, text: "linear" }];
const ONE = { value: null, text: "all" };

const field = (text, name, show = num) => ({ text, number: show !== named, value: (row) => row[name], show });

export function boxes(data) {
  const title = "Layers";
  const known = data.boxes.filter((box) => box.quantiles?.every((value) => typeof value === "number"));
  if (!known.length) return section(title, null, nothing(data.quick ? QUICK : "There is no finite value."));
  const at = (quantile) => data.quantiles.indexOf(quantile);
  const [low, q1, median, q3, high] = [0.01, 0.25, 0.5, 0.75, 0.99].map(at);
  const types = distinct(known.map((box) => box.quant_type));
  const columns = [field("quant type", "quant_type", named), field("layer", "layer", layerText), ...["mean", "std", "min", "max"].map((name) => field(name, name)),
    ...data.quantiles.map((quantile, place) => ({ text: `q ${quantile}`, number: true, value: (row) => row.quantiles[place], show: num }))];
  return section(title, "A drift of the boxes with depth, or a type whose boxes are wider than another's, is what to look for.",
    chosen([{ name: "log", label: "value axis", options: AXES }, { name: "type", label: "quant type", options: [ONE, ...options(types)] }], ({ log, type }) => {
      const shown = type === null ? types : [type];
      const own = known.filter((box) => shown.includes(box.quant_type));
      const groups = distinct(own.map((box) => box.layer)).map((layer) => ({
        text: layer === null ? "none" : String(layer),
        boxes: own.filter((box) => box.layer === layer).map((box) => ({ look: shown.indexOf(box.quant_type), low: box.quantiles[low], q1: box.quantiles[q1], median: box.quantiles[median], q3: box.quantiles[q3], high: box.quantiles[high] })),
      }));
      return figure("Values across layers", `Box: the middle half of all finite values of the layer; thick line: median; whiskers: 1 % to 99 %; side by side in the legend's order.${log ? " The axis is linear around zero and logarithmic beyond the typical height of a box." : ""}`,
        boxplot({ label: "Values across layers", groups, types: shown.map(String), log, unit: "value" }), () => table(title, columns, own));
    }));
}

export function outliers(data) {
  const title = "Outliers";
  if (!data.channels.length) return section(title, null, nothing(data.quick ? QUICK : "No tensor has channels to compare."));
  const ranked = data.channels.map((one, place) => ({ ...one, place })).sort((one, other) => (other.amax_ratio ?? 0) - (one.amax_ratio ?? 0));
  const text = (one) => `${one.tensor_name} · ${one.layer === null ? "no layer" : `layer ${one.layer}`} · ${one.quant_type}`;
  const shown = (one) => {
    const numbers = one.amax.map((_, place) => place * one.entries_per_point);
    const label = "Largest magnitude of each channel";
    const columns = [{ text: "channel", number: true, value: (row) => row[0], show: count }, { text: "max |x|", number: true, value: (row) => row[1], show: num }, { text: "outliers", number: true, value: (row) => row[2], show: count }];
    return [
      figure(label, `Channels are the entries of the last axis${one.entries_per_point > 1 ? `; each stem is the largest of ${one.entries_per_point} neighbours` : ""}${one.width > 1 ? `, each entry of ${one.width} channels` : ""}. One tall stem makes a scale for all of the tensor too coarse for the others.`,
        chart({ label, x: { label: "channel", values: numbers, whole: true, show: count }, y: { label: "max |x|", log: true }, lines: [{ label: "max |x|", values: one.amax.map((value) => drawable(value, true)), stems: true }] }),
        () => table(label, columns.slice(0, 2), one.amax.map((value, place) => [numbers[place], value]))),
      table("The largest channels", columns, one.largest),
    ];
  };
  return [
    section(title, "max |x| over all positions, for each entry of the last axis. Ratio: the largest channel's over the median channel's.",
      chosen([{ name: "place", label: "tensor", options: ranked.map((one) => ({ value: one.place, text: text(one) })) }], ({ place }) => shown(data.channels[place]))),
    section("All tensors", "The first of the list is where one channel rules most.", table("Outliers by tensor", [field("tensor", "tensor_name", named), field("layer", "layer", layerText), field("quant type", "quant_type", named),
      field("channels", "channels", count), field("ratio", "amax_ratio"), field("outliers (%)", "outlier_percent")], ranked)),
  ];
}

export function trends(data) {
  const title = "Over iterations";
  if (!data.iterations.length) return [scalars(data), section(title, null, nothing("No record says its iteration."))];
  const formats = ["sqnr_db", "underflow_percent"].filter(() => data.formats.length);
  const metrics = [...["mean", "std", "absmax"].map((value) => ({ value, text: value })), ...formats.map((value) => ({ value, text: METRIC_TEXTS[value] }))];
  return [scalars(data), section(title, "How statistics move while training goes on; a jump is where to look first.", chosen([{ name: "tensor", label: "tensor", options: options(distinct(data.iterations.map((one) => one.tensor_name))) },
    { name: "metric", label: "statistic", options: metrics, value: "std" }], ({ tensor, metric }) => {
    const own = data.iterations.filter((one) => one.tensor_name === tensor);
    const found = own.flatMap((one) => (one[metric] ? [{ text: String(one.quant_type), at: one.iteration, values: one[metric] }]
      : data.formats.filter((format) => one.errors?.[format]).map((format) => ({ text: `${one.quant_type}: ${format}`, at: one.iteration, values: one.errors[format][metric] }))));
    return overIterations(`${METRIC_TEXTS[metric] ?? metric} of ${tensor}`, METRIC_TEXTS[metric] ?? metric, found, "iteration", true, data.scalars.length ? iterationRange(data) : undefined);
  }))];
}

/** found: [{ text, at: [iteration…], values }]; range: of the axis of iterations, else that of the values. */
export function overIterations(label, unit, found, step = "iteration", behind = true, range = undefined) {
  const at = distinct(found.flatMap((one) => one.at)).filter((value) => value !== null).sort((one, other) => one - other);
  const lines = found.map((one) => {
    const known = new Map(one.at.map((value, place) => [value, one.values[place]]));
    return { label: one.text, all: at.map((value) => known.get(value) ?? null) };
  });
  const columns = [{ text: step, number: true, value: (row) => at[row], show: count }, ...lines.map((line) => ({ text: line.label, number: true, value: (row) => line.all[row], show: num }))];
  return figure(label, null, chart({ label, x: { label: step, values: at, whole: true, show: count, range }, y: { label: unit }, lines: lines.map((line, place) => ({ label: line.label, values: line.all.map((value) => drawable(value)), shown: place < 8 })) }),
    behind ? () => table(label, columns, at.map((_, place) => place)) : null);
}

// Values across layers as boxes, and statistics over iterations.

import { bars } from "../charts/bars.js";
import { boxplot } from "../charts/boxplot.js";
import { chart } from "../charts/lines.js";
import { chosen, distinct, options } from "../controls.js";
import { el, named, nothing, section } from "../dom.js";
import { metricText, QUICK } from "./errors.js";
import { say, word } from "../language.js";
import { count, drawable, layerText, num } from "../numbers.js";
import { iterationRange, scalars } from "./scalars.js";
import { spreadOver } from "../charts/spread.js";
import { figure, table } from "../tables.js";

const STATISTICS = [word("mean"), word("std"), word("absmax")];
const SIDES = [0.01, 0.25, 0.5, 0.75, 0.99]; // of a box and its whiskers
const NEAR = 1e-3; // of the largest magnitude, where a logarithmic axis of both signs is linear

const field = (text, name, show = num) => ({ text: say(text), number: show !== named, value: (row) => row[name], show });

export function boxes(data) {
  const title = say("Layers");
  const known = [...data.boxes.map((box) => ({ ...box, tensor_name: undefined })), ...data.tensor_boxes].filter((box) => box.quantiles?.every((value) => typeof value === "number"));
  if (!known.length) return section(title, null, nothing(data.quick ? say(QUICK) : say("There is no finite value.")));
  const [low, q1, median, q3, high] = SIDES.map((quantile) => data.quantiles.indexOf(quantile));
  const types = distinct(known.map((box) => box.quant_type));
  const columns = [field(word("quant type"), "quant_type", named), field(word("layer"), "layer", layerText), ...[word("mean"), word("std"), word("min"), word("max")].map((name) => field(name, name)),
    ...data.quantiles.map((quantile, place) => ({ text: `q ${quantile}`, number: true, value: (row) => row.quantiles[place], show: num }))];
  const tensors = [{ value: undefined, text: say("all together") }, ...options(distinct(data.tensor_boxes.map((box) => box.tensor_name)))];
  const controls = [{ name: "tensor", label: say("tensor"), options: tensors }, { name: "type", label: say("quant type"), options: [{ value: undefined, text: say("all") }, ...options(types)] },
    { name: "log", label: say("value axis"), options: [{ value: true, text: say("signed logarithmic") }, { value: false, text: say("linear") }] }];
  return section(title, say("A drift of the boxes with depth, or a type whose boxes are wider than another's, is what to look for."), chosen(controls, ({ tensor, type, log }) => {
    const shown = type === undefined ? types : [type];
    const own = known.filter((box) => box.tensor_name === tensor && shown.includes(box.quant_type));
    if (!own.length) return nothing(say("There is no finite value."));
    const groups = distinct(own.map((box) => box.layer)).map((layer) => ({
      text: layer === null ? say("none") : String(layer),
      boxes: own.filter((box) => box.layer === layer).map((box) => ({ look: shown.indexOf(box.quant_type), low: box.quantiles[low], q1: box.quantiles[q1], median: box.quantiles[median], q3: box.quantiles[q3], high: box.quantiles[high] })),
    }));
    const label = tensor === undefined ? say("Values across layers") : say("Values of {0} across layers", tensor);
    const notes = [say("Box: the middle half of all finite values of the layer; thick line: median; whiskers: 1 % to 99 %; side by side in the legend's order."), log ? say("The axis is linear around zero and logarithmic beyond the typical height of a box.") : null, tensor === undefined ? null : say("Of one tensor, quantiles are within 1/32 of their value.")];
    return figure(label, notes.filter(Boolean).join(" "), boxplot({ label, groups, types: shown.map(String), log, unit: say("value") }), () => table(label, columns, own));
  }));
}

const AXES = { auto: word("logarithmic for gradients"), linear: word("linear"), log: word("logarithmic") };

/** The choice of an axis for statistics over iterations. */
export function axisControl() {
  return { name: "axis", label: say("value axis"), options: Object.entries(AXES).map(([value, text]) => ({ value, text: say(text) })) };
}

/** Whether a chosen axis is logarithmic for a tensor of this name: gradients shrink by orders of magnitude. */
export function isLogarithmic(data, axis, name) {
  return axis === "log" || (axis === "auto" && data.gradients.includes(name));
}

export function trends(data) {
  const title = say("Over iterations");
  if (!data.iterations.length) return [scalars(data), section(title, null, nothing(say("No record says its iteration.")))];
  const formats = ["sqnr_db", "underflow_percent"].filter(() => data.formats.length);
  const metrics = [...STATISTICS, ...formats].map((value) => ({ value, text: metricText(value) }));
  const tensors = { name: "tensor", label: say("tensor"), options: options(distinct(data.iterations.map((one) => one.tensor_name))) };
  return [scalars(data), section(title, say("How statistics move while training goes on; a jump is where to look first."), chosen([tensors, { name: "metric", label: say("statistic"), options: metrics, value: "std" }, axisControl()], ({ tensor, metric, axis }) => {
    const own = data.iterations.filter((one) => one.tensor_name === tensor);
    const found = own.flatMap((one) => (one[metric] ? [{ text: String(one.quant_type), at: one.iteration, values: one[metric] }]
      : data.formats.filter((format) => one.errors?.[format]).map((format) => ({ text: `${one.quant_type}: ${format}`, at: one.iteration, values: one.errors[format][metric] }))));
    const log = STATISTICS.includes(metric) && isLogarithmic(data, axis, tensor);
    return [overIterations(say("{0} of {1}", metricText(metric), tensor), metricText(metric), found, { log, range: data.scalars.length ? iterationRange(data) : undefined }),
      el("div", { class: "beside" }, own.map((one) => spreadOver(say("Magnitudes of {0} ({1})", tensor, one.quant_type), one.spread, say("iteration"), own.length)))];
  }))];
}

/** found: [{ text, at: [iteration…], values }]; range: of the axis of iterations, else that of the values. One iteration is bars with their numbers: there is no line to draw. */
export function overIterations(label, unit, found, { step = say("iteration"), log = false, behind = true, range = undefined } = {}) {
  const at = distinct(found.flatMap((one) => one.at)).filter((value) => value !== null).sort((one, other) => one - other);
  if (at.length === 1) return figure(label, say("There is one {0}, {1}: bars, not lines.", step, count(at[0])), bars(say("{0} at {1} {2}", unit, step, count(at[0])), found.map((one) => ({ text: one.text, value: one.values[0] }))), null);
  const lines = found.map((one) => {
    const known = new Map(one.at.map((value, place) => [value, one.values[place]]));
    return { label: one.text, all: at.map((value) => known.get(value) ?? null) };
  });
  const sizes = lines.flatMap((line) => line.all).filter((value) => typeof value === "number" && value !== 0).map(Math.abs);
  const signed = log && lines.some((line) => line.all.some((value) => value < 0)) ? 10 ** Math.floor(Math.log10(Math.max(Math.min(...sizes), NEAR * Math.max(...sizes)))) : undefined;
  const y = { label: unit, log: log && !signed && sizes.length > 0, signed };
  const columns = [{ text: step, number: true, value: (row) => at[row], show: count }, ...lines.map((line) => ({ text: line.label, number: true, value: (row) => line.all[row], show: num }))];
  return figure(label, null, chart({ label, x: { label: step, values: at, whole: true, show: count, range }, y, lines: lines.map((line, place) => ({ label: line.label, values: line.all.map((value) => drawable(value, y.log)), shown: place < 8 })) }),
    behind ? () => table(label, columns, at.map((_, place) => place)) : null);
}

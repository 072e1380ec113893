// What lies outside of each format's range, and what is not finite at all.

import { SCALES } from "../charts/colours.js";
import { chosen, distinct, options } from "../controls.js";
import { named, nothing, section } from "../dom.js";
import { QUICK } from "./errors.js";
import { heat } from "../charts/heat.js";
import { say, word } from "../language.js";
import { count, layerText, num } from "../numbers.js";
import { table } from "../tables.js";

const SIGNS = { none: word("○ none"), low: word("◔ low"), moderate: word("◑ moderate"), high: word("● high") };
const SHARES = { above_percent: word("above (%)"), below_percent: word("below (%)"), flushed_percent: word("flushed (%)") };

const number = (text, name, show = num) => ({ text: say(text), number: true, value: (row) => row[name], show });
const severe = (text, name) => ({ text: say(text), value: (row) => row[name], show: (value) => say(SIGNS[value]) });
const severity = (percent) => (percent > 1 ? "high" : percent > 0.1 ? "moderate" : percent > 0 ? "low" : "none");

/** What lies outside as the values are, or under one scale that takes the largest magnitude to the format's largest value: nothing is above then. */
function outside(row, scaled) {
  const [above, below, flushed] = scaled ? [0, row.below_scaled, row.flushed_scaled] : [row.above, row.below, row.flushed];
  const [over, under, flat] = [above, below, flushed].map((found) => (row.count ? (100 * found) / row.count : null));
  return { ...row, above, below, above_percent: over, below_percent: under, flushed_percent: flat, above_severity: severity(over), below_severity: severity(under) };
}

function shares(data) {
  if (!data.overflow.length) return nothing(data.quick ? say(QUICK) : say("There is no value."));
  const scale = { name: "scaled", label: say("scale"), options: options([false, true], (value) => (value ? say("one for all of the row: largest on largest") : say("none"))) };
  const all = { value: undefined, text: say("all together") };
  const columns = [{ text: say("quant type"), value: (row) => row.quant_type, show: named }, { text: say("format"), value: (row) => row.format }, number(word("above (%)"), "above_percent"), severe(word("overflow"), "above_severity"),
    number(word("below (%)"), "below_percent"), severe(word("underflow"), "below_severity"), number(word("flushed (%)"), "flushed_percent"), number(word("above"), "above", count), number(word("below"), "below", count), number(word("values"), "count", count)];
  return chosen([{ name: "tensor", label: say("tensor"), options: [all, ...options(distinct(data.tensor_overflow.map((row) => row.tensor_name)))] }, scale], ({ tensor, scaled }) => {
    const own = tensor === undefined ? data.overflow : data.tensor_overflow.filter((row) => row.tensor_name === tensor);
    return table(say("Values outside of each format's range"), columns, own.map((row) => outside(row, scaled)));
  });
}

function byFormat(data) {
  const scale = { name: "scaled", label: say("scale"), options: options([false, true], (value) => (value ? say("one for all of the row: largest on largest") : say("none"))) };
  const type = { name: "type", label: say("quant type"), options: options(distinct(data.tensor_overflow.map((row) => row.quant_type))) };
  const what = { name: "what", label: say("share"), options: Object.entries(SHARES).map(([value, text]) => ({ value, text: say(text) })), value: "flushed_percent" };
  return chosen([type, what, scale], (values) => {
    const own = data.tensor_overflow.filter((row) => row.quant_type === values.type).map((row) => outside(row, values.scaled));
    const found = new Map(own.map((row) => [JSON.stringify([row.tensor_name, row.format]), row[values.what]]));
    return heat({ label: say("{0}, by tensor and format", say(SHARES[values.what])), corner: say("tensor"), unit: "%", scale: SCALES.cividis, rows: distinct(own.map((row) => row.tensor_name)).map((value) => ({ value, text: named(value) })),
      columns: options(distinct(own.map((row) => row.format))), number: (tensor, format) => found.get(JSON.stringify([tensor, format])) ?? null });
  });
}

export function overflow(data) {
  const bad = data.nonfinite.length ? table(say("Values that are not finite"), [{ text: say("tensor"), value: (row) => row.tensor_name, show: named }, { text: say("quant type"), value: (row) => row.quant_type, show: named },
    number(word("layer"), "layer", layerText), number("NaN", "nan", count), number("Inf", "inf", count)], data.nonfinite) : nothing(say("Every captured value is finite."));
  return [
    section(say("Outside of the range"), say("above: finite values beyond the format's largest; below: not zero, but less than its smallest; flushed: less than its smallest normal value, which keeps fewer bits. In % of all values; moderate: over 0.1 %, high: over 1 %."), shares(data)),
    data.tensor_overflow.length ? section(say("Tensors by format"), say("All layers together; a bright cell is a tensor that does not fit the format's range."), byFormat(data)) : null,
    section(say("NaN and Inf"), say("Values that came out of training so; they are in no other figure."), bad),
  ];
}

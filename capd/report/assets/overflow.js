// What lies outside of each format's range, and what is not finite at all.

import { chosen, options } from "./controls.js";
import { named, nothing, section } from "./dom.js";
import { QUICK } from "./errors.js";
import { count, layerText, num } from "./numbers.js";
import { table } from "./tables.js";

const SIGNS = { none: "○ none", low: "◔ low", moderate: "◑ moderate", high: "● high" };

const number = (text, name, show = num) => ({ text, number: true, value: (row) => row[name], show });
const severe = (text, name) => ({ text, value: (row) => row[name], show: (value) => SIGNS[value] ?? String(value) });

export function overflow(data) {
  const columns = [{ text: "quant type", value: (row) => row.quant_type, show: named }, { text: "format", value: (row) => row.label }, number("above (%)", "above_percent"), severe("overflow", "severity_above"),
    number("below (%)", "below_percent"), severe("underflow", "severity_below"), number("flushed (%)", "flushed_percent"), number("above", "above", count), number("below", "below", count), number("values", "count", count)];
  const outside = data.overflow.length ? chosen([{ name: "scaled", label: "scale", options: options([false, true], (value) => (value ? "one for all of the type: largest on largest" : "none")) }],
    ({ scaled }) => table("Values outside of each format's range", columns, data.overflow.filter((row) => row.scaled === scaled))) : nothing(data.quick ? QUICK : "There is no value.");
  const bad = data.nonfinite.length ? table("Values that are not finite", [{ text: "quant type", value: (row) => row.quant_type, show: named }, { text: "tensor", value: (row) => row.tensor_name, show: named },
    number("layer", "layer", layerText), number("NaN", "nan", count), number("Inf", "inf", count)], data.nonfinite) : nothing("Every captured value is finite.");
  return [
    section("Outside of the range", "above: finite values beyond the format's largest; below: not zero, but less than its smallest; flushed: less than its smallest normal value, which keeps fewer bits. In % of all values; moderate: over 0.1 %, high: over 1 %.", outside),
    section("NaN and Inf", "Values that came out of training so; they are in no other figure.", bad),
  ];
}

// What lies outside of each format's range, and what is not finite at all.

import { chosen, options } from "./controls.js";
import { named, nothing, section } from "./dom.js";
import { QUICK } from "./errors.js";
import { count, layerText, num } from "./numbers.js";
import { table } from "./tables.js";

const SIGNS = { none: "○ none", low: "◔ low", moderate: "◑ moderate", high: "● high" };

const number = (text, name, show = num) => ({ text, number: true, value: (row) => row[name], show });
const severe = (text, name) => ({ text, value: (row) => row[name], show: (value) => SIGNS[value] ?? String(value) });

const severity = (percent) => (percent > 1 ? "high" : percent > 0.1 ? "moderate" : percent > 0 ? "low" : "none");

/** What lies outside as the values are, or under one scale that takes the largest magnitude to the format's largest value: nothing is above then. */
function outside(row, scaled) {
  const [above, below, flushed] = scaled ? [0, row.below_scaled, row.flushed_scaled] : [row.above, row.below, row.flushed];
  const [over, under, flat] = [above, below, flushed].map((found) => (row.count ? (100 * found) / row.count : null));
  return { ...row, above, below, above_percent: over, below_percent: under, flushed_percent: flat, above_severity: severity(over), below_severity: severity(under) };
}

export function overflow(data) {
  const columns = [{ text: "quant type", value: (row) => row.quant_type, show: named }, { text: "format", value: (row) => row.format }, number("above (%)", "above_percent"), severe("overflow", "above_severity"),
    number("below (%)", "below_percent"), severe("underflow", "below_severity"), number("flushed (%)", "flushed_percent"), number("above", "above", count), number("below", "below", count), number("values", "count", count)];
  const shares = data.overflow.length ? chosen([{ name: "scaled", label: "scale", options: options([false, true], (value) => (value ? "one for all of the type: largest on largest" : "none")) }],
    ({ scaled }) => table("Values outside of each format's range", columns, data.overflow.map((row) => outside(row, scaled)))) : nothing(data.quick ? QUICK : "There is no value.");
  const bad = data.nonfinite.length ? table("Values that are not finite", [{ text: "quant type", value: (row) => row.quant_type, show: named }, { text: "tensor", value: (row) => row.tensor_name, show: named },
    number("layer", "layer", layerText), number("NaN", "nan", count), number("Inf", "inf", count)], data.nonfinite) : nothing("Every captured value is finite.");
  return [
    section("Outside of the range", "above: finite values beyond the format's largest; below: not zero, but less than its smallest; flushed: less than its smallest normal value, which keeps fewer bits. In % of all values; moderate: over 0.1 %, high: over 1 %.", shares),
    section("NaN and Inf", "Values that came out of training so; they are in no other figure.", bad),
  ];
}

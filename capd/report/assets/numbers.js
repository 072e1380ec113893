// Numbers as people read them: the document holds four digits, so four are shown.

import { say } from "./language.js";

const GROUPED = new Intl.NumberFormat("en-US");
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** A measured number; names of what is not finite stay as they are. */
export function num(value) {
  return rounded(value, 4);
}

/**
 * What writes the values of a table, with as many decimals for all: at most four digits of the largest one. Values that differ by
 * more than the factor `span` stay as they are, each with four digits.
 */
export function aligned(values, span = Infinity) {
  const sizes = values.filter((value) => typeof value === "number" && value !== 0).map(Math.abs);
  const [least, most] = sizes.reduce(([low, high], size) => [Math.min(low, size), Math.max(high, size)], [Infinity, 0]);
  if (most < 1e-3 || most >= 1e4 || most > span * least) return num;
  const written = sizes.reduce((longest, size) => Math.max(longest, (String(Number(size.toPrecision(4))).split(".")[1] ?? "").length), 0);
  const decimals = Math.min(written, 3 - Math.floor(Math.log10(most)));
  // What these decimals would show as zero, and zero itself, stay as they are.
  return (value) => (typeof value !== "number" || Math.abs(value) < 10 ** -decimals ? num(value) : value.toFixed(decimals).replace("-", "−"));
}

/** A number that a format defines. */
export function exact(value) {
  return rounded(value, 6);
}

function rounded(value, digits) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value.replace("Infinity", "∞").replace("-", "−");
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6) ? scientific(value, digits) : String(Number(value.toPrecision(digits)));
  return text.replace("-", "−");
}

function scientific(value, digits) {
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
  return `${Number(mantissa)}·10${raised(Number(exponent))}`;
}

function raised(number) {
  return (number < 0 ? "⁻" : "") + [...String(Math.abs(number))].map((digit) => RAISED[digit]).join("");
}

/** 2 to a whole exponent. */
export function power(exponent) {
  return Number.isInteger(exponent) ? `2${raised(exponent)}` : "";
}

/** An exact count. */
export function count(value) {
  return typeof value === "number" ? GROUPED.format(value) : "–";
}

export function nbytes(value) {
  if (typeof value !== "number") return "–";
  let place = 0;
  while (value >= 1024 && place < UNITS.length - 1) { value /= 1024; place += 1; }
  return `${place ? value.toFixed(1) : value} ${UNITS[place]}`;
}

/** What can be drawn: null for what is not a finite number, and on a logarithmic axis for what is not positive. */
export function drawable(value, log = false) {
  return typeof value !== "number" || (log && value <= 0) ? null : value;
}

export function layerText(layer) {
  return layer === null ? say("no layer") : String(layer);
}

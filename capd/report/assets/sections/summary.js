// The verdict: each format on each role of tensor, in one colour scale; the verdict in words; the worst tensors.

import { SCALES, ink, shade } from "../charts/colours.js";
import { el, named, nothing, scroller, section } from "../dom.js";
import { QUICK } from "./errors.js";
import { css, key } from "../charts/heat.js";
import { say, told, word } from "../language.js";
import { count, num } from "../numbers.js";
import { runNames } from "./scalars.js";
import { table } from "../tables.js";
import { seriesPath } from "./tensors.js";

const LEAST_SPAN = 6; // dB: about a bit; smaller differences are no red and green
const FEW_PERCENT = 0.1;
const ROLES = { activations: word("activations"), weights: word("weights"), gradients: word("gradients"), other: word("other tensors") };

const tenths = (value) => (typeof value === "number" ? value.toFixed(1).replace("-", "−") : num(value));

/** A share in percent, rounded down, so that 99.96 % is not all. */
function short(percent) {
  const step = 10 ** (Math.floor(Math.log10(percent)) - 2);
  return String(Number((Math.floor((percent / step) * (1 + 1e-12)) * step).toPrecision(3)));
}

/** The names of the columns below `of` ("roles" or "products"), in their order. */
function names(formats, of) {
  return [...new Set(formats.flatMap((one) => Object.keys(one[of])))];
}

function shares(errors) {
  const [zero, saturated] = [errors.underflow_percent, errors.saturation_percent];
  return [zero >= FEW_PERCENT ? say("{0} % zero", short(zero)) : null, saturated >= FEW_PERCENT ? say("{0} % saturated", short(saturated)) : null, lost(errors)].filter(Boolean);
}

/** The median, and in a sample the standard error. */
function spread(errors) {
  return [errors.tensors > 1 ? say("median {0}", tenths(errors.median_sqnr_db)) : null, errors.tenth_sqnr_db_error ? `± ${tenths(errors.tenth_sqnr_db_error)}` : null].filter(Boolean);
}

function lost(errors) {
  return errors.lost ? say("{0} lost", count(errors.lost)) : null;
}

function cell(errors, isBest, [low, high], small) {
  if (!errors) return el("td", { class: "number" }, "–");
  const value = errors.tenth_sqnr_db;
  const star = isBest ? el("span", { title: say("best"), "aria-label": say("best"), role: "img" }, " ★") : null;
  const node = el("td", { class: "number" }, el("strong", {}, tenths(value)), star, small.map((text) => el("div", { class: "share" }, text)));
  if (typeof value === "number") {
    const colour = shade(SCALES.viridis, (value - low) / (high - low));
    node.style.background = css(colour);
    node.style.color = ink(colour);
  }
  return node;
}

function formatTable({ formats, best }) {
  const [roles, products] = ["roles", "products"].map((of) => names(formats, of));
  const all = formats.flatMap((one) => [...Object.values(one.roles), ...Object.values(one.products)]).map((errors) => errors.tenth_sqnr_db).filter((value) => typeof value === "number");
  const high = all.length ? Math.max(...all) : 0;
  const range = [Math.min(high - LEAST_SPAN, ...all), high];
  const label = say("SQNR in dB of each format");
  const head = el("tr", {}, el("th", { scope: "col" }, say("format")), [say("bits"), ...roles.map((role) => say(ROLES[role])), ...products].map((text) => el("th", { scope: "col", class: "number" }, text)));
  const body = formats.map((one) => el("tr", {}, el("th", { scope: "row" }, named(one.format)), el("td", { class: "number" }, num(one.bits_per_value)),
    roles.map((role) => cell(one.roles[role], best[role] === one.format, range, one.roles[role] ? [...spread(one.roles[role]), ...shares(one.roles[role])] : [])),
    products.map((name) => cell(one.products[name], false, range, one.products[name] ? [...spread(one.products[name]), lost(one.products[name])].filter(Boolean) : []))));
  return el("div", { class: "heat verdict" }, all.length ? key(SCALES.viridis, range, all, "dB") : null,
    scroller(label, el("table", {}, el("caption", {}, label), el("thead", {}, head), el("tbody", {}, body))));
}

function worstTable(worst) {
  const number = (text, name, show = num) => ({ text: say(text), number: true, value: (row) => row[name], show });
  return table(say("The worst tensors, each in the best format of its role"), [
    { text: say("tensor"), value: (row) => row.series, show: (path, row) => (row.place === null ? named(path) : el("a", { href: seriesPath(row.place) }, named(path))) },
    { text: say("role"), value: (row) => say(ROLES[row.role]) }, { text: say("format"), value: (row) => row.format },
    number(word("SQNR (dB)"), "sqnr_db"), number(word("lost"), "lost", count), number(word("zero (%)"), "underflow_percent"), number(word("saturated (%)"), "saturation_percent")], worst);
}

/** Why there is no verdict. */
function missing(data) {
  if (data.quick) return say(QUICK);
  return data.formats.length ? say("The verdict is missing: no record holds values of high precision (bf16, fp16, fp32, fp64). Overview, Left out, has the reasons.") : say("The verdict is missing: no format was measured. Run capd report without --formats none.");
}

/** What the products are of, or why there are none. */
function products(calls) {
  if (calls === null) return say("Products of linear layers are not measured over several runs together.");
  if (!calls.found) return say("Products are not measured: no call of a linear layer in this selection has its input, weight and output gradient.");
  const out = [calls.left_out ? say("; {0} cannot be measured", count(calls.left_out)) : "", calls.partial ? say("; {0} are slices of tokens, without dW", count(calls.partial)) : ""].join("");
  return say("Y = XWᵀ, dX = dYW and dW = dYᵀX: products of quantised operands, in blocks along the axis that the product sums over, of {0} of {1} calls of linear layers, evenly over the modules{2}. At most 64 rows of each product are computed.", count(calls.measured), count(calls.found), out);
}

export function summary(data) {
  const { verdict, sources } = data;
  const title = say("Summary");
  const sentences = el("div", { class: "statements" }, verdict.statements.map((one) => el("p", {}, told(one))));
  if (!verdict.formats.length) return section(title, null, verdict.statements.length ? sentences : nothing(missing(data)));
  const together = sources.length > 1 ? say("The verdict is on the records of {0} runs together: {1}.", count(sources.length), runNames(sources).join(say(", "))) : null;
  const sample = data.sample === null ? null : el("p", { class: "note" }, say("A sample: {0}.", told(data.sample)));
  const notes = [say("Each format is applied to the captured values after the fact. A number is the SQNR that nine of ten tensors reach, 10·log10(Σx² / Σd²) in dB; 6 dB are about a bit. All cells have one colour scale. Bits count the scales. ★ is the best format of a role: the fewest lost values, then the highest SQNR up to 50 dB. Below a number: the median tensor's SQNR, and the shares of values that became zero (zero), exceed the largest value (saturated), or became NaN or Inf (lost); shares below 0.1 % are left out."), products(verdict.calls)];
  return [
    section(title, together, sample, sentences, formatTable(verdict), notes.map((note) => el("p", { class: "note" }, note))),
    section(say("Worst tensors"), null, verdict.worst.length ? worstTable(verdict.worst) : nothing(say("No tensor has an error."))),
  ];
}

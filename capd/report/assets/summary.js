// The verdict: each format on each role of tensor, in one colour scale; the verdict in words; the worst tensors.

import { SCALES, ink, shade } from "./colours.js";
import { el, named, nothing, scroller, section } from "./dom.js";
import { css, key } from "./heat.js";
import { count, num } from "./numbers.js";
import { table } from "./tables.js";
import { seriesPath } from "./tensors.js";

const LEAST_SPAN = 6; // dB: about a bit; smaller differences are no red and green
const CLOSE_BITS = 0.5;
const FEW_PERCENT = 0.1;

const short = (value) => String(Number(value.toPrecision(3)));
const down = (decibels) => (Math.floor(decibels * 10) / 10).toFixed(1);
const up = (decibels) => (Math.ceil(decibels * 10) / 10).toFixed(1);
const listed = (words, last) => (words.length === 1 ? words[0] : `${words.slice(0, -1).join(", ")} ${last} ${words[words.length - 1]}`);

const TEXTS = {
  title: "Summary",
  table: "SQNR in dB of each format",
  note: "Each format is applied to the captured values after the fact. SQNR = 10·log10(Σx² / Σd²); 6 dB are about a bit. All cells have one colour scale. Bits count the scales. ★ is the best format of a role: the fewest lost values, then the highest SQNR. Below a number: the shares of its values that became zero (zero), exceed the largest value (saturated), or became NaN or Inf (lost); shares below 0.1 % are left out.",
  products: ({ measured, found, left_out: out }) => `Y = XWᵀ, dX = dYW and dW = dYᵀX: products of quantised operands, in blocks along the axis that the product sums over, of ${count(measured)} of ${count(found)} calls of linear layers, evenly over the modules${out ? `; ${count(out)} cannot be measured` : ""}. At most 64 rows of each product are computed.`,
  severalRuns: "Products of linear layers are not measured over several runs together.",
  noProducts: "Products are not measured: no call of a linear layer in this selection has its input, weight and output gradient.",
  worst: "The worst tensors, each in the best format of its role",
  worstTitle: "Worst tensors",
  noWorst: "No tensor has an error.",
  format: "format", bits: "bits", best: "best", unit: "dB",
  roles: { activations: "activations", weights: "weights", gradients: "gradients" },
  zero: (share) => `${share} % zero`, saturated: (share) => `${share} % saturated`, lost: (number) => `${number} lost`,
  columns: { tensor: "tensor", role: "role", format: "format", sqnr: "SQNR (dB)", lost: "lost", zero: "zero (%)", saturated: "saturated (%)" },
  quick: "The verdict on formats is missing: it needs the elements, and --quick reads stored statistics alone. Run capd report without --quick.",
  noFormats: "The verdict is missing: no format was measured. Run capd report without --formats none.",
  noSource: "The verdict is missing: no record holds values of high precision (bf16, fp16, fp32, fp64). Overview, Left out, has the reasons.",
  statements: {
    keeps: (said) => {
      const [bits, roles] = [`${said.bits} bits a value`, listed(said.roles, "and")];
      if (said.sqnr_db === "Infinity") return `${said.format} keeps every value of ${roles} exactly, at ${bits}.`;
      const kept = `${said.format} keeps ${down(said.sqnr_db)} dB or more on ${roles}`;
      if (said.alone) return `${kept}, at ${bits}; no other format was measured.`;
      if (said.behind_db === null) return `${kept}, at ${bits}.`;
      const lossless = said.lossy ? " without lost values" : "";
      return said.behind_db ? `${kept}, within ${up(said.behind_db)} dB of the best${lossless}, at ${bits}.` : `${kept}, and no format${lossless} is better there, at ${bits}.`;
    },
    partial: () => "No format took every tensor without losing a value, so none is the best of all.",
    all_lose: (said) => (said.alone ? `${said.format} is no choice as it is: it loses values.` : `Every format loses values; ${said.format} loses the fewest, ${count(said.lost)}.`),
    loses_values: (said) => `${subject(said)} loses ${count(said.lost)} of ${count(said.count)} values on ${said.role}: they become Inf or NaN.`,
    loses_db: (said) => {
      const against = said.against_bits > said.bits + CLOSE_BITS ? `${said.against}, at ${said.bits} bits instead of ${said.against_bits}` : said.against;
      return `${subject(said)} loses ${said.loss_db.toFixed(1)} dB on ${said.role} against ${against}${because(said)}.`;
    },
    all_close: (said) => (said.behind_db ? `No format is more than ${up(said.behind_db)} dB behind the best on any role.` : "No format is behind another on any role."),
    fewer: (said) => `${listed(said.formats, "and")} could not measure every tensor, so no comparison is made there.`,
    uneven: (said) => `${subject(said)} keeps ${said.best_db.toFixed(1)} dB on ${said.best_role} and ${said.sqnr_db.toFixed(1)} dB on ${said.role}${because(said)}.`,
    missing: (said) => `No ${listed(said.roles, "or")} were measured, so nothing is said about them.`,
  },
  unscaled: (format) => `${format} without a scale`,
  because: (share, reason) => `; ${share} % of the values ${reason}`,
  reasons: { saturation: "are beyond its largest one", flush: "are below its smallest normal one", underflow: "become zero" },
};

function subject(said) {
  return said.scaled ? said.format : TEXTS.unscaled(said.format);
}

function because(said) {
  return said.reason === null ? "" : TEXTS.because(short(said.reason_percent), TEXTS.reasons[said.reason]);
}

/** The names of the columns below `of` ("roles" or "products"), in their order. */
function names(formats, of) {
  return [...new Set(formats.flatMap((one) => Object.keys(one[of])))];
}

function shares(errors) {
  const [zero, saturated] = [errors.underflow_percent, errors.saturation_percent];
  return [zero >= FEW_PERCENT ? TEXTS.zero(short(zero)) : null, saturated >= FEW_PERCENT ? TEXTS.saturated(short(saturated)) : null, errors.lost ? TEXTS.lost(count(errors.lost)) : null].filter(Boolean);
}

function cell(errors, isBest, [low, high], small) {
  if (!errors) return el("td", { class: "number" }, "–");
  const value = errors.sqnr_db;
  const star = isBest ? el("span", { title: TEXTS.best, "aria-label": TEXTS.best, role: "img" }, " ★") : null;
  const node = el("td", { class: "number" }, el("strong", {}, typeof value === "number" ? value.toFixed(1).replace("-", "−") : num(value)), star, small.map((text) => el("div", { class: "share" }, text)));
  if (typeof value === "number") {
    const colour = shade(SCALES.viridis, (value - low) / (high - low));
    node.style.background = css(colour);
    node.style.color = ink(colour);
  }
  return node;
}

function formatTable({ formats, best }) {
  const [roles, products] = ["roles", "products"].map((of) => names(formats, of));
  const all = formats.flatMap((one) => [...Object.values(one.roles), ...Object.values(one.products)]).map((errors) => errors.sqnr_db).filter((value) => typeof value === "number");
  const high = all.length ? Math.max(...all) : 0;
  const range = [Math.min(high - LEAST_SPAN, ...all), high];
  const head = el("tr", {}, el("th", { scope: "col" }, TEXTS.format), [TEXTS.bits, ...roles.map((role) => TEXTS.roles[role]), ...products].map((text) => el("th", { scope: "col", class: "number" }, text)));
  const body = formats.map((one) => el("tr", {}, el("th", { scope: "row" }, named(one.format)), el("td", { class: "number" }, num(one.bits_per_value)),
    roles.map((role) => cell(one.roles[role], best[role] === one.format, range, one.roles[role] ? shares(one.roles[role]) : [])),
    products.map((name) => cell(one.products[name], false, range, one.products[name]?.lost ? [TEXTS.lost(count(one.products[name].lost))] : []))));
  return el("div", { class: "heat verdict" }, all.length ? key(SCALES.viridis, range, all, TEXTS.unit) : null,
    scroller(TEXTS.table, el("table", {}, el("caption", {}, TEXTS.table), el("thead", {}, head), el("tbody", {}, body))));
}

function worstTable(worst) {
  const { columns } = TEXTS;
  const number = (text, name, show = num) => ({ text, number: true, value: (row) => row[name], show });
  return table(TEXTS.worst, [
    { text: columns.tensor, value: (row) => row.series, show: (path, row) => (row.place === null ? named(path) : el("a", { href: seriesPath(row.place) }, named(path))) },
    { text: columns.role, value: (row) => TEXTS.roles[row.role] }, { text: columns.format, value: (row) => row.format },
    number(columns.sqnr, "sqnr_db"), number(columns.lost, "lost", count), number(columns.zero, "underflow_percent"), number(columns.saturated, "saturation_percent")], worst);
}

export function summary(data) {
  const { verdict } = data;
  if (!verdict.formats.length) return section(TEXTS.title, null, nothing(data.quick ? TEXTS.quick : data.formats.length ? TEXTS.noSource : TEXTS.noFormats));
  const products = verdict.calls === null ? TEXTS.severalRuns : verdict.calls.found ? TEXTS.products(verdict.calls) : TEXTS.noProducts;
  return [
    section(TEXTS.title, null, el("div", { class: "statements" }, verdict.statements.map((said) => el("p", {}, TEXTS.statements[said.rule](said)))), formatTable(verdict), el("p", { class: "note" }, TEXTS.note), el("p", { class: "note" }, products)),
    section(TEXTS.worstTitle, null, verdict.worst.length ? worstTable(verdict.worst) : nothing(TEXTS.noWorst)),
  ];
}

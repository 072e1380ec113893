// How values spread over magnitudes, and what each format can hold there.

import { chart } from "../charts/lines.js";
import { chosen, distinct, options } from "../controls.js";
import { nothing, section } from "../dom.js";
import { say } from "../language.js";
import { count, drawable, exact, num, power } from "../numbers.js";
import { figure, table } from "../tables.js";

const SHOWN = 3;
const NARROW = 48; // binades: of a wider format, as bf16 is, the axis shows what the values need

/** How many values have this exponent. */
function counted(one, exponent) {
  const [first, ...counts] = one.exponents;
  return counts[exponent - first] ?? 0;
}

/** Shares in % by exponent, at each of `exponents`. */
function shares(one, exponents, log) {
  const total = one.exponents.slice(1).reduce((sum, number) => sum + number, 0);
  return exponents.map((exponent) => drawable(total ? (100 * counted(one, exponent)) / total : null, log));
}

function bits(grid, exponents, shift) {
  const steps = new Map(grid.steps);
  return exponents.map((exponent) => steps.get(exponent - shift) ?? null);
}

/** So that the largest value of the format comes to lie where the largest value is. */
function aligned(grid, absmax) {
  return typeof absmax === "number" && absmax > 0 ? Math.floor(Math.log2(absmax)) - grid.steps[grid.steps.length - 1][0] : 0;
}

/** drawn: [{ text, exponents, absmax }]. The numbers of all of them, and the mantissa bits of the formats. */
export function magnitudes(label, drawn, grids, { log, scaled, formats = grids.map((grid) => grid.label).slice(0, SHOWN) }) {
  const known = drawn.filter((one) => one.exponents.length > 1);
  if (!known.length) return nothing(say("There is no finite value but zero."));
  const largest = Math.max(...known.map((one) => (typeof one.absmax === "number" ? one.absmax : 0)));
  const shifts = grids.map((grid) => (scaled ? aligned(grid, largest) : 0));
  const reached = grids.flatMap((grid, number) => (grid.steps.length > NARROW ? [] : [grid.steps[0][0] + shifts[number], grid.steps[grid.steps.length - 1][0] + 1 + shifts[number]]));
  const low = Math.min(...reached, ...known.map((one) => one.exponents[0]));
  const high = Math.max(...reached, ...known.map((one) => one.exponents[0] + one.exponents.length - 1));
  const exponents = Array.from({ length: high - low + 3 }, (_, place) => low - 1 + place);
  const lines = known.map((one) => ({ label: one.text, values: shares(one, exponents, log), steps: true, filled: true }));
  const precision = grids.map((grid, number) => ({
    label: say("{0} bits", grid.label), values: bits(grid, exponents, shifts[number]), steps: true, right: true, look: known.length + number, shown: formats.includes(grid.label),
  }));
  const columns = [{ text: say("from"), number: true, value: (row) => row.exponent, show: power }, { text: say("up to"), number: true, value: (row) => row.exponent + 1, show: power },
    ...known.map((one) => ({ text: one.text, number: true, value: (row) => counted(one, row.exponent), show: count })),
    ...grids.map((grid, number) => ({ text: say("{0} bits", grid.label), number: true, value: (row) => precision[number].values[row.exponent - exponents[0]], show: num }))];
  const drawing = chart({
    label, lines: [...lines, ...precision], x: { label: say("magnitude |x|, by powers of two"), values: exponents, show: power, whole: true },
    y: { label: say("share of non-zero values (%)"), log, zero: true }, right: { label: say("mantissa bits kept"), range: [0, 11] },
  });
  return figure(label, say("Filled: how many values have 2ᵉ ≤ |x| < 2ᵉ⁺¹. Stepped lines, right axis: how many mantissa bits a format keeps there; where it has no line, values overflow (right) or become zero (left). Press a legend entry to show or hide its line."),
    drawing, () => table(label, columns, exponents.slice(1, -1).map((exponent) => ({ exponent }))));
}

/** The choices of a histogram's axes. */
export function scaleControls() {
  return [
    { name: "log", label: say("share axis"), options: [{ value: false, text: say("linear") }, { value: true, text: say("logarithmic") }] },
    { name: "scaled", label: say("formats"), options: [{ value: false, text: say("unscaled") }, { value: true, text: say("one scale: largest on largest") }] },
  ];
}

function ranges(data) {
  const columns = [{ text: say("format"), value: (row) => row.label }, { text: say("largest"), number: true, value: (row) => row.largest, show: exact },
    { text: say("smallest normal"), number: true, value: (row) => row.normal, show: exact }, { text: say("smallest"), number: true, value: (row) => row.smallest, show: exact },
    { text: say("binades"), number: true, value: (row) => row.steps.length }];
  return table(say("Ranges of the formats, unscaled"), columns, data.grids);
}

export function distributions(data) {
  if (!data.distributions.length) return section(say("Distributions"), null, nothing(say("There is no record with statistics.")));
  const names = options(distinct(data.distributions.map((one) => one.tensor_name)));
  return [
    section(say("Distributions"), say("Where the values of a tensor lie, all layers and ranks together, one line for each quant type. The histogram is of log2|x|, so equal widths are equal factors."),
      chosen([{ name: "tensor", label: say("tensor"), options: names }, ...scaleControls()], ({ tensor, ...look }) => {
        const own = data.distributions.filter((one) => one.tensor_name === tensor);
        return magnitudes(say("Magnitudes of {0}", tensor), own.map((one) => ({ ...one, text: String(one.quant_type) })), data.grids, look);
      })),
    section(say("Formats"), say("bits is the width of the mantissa that is stored: a format with b bits has a relative step of 2⁻ᵇ."), ranges(data)),
  ];
}

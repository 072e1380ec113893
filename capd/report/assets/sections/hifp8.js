// HiFloat8 (arXiv 2409.16626): how its regimes and codes are used, and its error by magnitude beside other formats'.

import { chart } from "../charts/lines.js";
import { SCALES } from "../charts/colours.js";
import { chosen, distinct, options } from "../controls.js";
import { el, named, nothing, section } from "../dom.js";
import { METRIC_TEXTS, QUICK } from "./errors.js";
import { heat } from "../charts/heat.js";
import { say, word } from "../language.js";
import { count, drawable, layerText, num, power } from "../numbers.js";
import { figure, table } from "../tables.js";

const REGIMES = { zero: "x = 0", underflow: "|x| < 2⁻²³ → 0", DML: word("2⁻²³ to 2⁻¹⁵, powers of two"), 0: word("1 to 2"), 1: word("½ to 1, 2 to 4"), 2: word("⅛ to ½, 4 to 16"), 3: word("2⁻⁷ to ⅛, 16 to 2⁸"), 4: word("2⁻¹⁵ to 2⁻⁷, 2⁸ to 1.25·2¹⁵"), overflow: word("beyond 1.25·2¹⁵ → Inf") };
const HEX = Array.from({ length: 16 }, (_, digit) => ({ value: digit, text: digit.toString(16).toUpperCase() }));

const percent = (share) => (typeof share === "number" ? 100 * share : share);

function meter(share) {
  const [bar, fill] = [el("span", { class: "meter", "aria-hidden": "true" }), el("span")];
  fill.style.width = `${Math.min(100, percent(share) ?? 0)}%`;
  bar.append(fill);
  return [num(percent(share)), bar];
}

function regimes(use) {
  const columns = [{ text: say("regime"), value: (row) => row.regime, show: say }, { text: say("magnitudes"), value: (row) => say(REGIMES[row.regime] ?? "") }, { text: say("mantissa bits"), number: true, value: (row) => row.mantissa_bits, show: num },
    { text: say("values"), number: true, value: (row) => row.count, show: count }, { text: say("share (%)"), number: true, value: (row) => row.share, show: meter },
    { text: say("codes used"), number: true, value: (row) => row.codes_used, show: (value, row) => say("{0} of {1} codes", count(value), count(row.codes)) },
    { text: say("relative error"), number: true, value: (row) => row.relative_error, show: num }, { text: say("SQNR (dB)"), number: true, value: (row) => row.sqnr_db, show: num }, { text: say("mean |d|"), number: true, value: (row) => row.mean_error, show: num }];
  return table(say("Values over the regimes"), columns, use.regimes);
}

function codes(use) {
  const total = use.codes.reduce((sum, number) => sum + number, 0);
  const label = say("Values by code, log10 of the count");
  return heat({ label, corner: say("high\\low"), rows: HEX, columns: HEX, scale: SCALES.viridis, unit: say("(10ⁿ values; {0} in all)", count(total)),
    number: (high, low) => { const found = use.codes[high * 16 + low]; return found ? Number(Math.log10(found).toFixed(1)) : null; } });
}

function byMagnitude(use, metric) {
  const found = use.by_exponent;
  const label = metric === "relative_error" ? say("Relative error by magnitude") : say("SQNR by magnitude");
  const log = metric === "relative_error";
  const labels = Object.keys(found[metric]);
  const columns = [{ text: say("from"), number: true, value: (row) => found.exponents[row], show: power }, { text: say("values"), number: true, value: (row) => found.counts[row], show: count },
    ...labels.map((name) => ({ text: name, number: true, value: (row) => found[metric][name][row], show: num }))];
  return figure(label, say("Errors of the values with 2ᵉ ≤ |x| < 2ᵉ⁺¹, each format without a scale. Σ|d| / Σ|x| is 1 where all become zero; no line where all overflow to Inf, or nothing was lost."),
    chart({ label, x: { label: say("magnitude |x|, by powers of two"), values: found.exponents, show: power, whole: true }, y: { label: log ? "Σ|d| / Σ|x|" : say(METRIC_TEXTS.sqnr_db), log },
      lines: labels.map((name) => ({ label: name, values: found[metric][name].map((value) => drawable(value, log)) })) }),
    () => table(label, columns, found.exponents.map((_, place) => place)));
}

function groups(data, by, text) {
  const rows = data.hifp8_groups[by] ?? [];
  if (!rows.length) return nothing(say("No record says its {0}.", text));
  const statistics = ["mean", "std", "min", "max"].map((value) => ({ value, text: say(value) }));
  const quantiles = rows.some((row) => row.quantiles) ? data.quantiles.map((quantile, place) => ({ value: place, text: say("quantile {0}", quantile) })) : [];
  const label = say("By layer and {0}", text);
  const columns = [{ text: say("quant type"), value: (row) => row.quant_type, show: named }, { text: say("layer"), number: true, value: (row) => row.layer, show: layerText }, { text, number: true, value: (row) => row[by], show: count },
    ...["mean", "std", "min", "max"].map((name) => ({ text: say(name), number: true, value: (row) => row[name], show: num })), ...data.quantiles.map((quantile, place) => ({ text: `q ${quantile}`, number: true, value: (row) => row.quantiles?.[place], show: num }))];
  return chosen([{ name: "type", label: say("quant type"), options: options(distinct(rows.map((row) => row.quant_type))) }, { name: "what", label: say("statistic"), options: [...statistics, ...quantiles], value: "std" }], ({ type, what }) => {
    const own = rows.filter((row) => row.quant_type === type);
    const found = new Map(own.map((row) => [`${row.layer}/${row[by]}`, typeof what === "number" ? row.quantiles?.[what] : row[what]]));
    return figure(label, null, heat({ label, corner: say("layer"), scale: SCALES.viridis, unit: "", number: (layer, other) => found.get(`${layer}/${other}`) ?? null,
      rows: distinct(own.map((row) => row.layer)).map((value) => ({ value, text: layerText(value) })), columns: distinct(own.map((row) => row[by])).map((value) => ({ value, text: `${text} ${value ?? say("none")}` })) }), () => table(label, columns, own));
  });
}

export function hifp8(data) {
  const own = [section(say("HiFP8 by layer and sample"), say("Statistics of the quant types that are called hifp8…, or of all types where none is."), groups(data, "sample_idx", say("sample"))), section(say("HiFP8 by layer and rank"), null, groups(data, "rank", say("rank")))];
  const title = say("HiFP8");
  if (!data.hifp8.length) return [section(title, null, nothing(data.quick ? say(QUICK) : say("There is no finite value."))), own];
  return [
    section(title, say("What HiFloat8 (tapered precision: three mantissa bits near 1, none at the ends) makes of the captured values, without a scale, ties away from zero."),
      chosen([{ name: "place", label: say("values of"), options: data.hifp8.map((one, place) => ({ value: place, text: one.quant_type === null ? say("all quant types") : String(one.quant_type) })) }], ({ place }) => {
        const use = data.hifp8[place];
        return [el("p", { class: "fact" }, say(use.exact ? word("{0} of {1} codes used, entropy {2} of 8 bits, {3} finite values.") : word("{0} of {1} codes used, entropy {2} of 8 bits, {3} finite values; some were rounded to bfloat16 before."), count(use.codes_used), count(use.finite_codes), num(use.entropy_bits), count(use.finite))),
          regimes(use), figure(say("Its 256 codes"), say("Row: the code's high four bits; column: its low four. Rows 8 to F are the negative values. Empty cells are codes that no value takes."), codes(use)), byMagnitude(use, "relative_error"), byMagnitude(use, "sqnr_db")];
      })),
    own,
  ];
}

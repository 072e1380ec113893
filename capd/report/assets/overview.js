// What the report is of: counters, quant types, who has how many records, and what was left out.

import { chosen, distinct, options } from "./controls.js";
import { el, named, nothing, section } from "./dom.js";
import { METRIC_TEXTS } from "./errors.js";
import { heat } from "./heat.js";
import { count, layerText, nbytes, num } from "./numbers.js";
import { SCALES } from "./colours.js";
import { table } from "./tables.js";

const counted = (text, name) => ({ text, number: true, value: (row) => row[name], show: count });
const measured = (text, name) => ({ text, number: true, value: (row) => row[name], show: num });
const typed = (text, name) => ({ text, value: (row) => row[name], show: named });

function tiles(data) {
  const all = data.all;
  const lost = data.ledger.reduce((sum, one) => sum + Object.values(one.dropped ?? {}).reduce((part, number) => part + number, 0), 0);
  const found = [["records", count(all.records)], ["raw", nbytes(all.raw_bytes)], ["values", count(all.count)], ["series", count(data.series_total)],
    ["NaN", count(all.nan)], ["Inf", count(all.inf)], ["dropped", data.ledger.length ? count(lost) : "–"], ["skipped", count(data.skipped_total)]];
  return el("dl", { class: "tiles" }, found.map(([text, value]) => el("div", {}, el("dt", {}, text), el("dd", {}, value))));
}

function ledger(data) {
  if (!data.ledger.length) return nothing("Tensor files have no ledger: nothing says what was offered.");
  const rows = data.ledger.map((one) => ({ ...one, dropped_total: Object.values(one.dropped ?? {}).reduce((sum, number) => sum + number, 0) }));
  const reasons = data.ledger.flatMap((one) => Object.entries(one.dropped ?? {}).map(([reason, records]) => ({ source: one.source, reason, records })));
  return [
    table("Offered = committed + in flight + dropped, in records", [typed("run", "source"), counted("offered", "offered"), counted("committed", "committed"),
      counted("in flight", "in_flight"), counted("dropped", "dropped_total"), typed("note", "note")], rows),
    reasons.length ? table("Dropped, by reason", [typed("run", "source"), typed("reason", "reason"), counted("records", "records")], reasons) : nothing("No record was dropped."),
  ];
}

function types(data) {
  return table("Quant types: how much there is of each, and its values", [typed("quant type", "quant_type"), counted("records", "records"), counted("series", "series"),
    counted("layers", "layers"), counted("ranks", "ranks"), counted("iterations", "iterations"), { text: "raw", number: true, value: (row) => row.raw_bytes, show: nbytes },
    counted("values", "count"), measured("mean", "mean"), measured("std", "std"), measured("min", "min"), measured("max", "max"), counted("NaN", "nan"), counted("Inf", "inf")], data.types);
}

function emulations(data) {
  return el("dl", {}, data.types.map((one) => el("div", {}, el("dt", {}, named(one.quant_type)), el("dd", {}, one.emulation === null ? "not said" : named(one.emulation)))));
}

function counts(data) {
  return chosen([{ name: "type", label: "quant type", options: options(distinct(data.counts.map((one) => one.quant_type))) }], ({ type }) => {
    const own = data.counts.filter((one) => one.quant_type === type);
    const found = new Map(own.map((one) => [`${one.layer}/${one.rank}`, one.records]));
    const label = "Records by layer and rank";
    return heat({
      label, corner: "layer", scale: SCALES.cividis, unit: "records", number: (layer, rank) => found.get(`${layer}/${rank}`) ?? null,
      rows: distinct(own.map((one) => one.layer)).map((value) => ({ value, text: layerText(value) })),
      columns: distinct(own.map((one) => one.rank)).map((value) => ({ value, text: `rank ${value}` })),
    });
  });
}

function leftOut(data) {
  const skipped = data.skipped.length ? table(`Skipped: ${count(data.skipped_total)} could not be read`, [typed("record or file", "name"), typed("reason", "reason")], data.skipped) : nothing("Everything that was selected could be read.");
  const unmeasured = data.unmeasured.length ? table("Without an error of formats", [typed("series or file", "series"), typed("reason", "reason"), counted("records", "records")], data.unmeasured) : null;
  const without = data.without_statistics ? el("p", {}, `${count(data.without_statistics)} records have no stored statistics, and --quick read no element: their values are left out.`) : null;
  return [skipped, unmeasured, without, data.notes.length ? el("ul", {}, data.notes.map((note) => el("li", {}, note))) : null];
}

export function overview(data) {
  const about = [["made by", `capd ${data.capd}`], ["reads", data.quick ? "stored statistics alone (--quick)" : "every element"], ["formats", data.formats.join(", ") || "none"]];
  return [
    section("Overview", null, tiles(data),
      el("dl", { class: "facts" }, el("div", {}, el("dt", {}, "of"), el("dd", {}, data.sources.map((one) => el("div", {}, named(one))))), about.map(([text, value]) => el("div", {}, el("dt", {}, text), el("dd", {}, value))))),
    section("Quant types", "std is √(Σ(x − mean)² / N) over finite values.", types(data)),
    section("Emulation", "What the records of each quant type say was active when they were captured; none: the job's own values.", emulations(data)),
    section("Ledger", "Every record that a rank offered ends in one of these; nothing disappears unsaid.", ledger(data)),
    section("Records by layer and rank", "An uneven column is a rank that captured less; an empty cell has no record.", data.counts.length ? counts(data) : nothing("There is no record.")),
    section("Left out", "What this page does not show of the selection.", leftOut(data)),
    section("Formulas", "x is a captured value, y what a format makes of it, d = y − x, N the number of values.", el("dl", { class: "facts" }, Object.entries(data.metric_notes).map(([name, text]) => el("div", {}, el("dt", {}, METRIC_TEXTS[name] ?? name), el("dd", {}, text))))),
  ];
}

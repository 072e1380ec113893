// What the report is of: counters, quant types, who has how many records, and what was left out.

import { alerts } from "./alerts.js";
import { chosen, distinct, options } from "../controls.js";
import { el, named, nothing, phrase, section } from "../dom.js";
import { metricText } from "./errors.js";
import { heat } from "../charts/heat.js";
import { say, told, word } from "../language.js";
import { count, layerText, nbytes, num } from "../numbers.js";
import { SCALES } from "../charts/colours.js";
import { recipeText } from "./recipe.js";
import { table } from "../tables.js";

const NOTES = {
  series: word("Tensors: the first {1} of {0} series have their own page; the groups cover all. --layer, --rank and --tensor choose others."),
  records: word("Tensors: at most {1} records of each series are drawn, evenly chosen."),
  iterations: word("Iterations: at most {1} of each tensor are drawn, evenly chosen."),
  scalars: word("Iterations: the first {1} of {0} scalars are drawn."),
  alerts: word("Overview: the first {1} of {0} alerts are listed."),
  points: word("Iterations: scalars of more than {1} iterations are drawn as means, minima and maxima of equal parts."),
  channels: word("Outliers: of {0} groups, the {1} with the largest share of outliers are shown."),
  replay: word("Replay: of {0} modules, the first {1} are listed."),
  boxes: word("Layers: of {0} pairs of a tensor and a layer, the first {1} are shown."),
};

const counted = (text, name) => ({ text: say(text), number: true, value: (row) => row[name], show: count });
const measured = (text, name) => ({ text: say(text), number: true, value: (row) => row[name], show: num });
const typed = (text, name, show = named) => ({ text: say(text), value: (row) => row[name], show });

const total = (counts) => Object.values(counts ?? {}).reduce((sum, number) => sum + number, 0);

function tiles(data) {
  const all = data.all;
  const lost = data.ledger.reduce((sum, one) => sum + total(one.dropped), 0);
  const found = [[say("records"), count(all.records)], [say("raw"), nbytes(all.raw_bytes)], [say("values"), count(all.count)], [say("series"), count(data.series_total)],
    ["NaN", count(all.nan)], ["Inf", count(all.inf)], [say("dropped"), data.ledger.length ? count(lost) : "–"], [say("skipped"), count(data.skipped_total)]];
  return el("dl", { class: "tiles" }, found.map(([text, value]) => el("div", {}, el("dt", {}, text), el("dd", {}, value))));
}

function ledger(data) {
  if (!data.ledger.length) return nothing(say("Tensor files have no ledger: nothing says what was offered."));
  const rows = data.ledger.map((one) => ({ ...one, note: one.clean ? one.note : say("a kill cut off the last second of some rank's counters"), dropped_total: total(one.dropped), left_out_total: total(one.left_out) }));
  const reasons = data.ledger.flatMap((one) => Object.entries({ ...one.dropped, ...one.left_out }).map(([reason, records]) => ({ source: one.source, reason, records })));
  return [
    table(say("Offered = committed + in flight + dropped + left out, in records"), [typed(word("run"), "source"), counted(word("offered"), "offered"), counted(word("committed"), "committed"),
      counted(word("in flight"), "in_flight"), counted(word("dropped"), "dropped_total"), counted(word("left out"), "left_out_total"), typed(word("note"), "note", phrase)], rows),
    reasons.length ? table(say("Dropped and left out, by reason"), [typed(word("run"), "source"), typed(word("reason"), "reason"), counted(word("records"), "records")], reasons) : nothing(say("No record was dropped.")),
  ];
}

function types(data) {
  return table(say("Quant types: how much there is of each, and its values"), [typed(word("quant type"), "quant_type"), counted(word("records"), "records"), counted(word("series"), "series"),
    counted(word("layers"), "layers"), counted(word("ranks"), "ranks"), counted(word("iterations"), "iterations"), { text: say("raw"), number: true, value: (row) => row.raw_bytes, show: nbytes },
    counted(word("values"), "count"), measured(word("mean"), "mean"), measured(word("std"), "std"), measured(word("min"), "min"), measured(word("max"), "max"), counted("NaN", "nan"), counted("Inf", "inf")], data.types);
}

function emulations(data) {
  return el("dl", {}, data.types.map((one) => el("div", {}, el("dt", {}, named(one.quant_type)), one.emulations.map((emulation) => el("dd", { title: emulation }, recipeText(emulation))))));
}

function counts(data) {
  return chosen([{ name: "type", label: say("quant type"), options: options(distinct(data.counts.map((one) => one.quant_type))) }], ({ type }) => {
    const own = data.counts.filter((one) => one.quant_type === type);
    const found = new Map(own.map((one) => [`${one.layer}/${one.rank}`, one.records]));
    const label = say("Records by layer and rank");
    return heat({
      label, corner: say("layer"), scale: SCALES.cividis, unit: say("records"), number: (layer, rank) => found.get(`${layer}/${rank}`) ?? null,
      rows: distinct(own.map((one) => one.layer)).map((value) => ({ value, text: layerText(value) })),
      columns: distinct(own.map((one) => one.rank)).map((value) => ({ value, text: say("rank {0}", value) })),
    });
  });
}

function leftOut(data) {
  const skipped = data.skipped.length ? table(say("Skipped: {0} could not be read", count(data.skipped_total)), [typed(word("record or file"), "name"), typed(word("reason"), "reason", phrase)], data.skipped) : nothing(say("Everything that was selected could be read."));
  const unmeasured = data.unmeasured.length ? table(say("Without an error of formats"), [typed(word("series or file"), "series"), typed(word("reason"), "reason", phrase), counted(word("records"), "records")], data.unmeasured) : null;
  const without = data.without_statistics ? el("p", {}, say("{0} records were not read and have no stored statistics: their values are left out.", count(data.without_statistics))) : null;
  return [skipped, unmeasured, without, data.notes.length ? el("ul", {}, data.notes.map((note) => el("li", {}, say(NOTES[note.about], count(note.found), count(note.shown))))) : null];
}

export function overview(data) {
  const about = [[say("made by"), `capd ${data.capd}`], [say("reads"), data.quick ? say("stored statistics alone (--quick)") : data.sample === null ? say("every element") : told(data.sample)], [say("formats"), data.formats.join(", ") || say("none")]];
  return [
    section(say("Overview"), null, tiles(data),
      el("dl", { class: "facts" }, el("div", {}, el("dt", {}, say("of")), el("dd", {}, data.sources.map((one) => el("div", {}, named(one))))), about.map(([text, value]) => el("div", {}, el("dt", {}, text), el("dd", {}, value))))),
    alerts(data),
    section(say("Quant types"), say("std is √(Σ(x − mean)² / N) over finite values."), types(data)),
    section(say("Emulation"), say("What the records of each quant type say was active when they were captured."), emulations(data)),
    section(say("Ledger"), say("Every record that a rank offered ends in one of these; nothing disappears unsaid."), ledger(data)),
    section(say("Records by layer and rank"), say("An uneven column is a rank that captured less; an empty cell has no record."), data.counts.length ? counts(data) : nothing(say("There is no record."))),
    section(say("Left out"), say("What this page does not show of the selection."), leftOut(data)),
    section(say("Formulas"), say("x is a captured value, y what a format makes of it, d = y − x, N the number of values."), el("dl", { class: "facts" }, Object.entries(data.metric_notes).map(([name, text]) => el("div", {}, el("dt", {}, metricText(name)), el("dd", {}, say(text)))))),
  ];
}

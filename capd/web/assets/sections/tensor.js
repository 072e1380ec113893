// One tensor by iteration, in one run or in several: lines, exponents, shares outside of formats, and samples of SQNR.

import { chart } from "../../report/charts/lines.js";
import { chosen, options } from "../../report/controls.js";
import { el, named, nothing, section } from "../../report/dom.js";
import { say, word } from "../../report/language.js";
import { count, drawable, nbytes, num, power } from "../../report/numbers.js";
import { figure, table } from "../../report/tables.js";
import { alertId } from "../alert.js";
import { ask, asker } from "../api.js";
import { joined } from "../charts/joined.js";
import { map } from "../charts/map.js";
import { placeOf } from "../places.js";
import { errors } from "./errors.js";
import { samples } from "./samples.js";

const STATISTICS = ["absmax", "mean", "std", "min", "max"];
const FIELDS = { quant_type: word("quant type"), rank: word("rank"), layer: word("layer"), layer_type: word("layer type"), tensor_name: word("tensor"), phase: word("phase"), operation: word("operation"), component: word("component"), module: word("module"), stack: word("stack"), dtype: word("dtype") };
const SHARES = { above: word("above the largest value"), below: word("below the smallest value"), flushed: word("below the smallest normal value") };
const MOST_MISSING = 100; // columns of one gap
const MOST_READS = 10; // again, until a new alert's record is in the catalog
const LEAST_SHARE = 1e-6; // of a colour: rarer values still have one

export async function tensor({ runs: names, path }, signal) {
  const [found, listed, ...said] = await Promise.all([ask("tensor", { run: names, path }, signal), ask("runs", {}, signal), ...names.map((run) => alertsOf(run, path, signal))]);
  const all = found.runs.filter((one) => !one.problem);
  const missing = found.runs.filter((one) => one.problem);
  const notes = missing.map((one) => nothing(say("{0}: {1}", one.run, one.problem)));
  if (!all.length) return { nodes: notes };
  const first = all[0];
  const curve = curves(all, said.flat());
  return {
    nodes: [identity(first, names, path, listed.runs), ...notes, curve.node, heat(all), outsideOf(all, found.ranges), errors(first.run, path, signal), samples(first.run, path, signal), numbers(first)],
    told: follower(names, path, curve, asker("tensor", signal)),
  };
}

/** The alerts of this tensor. A page without them is better than none. */
async function alertsOf(run, path, signal) {
  const found = await ask("alerts", { run, path }, signal).catch(() => ({ alerts: [] }));
  return found.alerts.map((one) => ({ ...one, run }));
}

/** Puts alerts that come onto the curve, and reads the numbers again until those of their iteration are there. */
function follower(names, path, curve, asking) {
  let reads = 0;
  return async (state) => {
    const newest = names.flatMap((run) => (state.alerts?.[run]?.alerts ?? []).map((one) => ({ ...one, run }))).filter((one) => one.series === path || one.series_paths.includes(path));
    if (curve.add(newest)) reads = MOST_READS;
    if (!reads) return;
    reads -= 1;
    const found = await asking({ run: names, path }).catch(() => undefined);
    if (found !== undefined && curve.show(found.runs.filter((one) => !one.problem))) reads = 0;
  };
}

function identity(one, names, path, listed) {
  const facts = Object.entries(FIELDS).filter(([field]) => one[field] !== null && one[field] !== "").map(([field, text]) => [say(text), named(one[field])]);
  facts.push([say("shape"), one.shape.join(" × ") || say("scalar")], [say("records"), count(one.records)], [say("raw"), nbytes(one.raw_bytes)]);
  const others = listed.map((run) => run.name).filter((name) => !names.includes(name));
  const add = el("select", { "aria-label": say("compare with"), change: () => { if (add.selectedIndex) location.hash = placeOf("tensor", [...names, others[add.selectedIndex - 1]], path); } },
    el("option", {}, say("none")), others.map((name) => el("option", { dir: "auto" }, name)));
  const drop = names.slice(1).map((name) => el("a", { href: placeOf("tensor", names.filter((each) => each !== name), path) }, say("without {0}", name)));
  return section(named(one.tensor_name), null, el("p", { class: "path" }, named(one.path)), el("dl", { class: "facts" }, facts.map(([text, value]) => el("div", {}, el("dt", {}, text), el("dd", {}, value)))),
    one.step > 1 ? el("p", { class: "note" }, say("Every {0}th record is drawn.", count(one.step))) : null,
    one.without_statistics ? el("p", { class: "note" }, say("{0} records have no statistics.", count(one.without_statistics))) : null,
    el("div", { class: "side" }, others.length ? el("label", { class: "control" }, `${say("compare with")} `, add) : null, drop));
}

/** node; add(alerts) → whether one is new; show(runs) → whether the numbers of all alerts are there. */
function curves(given, said) {
  let [all, redraw] = [given, () => {}];
  const alerts = new Map(said.map((one) => [alertId(one), one]));
  const marks = () => [...alerts.values()].map((one) => ({ at: one.iteration, kind: one.severity, title: `${one.rule}: ${one.text}` }));
  const draw = ({ what, axis }) => {
    const log = axis === "log";
    const { axis: at, values } = joined(all, (one, place) => drawable(one[what][place], log));
    return chart({ label: say(what), x: { label: say("iteration"), values: at, whole: true, show: count }, y: { label: say(what), log },
      lines: all.map((one, place) => ({ label: one.run, values: values[place] })), marks: marks() });
  };
  const axes = [{ value: "linear", text: say("linear") }, { value: "log", text: say("logarithmic") }];
  const node = section(say("Statistics by iteration"), say("From stored statistics. A line breaks where iterations are missing. Dashed: alerts."),
    chosen([{ name: "what", label: say("statistic"), options: options(STATISTICS, say) }, { name: "axis", label: say("axis"), options: axes }], draw, (again) => { redraw = again; }));
  return {
    node,
    add(more) {
      const fresh = more.filter((one) => !alerts.has(alertId(one)));
      for (const one of fresh) alerts.set(alertId(one), one);
      if (fresh.length) redraw();
      return fresh.length > 0;
    },
    show(runs) {
      if (runs.length) { all = runs; redraw(); }
      return [...alerts.values()].every((alert) => all.some((one) => one.run === alert.run && one.iteration.at(-1) >= alert.iteration));
    },
  };
}

function heat(all) {
  return section(say("Exponents by iteration"), say("The share of the values 2^e ≤ |x| < 2^(e+1) of each iteration, from the 256 bins that every record has. No element is read."), all.map((one) => exponents(one, all.length > 1)));
}

function exponents(one, several) {
  const known = one.exponents.filter((each) => each.length);
  const title = several ? el("h3", {}, named(one.run)) : null;
  if (!known.length) return [title, nothing(say("No value has an exponent: all are zero, or not finite."))];
  const least = Math.min(...known.map((each) => each[0]));
  const most = Math.max(...known.map((each) => each[0] + each.length - 2));
  const total = one.exponents.map((each) => each.slice(1).reduce((sum, value) => sum + value, 0));
  const places = withGaps(one);
  const share = (column, row) => {
    if (places[column] === null) return 0;
    const [each, sum] = [one.exponents[places[column]], total[places[column]]];
    const number = most - row - each[0]; // the first entry is the exponent, not a count
    return number >= 0 && number < each.length - 1 ? each[number + 1] / sum : 0;
  };
  return [title, map({ label: say("Exponents by iteration"), columns: places.length, rows: most - least + 1, low: num(LEAST_SHARE), high: "1",
    part: (column, row) => { const value = share(column, row); return value ? Math.max(0.02, 1 - Math.log10(value) / Math.log10(LEAST_SHARE)) : null; },
    told: (column, row) => places[column] === null ? "" : `${say("iteration")} ${count(one.iteration[places[column]])}: ${power(most - row)} · ${num(100 * share(column, row))} %`,
    ends: [`${say("iteration")} ${count(one.iteration[0])}`, count(one.iteration.at(-1))] }),
  el("p", { class: "note" }, say("From {0} at the bottom to {1} at the top.", power(least), power(most)))];
}

/** The columns of a map: places of points, and nulls where iterations are missing, as many as the usual distance tells. */
function withGaps(one) {
  const steps = one.iteration.slice(1).map((iteration, place) => iteration - one.iteration[place]);
  const usual = steps.slice().sort((left, right) => left - right)[Math.floor(steps.length / 2)] || 1;
  const after = new Set(one.gap_after);
  return one.iteration.flatMap((_, place) => [place, ...(after.has(place) ? Array(Math.min(MOST_MISSING, Math.round(steps[place] / usual) - 1)).fill(null) : [])]);
}

/** A share that is known within bounds, as text. */
function between(pair) {
  if (!pair) return "–";
  return pair[0] === pair[1] ? num(pair[0]) : `${num(pair[0])}–${num(pair[1])}`;
}

function outsideOf(all, ranges) {
  const one = all[0];
  const last = one.iteration.length - 1;
  const columns = [{ text: say("format"), value: (label) => label }, { text: say("largest"), number: true, value: (label) => ranges[label][0], show: num },
    ...Object.entries(SHARES).map(([name, text]) => ({ text: say("{0} (%)", say(text)), number: true, value: (label) => one.formats[label][name][last]?.[0] ?? null, show: (_, label) => between(one.formats[label][name][last]) }))];
  const drawn = ({ format, which }) => {
    const { axis, values } = joined(all, (each, place) => each.formats[format][which][place]?.[0] ?? null);
    return chart({ label: say("{0} (%)", say(SHARES[which])), x: { label: say("iteration"), values: axis, whole: true, show: count }, y: { label: "%", zero: true }, lines: all.map((each, place) => ({ label: each.run, values: values[place] })) });
  };
  return section(say("Outside of the range of formats"), say("Without a scale, from the bins. Where the bins leave it open, the table has both bounds, and the line the lower one."),
    last < 0 ? nothing(say("No record has statistics.")) : [table(say("Of iteration {0}, in percent", count(one.iteration[last])), columns, Object.keys(ranges)),
      chosen([{ name: "format", label: say("format"), options: options(Object.keys(ranges)) }, { name: "which", label: say("share"), options: options(Object.keys(SHARES), (name) => say(SHARES[name])), value: "flushed" }], drawn)]);
}

function numbers(one) {
  const columns = [{ text: say("iteration"), number: true, value: (place) => one.iteration[place], show: count }, ...STATISTICS.map((name) => ({ text: say(name), number: true, value: (place) => one[name][place], show: num })),
    ...["zero", "nan", "inf"].map((name) => ({ text: { zero: say("zero"), nan: "NaN", inf: "Inf" }[name], number: true, value: (place) => one[name][place], show: count }))];
  return section(say("Numbers"), null, figure(say("Statistics by iteration"), null, null, () => table(say("Statistics by iteration"), columns, one.iteration.map((_, place) => place))));
}

// Channels that stick out, and the modules that they belong to.

import { chart } from "../charts/lines.js";
import { chosen, options } from "../controls.js";
import { el, named, nothing, section } from "../dom.js";
import { QUICK } from "./errors.js";
import { say, word } from "../language.js";
import { count, drawable, layerText, num } from "../numbers.js";
import { figure, table } from "../tables.js";
import { seriesPath } from "./tensors.js";

const MOST = 12; // links to modules below a figure

const field = (text, name, show = num) => ({ text: say(text), number: show !== named, value: (row) => row[name], show });

/** The channels of a series in short, null where they were not measured. */
function outlierOf(one) {
  if (!one.outlier) return null;
  const [number, ratio, percent, channel, amax] = one.outlier;
  return { channels: number, ratio, percent, channel, amax };
}

/** The series whose channels were measured, each with them and its place among the pages. */
function placed(data) {
  return data.series.map((one, place) => ({ ...one, place, ...outlierOf(one) })).filter((one) => one.outlier);
}

/** The series of a group. */
function seriesOf(data, group) {
  return placed(data).filter((one) => one.channels === group.channels && ["quant_type", "tensor_name", "layer"].every((name) => one[name] === group[name]));
}

function link(one) {
  return el("a", { href: seriesPath(one.place) }, named(one.module || one.path));
}

function modules(data, group) {
  const found = seriesOf(data, group).sort((one, other) => (other.ratio ?? 0) - (one.ratio ?? 0));
  if (!found.length) return null;
  const shown = found.slice(0, MOST).map((one) => el("li", {}, link(one), ` ${say("rank {0}, ratio {1}", num(one.rank), num(one.ratio))}`));
  return el("details", { open: true }, el("summary", {}, say("Modules of this tensor, most outlying first: {0}", count(found.length))), el("ul", { class: "links" }, shown, found.length > MOST ? el("li", {}, say("… and {0} more, in the table below", count(found.length - MOST))) : null));
}

function channels(data, one) {
  const numbers = one.amax.map((_, place) => place * one.entries_per_point);
  const label = say("Largest magnitude of each channel");
  const columns = [{ text: say("channel"), number: true, value: (row) => row[0], show: count }, { text: say("max |x|"), number: true, value: (row) => row[1], show: num }, { text: say("outliers"), number: true, value: (row) => row[2], show: count }];
  const note = [say("Channels are the entries of the last axis."), one.entries_per_point > 1 ? say("Each stem is the largest of {0} neighbours.", one.entries_per_point) : null, one.width > 1 ? say("Each entry is of {0} channels.", one.width) : null, say("One tall stem makes a scale for all of the tensor too coarse for the others.")];
  return [
    figure(label, note.filter(Boolean).join(" "), chart({ label, x: { label: say("channel"), values: numbers, whole: true, show: count }, y: { label: say("max |x|"), log: true }, lines: [{ label: say("max |x|"), values: one.amax.map((value) => drawable(value, true)), stems: true }] }),
      () => table(label, columns.slice(0, 2), one.amax.map((value, place) => [numbers[place], value]))),
    modules(data, one),
    table(say("The largest channels"), columns, one.largest),
  ];
}

function bySeries(data) {
  const rows = placed(data).sort((one, other) => (other.ratio ?? 0) - (one.ratio ?? 0));
  return table(say("Outliers by tensor"), [{ text: say("module"), value: (row) => row.module || row.path, show: (_, row) => link(row) }, field(word("tensor"), "tensor_name", named), field(word("quant type"), "quant_type", named), field(word("layer"), "layer", layerText), field(word("rank"), "rank", num),
    field(word("channels"), "channels", count), field(word("ratio"), "ratio"), field(word("outliers (%)"), "percent"), field(word("largest channel"), "channel", count), field(word("max |x|"), "amax")], rows);
}

function byGroup(ranked) {
  return table(say("Outliers by tensor"), [field(word("tensor"), "tensor_name", named), field(word("quant type"), "quant_type", named), field(word("layer"), "layer", layerText), field(word("channels"), "channels", count), field(word("ratio"), "amax_ratio"), field(word("outliers (%)"), "outlier_percent")], ranked);
}

export function outliers(data) {
  const title = say("Outliers");
  if (!data.channels.length) return section(title, null, nothing(data.quick ? say(QUICK) : say("No tensor has channels to compare.")));
  const ranked = data.channels.map((one, place) => ({ ...one, place })).sort((one, other) => (other.amax_ratio ?? 0) - (one.amax_ratio ?? 0));
  const text = (one) => `${one.tensor_name} · ${one.layer === null ? say("no layer") : say("layer {0}", one.layer)} · ${one.quant_type}`;
  return [
    section(title, say("max |x| over all positions, for each entry of the last axis. Ratio: the largest channel's over the median channel's."),
      chosen([{ name: "place", label: say("tensor"), options: ranked.map((one) => ({ value: one.place, text: text(one) })) }], ({ place }) => channels(data, data.channels[place]))),
    section(say("All tensors"), say("The first of the list is where one channel rules most."), data.series.some((one) => one.outlier) ? bySeries(data) : byGroup(ranked)),
  ];
}

// The scalars of one run, or of several over each other.

import { chart } from "../../report/charts/lines.js";
import { named, nothing, section } from "../../report/dom.js";
import { say } from "../../report/language.js";
import { count, drawable, num } from "../../report/numbers.js";
import { figure, table } from "../../report/tables.js";
import { ask } from "../api.js";
import { joined } from "../charts/joined.js";

const MOST = 24; // scalars on one page

export async function scalars({ runs: names }, signal) {
  const known = await Promise.all(names.map((run) => ask("run", { run }, signal)));
  const all = [...new Set(known.flatMap((run) => run.scalars))].sort();
  if (!all.length) return { nodes: section(say("Scalars"), null, nothing(say("The job recorded no scalar. capd_client.scalar(\"loss\", value) records one."))) };
  const shown = all.slice(0, MOST);
  const found = await Promise.all(shown.map((name) => ask("scalar", { name, run: names }, signal)));
  const note = all.length > shown.length ? say("{0} more scalars are not drawn.", count(all.length - shown.length)) : null;
  return { nodes: section(say("Scalars"), note, shown.map((name, place) => drawn(name, found[place].runs))) };
}

function drawn(name, runs) {
  const good = runs.filter((one) => !one.problem && one.iteration.length);
  const several = good.length > 1;
  const read = (field) => joined(good, (one, place) => drawable(one[field][place]));
  const { axis, values } = read("mean");
  const spread = !several && good.some((one) => one.mean.some((value, place) => value !== one.min[place] || value !== one.max[place]));
  const lines = good.map((one, place) => ({ label: several || spread ? (several ? one.run : say("mean")) : name, values: values[place] }));
  if (spread) for (const [field, text] of [["min", say("smallest")], ["max", say("largest")]]) lines.push({ label: text, values: read(field).values[0] });
  const columns = [{ text: say("iteration"), number: true, value: (row) => axis[row], show: count }, ...good.map((one, place) => ({ text: one.run, number: true, value: (row) => values[place][row] ?? null, show: num }))];
  const lost = runs.filter((one) => one.problem).map((one) => nothing(say("{0}: {1}", one.run, one.problem)));
  const ends = good.some((one) => one.nan.some(Boolean) || one.inf.some(Boolean)) ? say("It is NaN or Inf at some iterations, where the line breaks.") : null;
  return [...lost, figure(named(name), ends, good.length ? chart({ label: name, height: 220, x: { label: say("iteration"), values: axis, whole: true, show: count }, y: { label: say("value") }, lines }) : nothing(say("No values yet.")), () => table(name, columns, axis.map((_, row) => row)))];
}

// The SQNR of sampled records: the server decodes one record each two seconds while somebody looks.

import { el, nothing, section } from "../../report/dom.js";
import { say } from "../../report/language.js";
import { count, num } from "../../report/numbers.js";
import { table } from "../../report/tables.js";
import { ask } from "../api.js";

const PERIOD_MS = 2000;

export function samples(run, path, signal) {
  const out = el("div", { class: "samples" });
  const start = el("button", { type: "button", click: () => { start.disabled = true; look(); } }, say("Measure samples"));

  async function look() {
    if (signal.aborted) return;
    let found = { is_complete: false };
    try {
      if (!document.hidden) found = await ask("sqnr", { run, path }, signal);
      if (found.samples) out.replaceChildren(...drawn(found));
    } catch (error) {
      if (!signal.aborted) out.replaceChildren(nothing(error.message));
    }
    if (!found.is_complete && !signal.aborted) setTimeout(look, PERIOD_MS);
  }

  return section(say("SQNR of sampled records"), say("Had its values been put into the format after the fact. At most one record of 16 MiB is decoded each two seconds, by a process of its own."), start, out);
}

function drawn(found) {
  const known = found.samples.filter((one) => one.sqnr);
  const nodes = [el("p", { class: "fact", role: "status" }, say("sampled {0} of {1} records", count(known.length), count(found.records)))];
  if (found.problem) nodes.push(nothing(found.problem));
  const formats = [...new Set(known.flatMap((one) => Object.keys(one.sqnr)))];
  if (!formats.length) return nodes;
  const of = (format) => known.map((one) => one.sqnr[format]).filter((value) => typeof value === "number").sort((one, other) => one - other);
  const column = (text, value) => ({ text, number: true, value, show: num });
  return [...nodes, table(say("SQNR in dB"), [{ text: say("format"), value: (format) => format }, column(say("newest record"), (format) => known.at(-1).sqnr[format] ?? null),
    column(say("smallest"), (format) => of(format)[0] ?? null), column(say("median"), (format) => of(format)[Math.floor(of(format).length / 2)] ?? null), column(say("largest"), (format) => of(format).at(-1) ?? null)], formats)];
}

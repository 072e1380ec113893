// The errors of formats by iteration that the daemon's lab measured while capturing.

import { chart } from "../../report/charts/lines.js";
import { chosen, options } from "../../report/controls.js";
import { el, nothing, section } from "../../report/dom.js";
import { say, word } from "../../report/language.js";
import { count, drawable, num } from "../../report/numbers.js";
import { figure, table } from "../../report/tables.js";
import { ask } from "../api.js";

const NUMBERS = { sqnr: word("SQNR (dB)"), relative: word("relative error (%)"), underflow: word("underflow (%)"), saturation: word("saturation (%)"), flushed: word("flushed (%)"), scale_std: word("std of log2 of the block scales") };

/** The node is empty until the server has read the errors, and stays so if there are none. */
export function errors(run, path, signal) {
  const out = el("div", { class: "errors" });
  ask("errors", { run, path }, signal).then((found) => out.replaceChildren(...drawn(found)), (error) => { if (!signal.aborted) out.replaceChildren(nothing(error.message)); });
  return out;
}

function drawn(found) {
  const labels = Object.keys(found.formats ?? {});
  const problem = found.problem ? nothing(found.problem) : null;
  if (!labels.length) return problem ? [problem] : [];
  const draw = ({ number }) => {
    const of = (label, place) => drawable(found.formats[label][number][place]);
    const columns = [{ text: say("iteration"), number: true, value: (place) => found.iteration[place], show: count }, ...labels.map((label) => ({ text: label, number: true, value: (place) => found.formats[label][number][place], show: num }))];
    const lines = labels.map((label) => ({ label, values: found.iteration.map((_, place) => of(label, place)) }));
    return figure(say(NUMBERS[number]), null, chart({ label: say(NUMBERS[number]), x: { label: say("iteration"), values: found.iteration, whole: true, show: count }, y: { label: say(NUMBERS[number]) }, lines }),
      () => table(say(NUMBERS[number]), columns, found.iteration.map((_, place) => place)));
  };
  const step = found.step > 1 ? el("p", { class: "note" }, say("Every {0}th record is drawn.", count(found.step))) : null;
  return [section(say("Errors measured while capturing"), say("By [lab] in capd.toml, on {0} records of this tensor; an iteration's records are added up.", count(found.records)), problem, step,
    chosen([{ name: "number", label: say("number"), options: options(Object.keys(NUMBERS), (name) => say(NUMBERS[name])) }], draw))];
}

// The newest records of a live run: they can be held, and filtered by words.

import { el, named, section } from "../../report/dom.js";
import { say, word } from "../../report/language.js";
import { count, layerText, num } from "../../report/numbers.js";
import { placeOf } from "../places.js";

const HEADS = [word("iteration"), word("rank"), word("layer"), word("tensor"), word("dtype"), word("shape"), word("absmax"), word("mean"), word("std"), "NaN", "Inf"];

/** Returns the node, and what is called with each new list. */
export function newest(run) {
  let [held, words, last] = [false, [], undefined];
  const body = el("tbody");
  const note = el("p", { class: "note", role: "status" });
  const pause = el("button", { type: "button", "aria-pressed": "false", click: () => {
    held = !held;
    pause.setAttribute("aria-pressed", String(held));
    pause.textContent = held ? say("Go on") : say("Pause");
    if (!held) fill();
  } }, say("Pause"));
  const filter = el("input", { type: "search", "aria-label": say("Filter the newest records"), placeholder: say("words of a name"), input: () => { words = filter.value.toLowerCase().split(/\s+/).filter(Boolean); fill(); } });
  const table = el("div", { class: "scroller", role: "region", tabindex: 0, "aria-label": say("Newest records") }, el("table", { class: "newest" }, el("thead", {}, el("tr", {}, HEADS.map((text) => el("th", { scope: "col" }, say(text))))), body));
  const node = section(say("Newest records"), null, el("div", { class: "side" }, pause, filter), note, table);
  node.hidden = true;

  function fill() {
    const records = (last?.records ?? []).filter((one) => words.every((each) => `${one.path} ${one.dtype}`.toLowerCase().includes(each)));
    note.textContent = last?.problem || (last?.left_out ? say("{0} records came faster than this list.", count(last.left_out)) : "");
    body.replaceChildren(...records.slice(0, 200).map((one) => el("tr", { class: one.nan || one.inf ? "critical" : null },
      ...[count(one.iteration), count(one.rank), layerText(one.layer)].map((text) => el("td", { class: "number" }, text)),
      el("td", {}, el("a", { href: placeOf("tensor", run, one.path), title: one.path }, named(one.module ? `${one.module}.${one.tensor_name}` : one.tensor_name))),
      el("td", {}, one.dtype), el("td", {}, one.shape.join(" × ")), ...[one.absmax, one.mean, one.std].map((value) => el("td", { class: "number" }, num(value))), ...[one.nan, one.inf].map((value) => el("td", { class: "number" }, count(value))))));
  }

  return { node, told(found) { last = held ? last : found; node.hidden = last === undefined; if (!held) fill(); } };
}

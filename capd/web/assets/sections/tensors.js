// The tensors of a run, found and turned page by page on the server: a run may have 100,000.

import { el, named, nothing, scroller, section } from "../../report/dom.js";
import { say, word } from "../../report/language.js";
import { count, layerText, nbytes } from "../../report/numbers.js";
import { ask, asker } from "../api.js";
import { placeOf } from "../places.js";

const PAGE = 100;
const WAIT_MS = 200; // after a key, so that a word is one question
const FILTERS = { tensor_name: word("tensor"), quant_type: word("quant type"), rank: word("rank"), layer: word("layer"), operation: word("operation"), layer_type: word("layer type") };
const HEADS = [word("tensor"), word("quant type"), word("rank"), word("layer"), word("dtype"), word("shape"), word("records"), word("raw")];

export async function tensors({ runs: [name] }, signal) {
  const run = await ask("run", { run: name }, signal);
  const wanted = { run: name, words: "", first: 0, most: PAGE };
  const out = el("div", { class: "drawn" });
  const asking = asker("series", signal);
  let waiting = null;

  async function fill() {
    try {
      const found = await asking({ ...wanted });
      if (found !== undefined) out.replaceChildren(...drawn(found));
    } catch (error) {
      out.replaceChildren(nothing(error.message));
    }
  }

  function changed(values) {
    Object.assign(wanted, { first: 0 }, values);
    clearTimeout(waiting);
    waiting = setTimeout(fill, WAIT_MS);
  }

  function drawn(found) {
    if (!found.total) return [nothing(say("Nothing matches: shorten the search, or set a filter back to any."))];
    const turn = (text, step, off) => el("button", { type: "button", disabled: off, click: () => { wanted.first += step; fill(); } }, text);
    const end = found.first + found.series.length;
    return [el("div", { class: "turning" }, turn(say("← Back"), -PAGE, found.first === 0), el("span", { class: "place", role: "status" }, say("{0} to {1} of {2}", count(Math.min(found.first + 1, found.total)), count(end), count(found.total))), turn(say("More →"), PAGE, end >= found.total)),
      scroller(say("Tensors"), el("table", { class: "table" }, el("thead", {}, el("tr", {}, HEADS.map((text) => el("th", { scope: "col" }, say(text))))), el("tbody", {}, found.series.map((one) => row(name, one)))))];
  }

  const search = el("input", { type: "search", "aria-label": say("Search names"), placeholder: say("words of a name"), input: () => changed({ words: search.value }) });
  const selects = Object.entries(FILTERS).filter(([field]) => run.fields[field].length > 1).map(([field, text]) => {
    const values = ["", ...run.fields[field].filter((value) => value !== null && value !== "")];
    const node = el("select", { "aria-label": say(text), change: () => changed({ [field]: values[node.selectedIndex] }) }, values.map((value) => el("option", { dir: "auto" }, value === "" ? say("any") : String(value))));
    return el("label", { class: "control" }, `${say(text)} `, node);
  });
  await fill();
  return { nodes: section(say("Tensors"), say("A series is one tensor of one module on one rank."), el("div", { class: "controls" }, el("label", { class: "control" }, `${say("search")} `, search), selects), out) };
}

function row(run, one) {
  const name = one.module ? `${one.module}.${one.tensor_name}` : one.path;
  return el("tr", {}, el("td", {}, el("a", { href: placeOf("tensor", run, one.path), title: one.path }, named(name))), el("td", {}, named(one.quant_type)), el("td", { class: "number" }, count(one.rank)), el("td", { class: "number" }, layerText(one.layer)),
    el("td", {}, one.dtype), el("td", {}, one.shape.join(" × ")), el("td", { class: "number" }, count(one.records)), el("td", { class: "number" }, nbytes(one.raw_bytes)));
}

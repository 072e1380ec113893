// The list of runs. Several can be chosen for one chart.

import { el, named, nothing, section } from "../../report/dom.js";
import { say } from "../../report/language.js";
import { count, nbytes } from "../../report/numbers.js";
import { table } from "../../report/tables.js";
import { ask } from "../api.js";
import { stateText } from "../states.js";
import { placeOf } from "../places.js";

export async function runs(place, signal) {
  const found = await ask("runs", {}, signal);
  if (!found.runs.length) return { nodes: section(say("Runs"), found.root, nothing(say("There is no run here yet. Capture one with: capd run -- CMD"))) };
  const chosen = new Set();
  const open = el("button", { type: "button", disabled: true, click: () => { location.hash = placeOf("scalars", [...chosen]); } }, say("Scalars of the chosen runs"));
  const box = (name) => el("input", { type: "checkbox", "aria-label": say("choose {0}", name), change: (event) => {
    if (event.target.checked) chosen.add(name); else chosen.delete(name);
    open.disabled = !chosen.size;
  } });
  const more = found.total > found.runs.length ? el("p", { class: "note" }, say("{0} older runs are not listed.", count(found.total - found.runs.length))) : null;
  const columns = [
    { text: say("run"), value: (one) => one.name, show: (name) => el("span", {}, box(name), " ", el("a", { href: placeOf("overview", name) }, named(name))) },
    { text: say("state"), value: (one) => one.state, show: (state) => el("span", { class: `state-${state}` }, stateText(state)) },
    { text: say("started"), value: (one) => one.started_s, show: when },
    { text: say("iterations"), number: true, value: (one) => one.last_iteration, show: (_, one) => (one.first_iteration === null ? "–" : `${count(one.first_iteration)}–${count(one.last_iteration)}`) },
    { text: say("ranks"), number: true, value: (one) => one.ranks, show: count },
    { text: say("records"), number: true, value: (one) => one.records, show: count },
    { text: say("stored"), number: true, value: (one) => one.stored_bytes, show: nbytes },
    { text: say("quant type"), value: (one) => one.quant_types.join(", "), show: named },
    { text: say("command"), value: (one) => one.command, show: named },
  ];
  return { nodes: section(say("Runs"), null, el("p", { class: "path" }, named(found.root)), more, el("div", { class: "side" }, open), table(say("Runs"), columns, found.runs)) };
}

function when(seconds) {
  return seconds ? new Date(1000 * seconds).toLocaleString(document.documentElement.lang) : "–";
}

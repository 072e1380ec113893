// What rules said about a run, and of a live one as they say it.

import { el, named, nothing, phrase, section } from "../../report/dom.js";
import { say, word } from "../../report/language.js";
import { count } from "../../report/numbers.js";
import { table } from "../../report/tables.js";
import { ask } from "../api.js";
import { placeOf } from "../places.js";

const SEVERITIES = { info: word("info"), warning: word("warning"), critical: word("critical") };

export async function alerts({ runs: [name] }, signal) {
  const found = await ask("alerts", { run: name }, signal);
  const out = el("div");
  let [shown, seen] = [found.alerts, found.alerts[0]?.time_ns ?? ""];
  const fill = () => out.replaceChildren(...(shown.length ? [table(say("Alerts"), columns(name), shown)] : [nothing(say("No rule has fired. The rules are [[trigger]] in capd.toml."))]));
  fill();
  return {
    nodes: section(say("Alerts"), found.more ? say("Older alerts are not listed; capd alerts prints all.") : null, out),
    told(state) {
      const newest = state.alerts?.[name]?.alerts ?? [];
      if (!newest.length || newest[0].time_ns === seen) return;
      const known = new Set(shown.map(identity));
      shown = [...newest.filter((one) => !known.has(identity(one))), ...shown];
      seen = newest[0].time_ns;
      fill();
    },
  };
}

function identity(one) {
  return [one.time_ns, one.rule, one.node, one.rank, one.series].join(" ");
}

function columns(name) {
  return [
    { text: say("time"), value: (one) => one.time_ns, show: (time) => new Date(Number(BigInt(time) / 1000000n)).toLocaleString(document.documentElement.lang) },
    { text: say("severity"), value: (one) => one.severity, show: (severity) => el("span", { class: severity }, say(SEVERITIES[severity] ?? severity)) },
    { text: say("rule"), value: (one) => one.rule, show: named },
    { text: say("rank"), number: true, value: (one) => one.rank, show: count },
    { text: say("iteration"), number: true, value: (one) => one.iteration, show: count },
    { text: say("tensor"), value: (one) => one.series, show: (series) => (series ? el("a", { href: placeOf("tensor", name, series), title: series }, named(series)) : "–") },
    { text: say("series"), number: true, value: (one) => one.count, show: count },
    { text: say("what"), value: (one) => one.text, show: phrase },
  ];
}

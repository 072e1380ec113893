// What rules said about the runs while they were captured.

import { el, named, phrase, section } from "../dom.js";
import { say, word } from "../language.js";
import { count } from "../numbers.js";
import { table } from "../tables.js";
import { runNames } from "./scalars.js";

const SEVERITIES = { info: word("info"), warning: word("warning"), critical: word("critical") };

/** The columns of a table of alerts. place: the address of a tensor's page by the path of its series, null without one. */
export function alertColumns(place) {
  return [
    { text: say("time"), value: (one) => one.time_ns, show: (time) => new Date(Number(BigInt(time) / 1000000n)).toLocaleString(document.documentElement.lang) },
    { text: say("severity"), value: (one) => one.severity, show: (severity) => el("span", { class: severity }, say(SEVERITIES[severity] ?? severity)) },
    { text: say("rule"), value: (one) => one.rule, show: named },
    { text: say("rank"), number: true, value: (one) => one.rank, show: count },
    { text: say("iteration"), number: true, value: (one) => one.iteration, show: count },
    { text: say("tensor"), value: (one) => one.series, show: (series, one) => tensor(series, series ? place(series, one) : null) },
    { text: say("series"), number: true, value: (one) => one.count, show: count },
    { text: say("what"), value: (one) => one.text, show: phrase },
  ];
}

function tensor(series, href) {
  if (!series) return "–";
  return href === null ? named(series) : el("a", { href, title: series }, named(series));
}

export function alerts(data) {
  if (!data.alerts.length) return null;
  const names = runNames(data.sources);
  const run = { text: say("run"), value: (one) => names[data.sources.indexOf(one.source)], show: named };
  const places = new Map(data.sources.length > 1 ? [] : data.series.map((one, place) => [one.path, `#tensor/${place}`]));
  const columns = [...(data.sources.length > 1 ? [run] : []), ...alertColumns((series) => places.get(series) ?? null)];
  return section(say("Alerts"), say("What the rules of [[trigger]] in capd.toml said while the runs were captured, whatever the report selects."), table(say("Alerts"), columns, data.alerts));
}

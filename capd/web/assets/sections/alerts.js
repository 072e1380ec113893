// What rules said about a run, and of a live one as they say it.

import { el, nothing, section } from "../../report/dom.js";
import { say } from "../../report/language.js";
import { alertColumns } from "../../report/sections/alerts.js";
import { table } from "../../report/tables.js";
import { alertId } from "../alert.js";
import { ask } from "../api.js";
import { placeOf } from "../places.js";

export async function alerts({ runs: [name] }, signal) {
  const found = await ask("alerts", { run: name }, signal);
  const out = el("div");
  let [shown, seen] = [found.alerts, found.alerts[0]?.time_ns ?? ""];
  const fill = () => out.replaceChildren(...(shown.length ? [table(say("Alerts"), alertColumns((series) => placeOf("tensor", name, series)), shown)] : [nothing(say("No rule has fired. The rules are [[trigger]] in capd.toml."))]));
  fill();
  return {
    nodes: section(say("Alerts"), found.more ? say("Older alerts are not listed; capd alerts prints all.") : null, out),
    told(state) {
      const newest = state.alerts?.[name]?.alerts ?? [];
      if (!newest.length || newest[0].time_ns === seen) return;
      const known = new Set(shown.map(alertId));
      shown = [...newest.filter((one) => !known.has(alertId(one))), ...shown];
      seen = newest[0].time_ns;
      fill();
    },
  };
}

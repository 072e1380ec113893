// One run: what the store says of it, and while it is captured the counters of its ranks and its newest records.

import { el, named, nothing, section } from "../../report/dom.js";
import { say, word } from "../../report/language.js";
import { count, nbytes, num } from "../../report/numbers.js";
import { ask } from "../api.js";
import { stateText } from "../states.js";
import { map } from "../charts/map.js";
import { spark } from "../charts/spark.js";
import { newest } from "./newest.js";
import { report } from "./report.js";
import { duration } from "../times.js";

const HEADS = [word("rank"), word("state"), word("iteration"), word("behind"), word("records per second"), word("in flight"), word("committed"), word("lost"), word("arena")];
const MOST_RANKS = 64; // in the map and the table; of more, those that are not well come first

export async function overview({ runs: [name] }, signal) {
  const run = await ask("run", { run: name }, signal);
  const live = el("div", { class: "live" });
  const events = el("div");
  const records = newest(name);
  return {
    nodes: [facts(run), live, records.node, events, report(run, signal)],
    told(state) {
      const here = state.node?.runs.find((one) => one.name === name);
      live.replaceChildren(...(here ? counters(state.node, here) : [section(say("Live"), null, nothing(say("No daemon of this machine writes this run now.")))]).flat(Infinity).filter(Boolean));
      records.told(state.newest?.[name]);
      events.replaceChildren(...eventList(state.events));
    },
  };
}

function tiles(pairs) {
  return el("dl", { class: "tiles" }, pairs.map(([text, value]) => el("div", {}, el("dt", {}, text), el("dd", {}, value))));
}

function facts(run) {
  return section(say("Overview"), run.problem || null, tiles([
    [say("state"), el("span", { class: `state-${run.state}` }, stateText(run.state))], [say("ranks"), count(run.ranks)],
    [say("iterations"), run.first_iteration === null ? "–" : `${count(run.first_iteration)}–${count(run.last_iteration)}`], [say("records"), count(run.records)],
    [say("raw"), nbytes(run.raw_bytes)], [say("stored"), nbytes(run.stored_bytes)], [say("quant type"), named(run.quant_types.join(", "))], [say("nodes"), named(run.nodes.join(", "))],
  ]), run.command ? el("p", { class: "path" }, named(run.command)) : null);
}

function counters(node, run) {
  return [section(say("Live"), null, tiles([
    [say("iteration"), count(run.iteration)], [say("records per second"), el("span", {}, num(run.rate), " ", spark(run.rates))],
    [say("offered"), count(run.offered)], [say("committed"), count(run.committed)], [say("in flight"), count(run.in_flight)],
    [say("lost"), count(total(run.dropped))], [say("room on the disk"), nbytes(node.room)], [say("full in"), duration(node.full_in_s)],
  ]), drops(run)), ranks(run)];
}

function total(dropped) {
  return Object.values(dropped).reduce((sum, value) => sum + value, 0);
}

function drops(run) {
  const rows = [...Object.entries(run.dropped).map(([reason, value]) => [reason, value, "critical"]), ...Object.entries(run.left_out).map(([reason, value]) => [reason, value, null])];
  if (!rows.length) return el("p", { class: "fact" }, say("Nothing was dropped."));
  return el("div", { class: "scroller", role: "region", tabindex: 0, "aria-label": say("Drops by reason") }, el("table", {}, el("caption", {}, say("Drops by reason")),
    el("tbody", {}, rows.map(([reason, value, look]) => el("tr", {}, el("th", { scope: "row", class: look }, reason), el("td", { class: "number" }, count(value)), el("td", {}, look ? run.why_full : say("left out by the settings")))))));
}

function ranks(run) {
  const order = run.ranks.map((rank, place) => ({ rank, place })).sort((one, other) => (other.rank.state !== "live") - (one.rank.state !== "live")).slice(0, MOST_RANKS).sort((one, other) => one.place - other.place);
  const most = Math.max(1e-9, ...order.flatMap(({ place }) => run.rank_rates[place]).filter((value) => value !== null));
  const heads = HEADS.map((text) => el("th", { scope: "col" }, say(text)));
  const rows = order.map(({ rank }) => el("tr", {}, el("th", { scope: "row" }, count(rank.rank)), el("td", { class: `state-${rank.state}` }, stateText(rank.state), rank.end ? ` (${rank.end})` : ""),
    ...[count(rank.iteration), count(rank.behind), num(rank.rate), count(rank.in_flight), count(rank.committed), count(total(rank.dropped)), `${nbytes(rank.arena_used)} / ${nbytes(rank.arena_bytes)}`].map((text) => el("td", { class: "number" }, text))));
  const more = run.ranks.length + run.omitted_ranks - order.length;
  return section(say("Ranks"), more ? say("{0} more ranks are not shown.", count(more)) : null,
    map({ label: say("Records per second of each rank over the last minute"), columns: run.rates.length, rows: order.length, ends: [say("a minute ago"), say("now")], low: "0", high: num(most),
      part: (column, row) => { const value = run.rank_rates[order[row].place][column]; return value === null || value === undefined ? null : value / most; },
      told: (column, row) => `${say("rank {0}", order[row].rank.rank)}: ${num(run.rank_rates[order[row].place][column])}` }),
    el("div", { class: "scroller", role: "region", tabindex: 0, "aria-label": say("Ranks") }, el("table", { class: "ranks" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows))));
}

function eventList(events) {
  if (!events.length) return [];
  return [section(say("Events"), null, el("ul", { class: "events" }, events.slice().reverse().map((one) => el("li", { class: one.severity }, `${new Date(Number(BigInt(one.time_ns) / 1000000n)).toLocaleTimeString()} `, named(one.text)))))];
}

// The page itself: how much it takes, and whether a daemon answers.

import { el, named, section } from "../../report/dom.js";
import { say } from "../../report/language.js";
import { count, nbytes, num } from "../../report/numbers.js";
import { ask } from "../api.js";
import { stateText } from "../states.js";

export async function health(_, signal) {
  const found = await ask("health", {}, signal);
  const daemon = el("div");
  const pairs = [[say("version"), found.version], [say("memory"), nbytes(found.memory_bytes)], [say("most memory so far"), nbytes(found.most_memory_bytes)], [say("CPU time"), say("{0} s", num(found.cpu_s))], [say("open pages"), count(found.viewers)], [say("answers"), count(found.answers)], [say("since"), say("{0} s", count(Math.round(found.uptime_s)))]];
  return {
    nodes: [section(say("This page"), null, facts(pairs)), daemon],
    told(state) {
      const node = state.node;
      const rows = [[say("state"), stateText(state.daemon)], ...(node ? [[say("node"), named(node.node)], [say("version"), node.version], [say("pid"), String(node.pid)], [say("free disk"), nbytes(node.disk_free)], [say("oldest record not committed"), say("{0} s", num(node.oldest_s))], [say("connections"), count(node.connections)]] : [])];
      daemon.replaceChildren(section(say("Daemon"), state.problem || null, facts(rows)));
    },
  };
}

function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.map(([text, value]) => el("div", {}, el("dt", {}, text), el("dd", {}, value))));
}

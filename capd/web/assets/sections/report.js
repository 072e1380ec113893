// The report of a finished run: what the server says of it, and the buttons that begin and end it.

import { el, section } from "../../report/dom.js";
import { say, word } from "../../report/language.js";
import { nbytes } from "../../report/numbers.js";
import { address, ask, tell } from "../api.js";
import { placeOf } from "../places.js";
import { duration } from "../times.js";

const KINDS = { full: word("full: every element"), quick: word("quick: stored statistics") };
const [PERIOD_MS, WAITING_MS] = [1000, 5000]; // while a report is made, and until a run has finished

export function report(run, signal) {
  const language = document.documentElement.lang.slice(0, 2);
  let [found, refused, timer] = [null, "", null]; // refused: what the reader has asked for in vain
  const kind = () => Object.keys(KINDS)[choice.selectedIndex];
  const choice = el("select", { "aria-label": say("kind of report"), change: () => { refused = ""; draw(); } }, Object.values(KINDS).map((text) => el("option", {}, say(text))));
  const start = el("button", { type: "button", click: () => does("report") }, say("Report"));
  const stop = el("button", { type: "button", hidden: true, click: () => does("report/stop") }, say("Stop"));
  const link = el("a", { class: "open", target: "_blank", rel: "noopener", hidden: true }, say("Open the report"));
  const told = el("p", { class: "fact", role: "status" });
  const making = el("div", { class: "side", hidden: true }, choice, start, stop, link);

  /** Draw the server's answer, and ask again while it may change. */
  async function answer(asked) {
    clearTimeout(timer);
    let wait = PERIOD_MS;
    try {
      found = await asked;
      if (!signal.aborted) draw();
    } catch (error) {
      wait = WAITING_MS;
      if (signal.aborted) return;
      draw(error instanceof TypeError ? say("The page's server does not answer: {0}", error.message) : error.message);
    }
    if (found !== null && !found.is_finished) wait = WAITING_MS;
    else if (!isMade()) return;
    if (!signal.aborted) timer = setTimeout(look, wait);
  }

  function look() {
    if (document.hidden) timer = setTimeout(look, WAITING_MS);
    else answer(ask("report", { run: run.name }, signal));
  }

  function does(what) {
    refused = "";
    answer(tell(what, { run: run.name, kind: kind() }, signal).catch((error) => {
      if (error instanceof TypeError) throw error;
      refused = error.message;
      return ask("report", { run: run.name }, signal);
    }));
  }

  function isMade() {
    return found !== null && Object.values(found.kinds).some((one) => one.state === "making");
  }

  function draw(problem = "") {
    const one = found?.kinds[kind()] ?? { state: "none" };
    making.hidden = !found?.is_finished;
    start.hidden = one.state === "making" || one.state === "ready";
    stop.hidden = one.state !== "making";
    link.hidden = one.state !== "ready";
    link.setAttribute("href", address("report", { run: run.name, kind: kind(), lang: language }));
    say_of(problem || refused || found?.problem || textOf(one));
  }

  function textOf(one) {
    if (found !== null && !found.is_finished) return say("The report comes when the run has finished.");
    if (one.state === "making") return say("being made for {0}", duration(one.seconds));
    if (one.state === "ready") return [say("It opens in a new tab ({0}). The page keeps the newest reports until it ends.", nbytes(one.nbytes)), one.note].filter(Boolean).join(" ");
    return one.problem ?? "";
  }

  // A screen reader tells each change, so the same text is not set again.
  function say_of(text) {
    if (told.textContent !== text) told.textContent = text;
  }

  look();
  return section(say("Report"), say("Distributions, errors of formats and outliers take every element. A process of its own, with the lowest priority, makes this report."), making, told,
    el("p", { class: "fact" }, say("The same as a file, by a command:")), el("p", { class: "command" }, run.report),
    el("p", {}, el("a", { href: placeOf("tensors", run.name) }, say("All tensors"))));
}

// The live page: where its address leads, its language, and the newest state that every part of it is told.

import { dropCharts } from "../report/charts/lines.js";
import { el, named, nothing } from "../report/dom.js";
import { LANGUAGES, say, speak, word } from "../report/language.js";
import { follow } from "./api.js";
import { placeIn, placeOf } from "./places.js";
import { alerts } from "./sections/alerts.js";
import { health } from "./sections/health.js";
import { layers } from "./sections/layers.js";
import { overview } from "./sections/overview.js";
import { runs } from "./sections/runs.js";
import { scalars } from "./sections/scalars.js";
import { tensor } from "./sections/tensor.js";
import { tensors } from "./sections/tensors.js";
import "./words.js";

const OF_A_RUN = { overview: [word("Overview"), overview], tensors: [word("Tensors"), tensors], layers: [word("Layers"), layers], scalars: [word("Scalars"), scalars], alerts: [word("Alerts"), alerts] };
const PAGES = { runs: [word("Runs"), runs], ...OF_A_RUN, health: [word("Health"), health], tensor: [word("Tensors"), tensor] };

const [main, header, banner, skip] = ["main", "header", ".banner", "a.skip"].map((found) => document.querySelector(found));
const live = { state: null };
let shown = { leave: () => {}, told: () => {} };

/** Draw the page of the address. A page is { nodes, told?(state) }, made with a signal that ends its questions. */
async function show(focus) {
  const place = placeIn(location.hash);
  const page = Object.hasOwn(PAGES, place.page) ? place.page : "runs";
  const leaving = new AbortController();
  shown.leave();
  dropCharts();
  shown = { leave: () => leaving.abort(), told: () => {} };
  drawHeader(page, place);
  main.replaceChildren(nothing(say("Reading …")));
  main.dataset.page = "";
  try {
    const made = await PAGES[page][1](place, leaving.signal);
    if (leaving.signal.aborted) return;
    main.replaceChildren(...[made.nodes].flat(Infinity).filter(Boolean));
    shown.told = made.told ?? (() => {});
    if (live.state !== null) { markAlerts(live.state); shown.told(live.state); }
  } catch (error) {
    if (leaving.signal.aborted) return;
    main.replaceChildren(nothing(error.message));
  }
  main.dataset.page = page;
  if (focus) { main.focus({ preventScroll: true }); scrollTo(0, 0); }
}

function drawHeader(page, { runs: names }) {
  const pages = { runs: PAGES.runs, ...(names.length ? OF_A_RUN : {}), health: PAGES.health };
  const marked = page === "tensor" ? "tensors" : page;
  const menu = el("nav", { class: "pages", "aria-label": say("Pages") }, Object.entries(pages).map(([name, [text]]) =>
    el("a", { href: Object.hasOwn(OF_A_RUN, name) ? placeOf(name, names) : placeOf(name), "aria-current": name === marked ? "page" : null }, say(text))));
  header.replaceChildren(el("h1", {}, el("span", {}, "capd web "), names.length ? names.map((name, place) => [place ? ", " : null, named(name)]) : null), el("div", { class: "choices" }, language()), menu);
}

/** The choice of the language: the server sends the page again in it. */
function language() {
  const node = el("select", { name: "language", "aria-label": say("language"), change: () => {
    const to = new URL(location.href);
    to.searchParams.set("lang", Object.keys(LANGUAGES)[node.selectedIndex]);
    location.replace(to);
  } }, Object.values(LANGUAGES).map((text) => el("option", {}, text)));
  node.selectedIndex = Object.keys(LANGUAGES).indexOf(document.documentElement.lang.slice(0, 2));
  return el("label", { class: "kept" }, `${say("language")} `, node);
}

function say_in_banner(text) {
  banner.hidden = !text;
  banner.textContent = text;
}

/** The number of alerts of a live run stands beside the name of their page. */
function markAlerts(state) {
  const link = header.querySelector("a[href^='#alerts']");
  const total = state.alerts?.[placeIn(location.hash).runs[0]]?.total ?? 0;
  if (link === null) return;
  link.classList.toggle("critical", total > 0);
  link.textContent = total ? `${say("Alerts")} ${total}` : say("Alerts");
}

function told(state) {
  live.state = state;
  say_in_banner(state.daemon === "gone" ? say("The daemon does not answer; these are its last values. {0}", state.problem) : "");
  markAlerts(state);
  main.classList.toggle("stale", state.daemon === "gone");
  shown.told(state);
}

speak(document.documentElement.lang.slice(0, 2));
skip.textContent = say("Skip to the content");
skip.addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(false));
addEventListener("hashchange", () => show(true));
follow(told, () => say_in_banner(say("The page's own server does not answer. Is capd web still running?")));
show(false);

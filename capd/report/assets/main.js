// The page: where its address leads, its theme and its language.

import { dropCharts, redrawCharts } from "./charts/lines.js";
import { distributions } from "./sections/distributions.js";
import { el, named } from "./dom.js";
import { errors } from "./sections/errors.js";
import { hifp8 } from "./sections/hifp8.js";
import { LANGUAGES, say, speak, systemLanguage, word } from "./language.js";
import { boxes, trends } from "./sections/layers.js";
import { outliers } from "./sections/outliers.js";
import { overflow } from "./sections/overflow.js";
import { overview } from "./sections/overview.js";
import { replay } from "./sections/replay.js";
import { summary } from "./sections/summary.js";
import { tensor, tensors } from "./sections/tensors.js";

const data = JSON.parse(document.getElementById("data").textContent);
const PAGES = {
  summary: [word("Summary"), summary], overview: [word("Overview"), overview], errors: [word("Errors"), errors], distributions: [word("Distributions"), distributions], layers: [word("Layers"), boxes], outliers: [word("Outliers"), outliers],
  iterations: [word("Iterations"), trends], hifp8: [word("HiFP8"), hifp8], overflow: [word("Overflow"), overflow], ...(data.replay ? { replay: [word("Replay"), replay] } : {}), tensors: [word("Tensors"), tensors],
};
const THEMES = { auto: word("◐ as the system"), light: word("☀ light"), dark: word("☾ dark") };

const [main, header, skip] = ["main", "header", "a.skip"].map((found) => document.querySelector(found));
const chosen = { theme: stored("theme", "auto", THEMES), language: stored("language", systemLanguage(), LANGUAGES) };

function show(focus) {
  const [name, place] = location.hash.slice(1).split("/");
  const known = name === "tensor" || Object.hasOwn(PAGES, name);
  const single = data.series.length === 1 && data.series_total === 1;
  const current = known ? name : single ? "tensor" : "summary";
  dropCharts();
  const nodes = current === "tensor" ? tensor(data, Number(place ?? 0)) : PAGES[current][1](data);
  main.replaceChildren(...[nodes].flat(Infinity).filter(Boolean));
  const marked = current === "tensor" ? "tensors" : current;
  header.querySelectorAll("nav a").forEach((link) => (link.hash === `#${marked}` ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current")));
  if (focus) { main.focus({ preventScroll: true }); scrollTo(0, 0); }
}

function stored(name, otherwise, known) {
  try {
    const found = localStorage.getItem(`capd-report-${name}`);
    return Object.hasOwn(known, found ?? "") ? found : otherwise;
  } catch { // a browser that keeps nothing for local files
    return otherwise;
  }
}

function store(name, value) {
  try { localStorage.setItem(`capd-report-${name}`, value); } catch { /* the choice lasts as long as the page */ }
}

/** A choice of the reader for all pages, kept by the browser. */
function kept(name, label, texts) {
  const node = el("select", { "aria-label": label, change: () => {
    chosen[name] = Object.keys(texts)[node.selectedIndex];
    store(name, chosen[name]);
    draw();
    header.querySelector(`[name=${name}]`).focus();
  }, name }, Object.values(texts).map((text) => el("option", {}, say(text))));
  node.selectedIndex = Object.keys(texts).indexOf(chosen[name]);
  return el("label", { class: "kept" }, `${label} `, node);
}

/** Draw the header and the page in the theme and the language that are chosen. */
function draw() {
  document.documentElement.dataset.theme = chosen.theme;
  speak(chosen.language);
  skip.textContent = say("Skip to the content");
  const menu = el("nav", { class: "pages", "aria-label": say("Pages of the report") }, Object.entries(PAGES).map(([name, [text]]) => el("a", { href: `#${name}` }, say(text))));
  header.replaceChildren(el("h1", {}, el("span", {}, "capd report "), named(data.title)), el("div", { class: "choices" }, kept("language", say("language"), LANGUAGES), kept("theme", say("theme"), THEMES)), menu);
  show(false);
}

/** Paper is light whatever the screen is; what the reader chose on the page stays. */
function printLight() {
  const root = document.documentElement;
  let before = null;
  addEventListener("beforeprint", () => { before ??= root.dataset.theme; root.dataset.theme = "light"; redrawCharts(); });
  addEventListener("afterprint", () => { root.dataset.theme = before ?? root.dataset.theme; before = null; redrawCharts(); });
}

printLight();
skip.addEventListener("click", (event) => { event.preventDefault(); main.focus(); }); // its address is no page
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(false));
addEventListener("hashchange", () => show(true));
draw();

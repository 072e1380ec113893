// The page: where its address leads, and its theme.

import { dropCharts, redrawCharts } from "./charts.js";
import { distributions } from "./distributions.js";
import { el, named } from "./dom.js";
import { errors } from "./errors.js";
import { hifp8 } from "./hifp8.js";
import { boxes, outliers, trends } from "./layers.js";
import { overflow } from "./overflow.js";
import { overview } from "./overview.js";
import { summary } from "./summary.js";
import { tensor, tensors } from "./tensors.js";

const data = JSON.parse(document.getElementById("data").textContent);
const PAGES = {
  summary: ["Summary", summary], overview: ["Overview", overview], errors: ["Errors", errors], distributions: ["Distributions", distributions], layers: ["Layers", boxes], outliers: ["Outliers", outliers],
  iterations: ["Iterations", trends], hifp8: ["HiFP8", hifp8], overflow: ["Overflow", overflow], tensors: ["Tensors", tensors],
};
const THEMES = { auto: "◐ as the system", light: "☀ light", dark: "☾ dark" };
const STORED = "capd-report-theme";

const main = document.querySelector("main");
const menu = el("nav", { class: "pages", "aria-label": "Pages of the report" }, Object.entries(PAGES).map(([name, [text]]) => el("a", { href: `#${name}` }, text)));

function show(focus) {
  const [name, place] = location.hash.slice(1).split("/");
  const known = name === "tensor" || name in PAGES;
  const single = data.series.length === 1 && data.series_total === 1;
  const current = known ? name : single ? "tensor" : "summary";
  dropCharts();
  const nodes = current === "tensor" ? tensor(data, Number(place ?? 0)) : PAGES[current][1](data);
  main.replaceChildren(...[nodes].flat(Infinity).filter(Boolean));
  const marked = current === "tensor" ? "tensors" : current;
  menu.querySelectorAll("a").forEach((link) => (link.hash === `#${marked}` ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current")));
  if (focus) { main.focus({ preventScroll: true }); scrollTo(0, 0); }
}

function stored(theme) {
  try {
    if (theme) localStorage.setItem(STORED, theme);
    return localStorage.getItem(STORED);
  } catch { // a browser that keeps nothing for local files
    return theme;
  }
}

function themeSwitch() {
  const set = (theme) => { document.documentElement.dataset.theme = theme; };
  const first = Object.hasOwn(THEMES, stored()) ? stored() : "auto";
  const node = el("select", { "aria-label": "theme", change: () => { const theme = Object.keys(THEMES)[node.selectedIndex]; stored(theme); set(theme); show(false); } }, Object.values(THEMES).map((text) => el("option", {}, text)));
  node.selectedIndex = Object.keys(THEMES).indexOf(first);
  set(first);
  return el("label", { class: "theme" }, "theme ", node);
}

/** Paper is light whatever the screen is; what the reader chose on the page stays. */
function printLight() {
  const root = document.documentElement;
  let before = null;
  addEventListener("beforeprint", () => { before ??= root.dataset.theme; root.dataset.theme = "light"; redrawCharts(); });
  addEventListener("afterprint", () => { root.dataset.theme = before ?? root.dataset.theme; before = null; redrawCharts(); });
}

printLight();
document.querySelector("header").append(el("h1", {}, el("span", {}, "capd report "), named(data.title)), themeSwitch(), menu);
document.querySelector("a.skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); }); // its address is no page
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(false));
addEventListener("hashchange", () => show(true));
show(false);

// Lines and steps by uPlot, with a legend that the keyboard reaches, and sizes and colours that follow the page.

import { el, svg } from "../dom.js";
import { stroke, themed } from "./colours.js";
import { say } from "../language.js";
import { num } from "../numbers.js";

/* global uPlot */
const HEIGHT = 300;
const MARKED = 40; // up to so many points have a marker each
const FONT = "12px system-ui, sans-serif";
const TICK = 10;
const COMPARED = 68; // the room of an upright axis, so that charts above each other begin at one place
const live = new Set();

/** Forget the charts of the page that is left. */
export function dropCharts() {
  live.forEach(({ drop }) => drop());
  live.clear();
}

/** Draw those of the page again, in the colours of the theme that is now. */
export function redrawCharts() {
  live.forEach(({ redraw }) => redraw());
}

function swatch(look) {
  return svg("svg", { class: "swatch", width: 26, height: 10, "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: look.colour, "stroke-width": 2.5, "stroke-dasharray": look.dash.join(" ") || null }));
}

function scaleRange(axis) {
  if (axis.range) return axis.range;
  if (axis.log || axis.signed || !axis.zero) return undefined;
  return (plot, low, high) => [0, high > 0 ? high * 1.05 : 1];
}

/** Grid lines of a logarithmic axis: over many decades only their powers, as nine in each would be a grey band. */
function decades(plot, marks) {
  return marks.length > 30 ? marks.map((mark) => (mark === 0 || /^-?1e/.test(mark.toExponential()) ? mark : null)) : marks;
}

/** The room that the numbers of an upright axis need, so that its title stands beside them. More room may ask for other numbers. */
function room(plot, marks, place, cycle) {
  const axis = plot.axes[place];
  plot.ctx.font = axis.font[0];
  const widest = Math.max(0, ...(marks ?? []).map((mark) => plot.ctx.measureText(mark).width));
  return Math.max(axis.least, cycle > 1 ? axis._size : 0, Math.ceil(TICK + axis.gap + widest / devicePixelRatio));
}

/** linear: 1, logarithmic: 3, logarithmic on either side of zero: 4, as uPlot numbers them. */
function distribution(axis) {
  return axis.signed ? { distr: 4, asinh: axis.signed } : { distr: axis.log ? 3 : 1 };
}

function axisOf(axis, scale, side, least = 0) {
  const [colour, faint] = ["text", "grid"].map((name) => () => themed(name));
  return {
    scale, side, label: axis.label, labelSize: 22, size: side % 2 ? room : 44, least, font: FONT, labelFont: FONT, stroke: colour,
    grid: { show: scale !== "right", stroke: faint, width: 1, ...(axis.log || axis.signed ? { filter: decades } : {}) }, ticks: { stroke: faint, width: 1 },
    values: (plot, marks) => marks.map((mark) => (mark === null ? "" : (axis.show ?? num)(mark))),
    ...(axis.whole ? { incrs: [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536, 1e6, 1e7, 1e8] } : {}),
    ...(axis.log || axis.signed ? { space: 34 } : {}),
  };
}

function seriesOf(line, number, points) {
  const look = stroke(line.look ?? number);
  const steps = line.steps ? { paths: uPlot.paths.stepped({ align: 1 }) } : {};
  const stems = line.stems ? { paths: uPlot.paths.bars({ size: [0.8, 8] }) } : {};
  return {
    label: line.label, scale: line.right ? "right" : "y", stroke: look.colour, dash: look.dash, width: line.right ? 2.5 : 1.75,
    fill: line.filled || line.stems ? `${look.colour}${line.stems ? "99" : "2b"}` : undefined, show: line.shown ?? true,
    points: { show: !line.steps && !line.stems && points <= MARKED, size: 6, fill: look.colour }, spanGaps: false, ...steps, ...stems,
  };
}

/**
 * chart({ label, x: { label, values, show?, whole?, range? }, y: { label, log?, signed?, zero?, show? }, right?, lines }).
 * x.range: of the axis, for charts above each other. signed: the magnitude up to which a logarithmic axis of both signs is linear.
 * marks: [{ at, title, kind }]? of the x axis; kind is a class. lines: [{ label, values, steps?, stems?, filled?, right?, shown?, look? }], values null where there is none.
 */
export function chart({ label, x, y, right, lines, marks = [], height = HEIGHT }) {
  const holder = el("div", { class: "plot", role: "img", "aria-label": say("{0}; the numbers stand in the table below", label) });
  const readout = el("p", { class: "readout", "aria-hidden": "true" }, " ");
  let plot = null;

  function read(shown) {
    const at = shown.cursor.idx;
    if (at === null || at === undefined) { readout.textContent = " "; return; }
    const parts = lines.map((line, place) => [line, shown.data[place + 1][at], shown.series[place + 1].show]).filter(([, value, on]) => on && value !== null && value !== undefined);
    readout.textContent = `${(x.show ?? num)(x.values[at])}: ${parts.slice(0, 8).map(([line, value]) => `${line.label} ${num(value)}`).join(" · ")}`;
  }

  const marked = marks.map((mark) => el("i", { class: `mark ${mark.kind}`, title: mark.title }));

  function place(shown) {
    marked.forEach((node, number) => {
      const left = shown.valToPos(marks[number].at, "x");
      node.hidden = !(left >= 0 && left <= shown.over.clientWidth);
      node.style.left = `${left}px`;
    });
  }

  function draw(width) {
    const axes = [axisOf(x, "x", 2), axisOf(y, "y", 3, x.range ? COMPARED : 0), ...(right ? [axisOf(right, "right", 1)] : [])];
    const scales = { x: { time: false, range: x.range }, y: { ...distribution(y), range: scaleRange(y) }, ...(right ? { right: { range: scaleRange(right) } } : {}) };
    plot = new uPlot({
      width, height, scales, axes, legend: { show: false }, cursor: { y: false, points: { size: 7 } }, hooks: { setCursor: [read], draw: [place] },
      series: [{}, ...lines.map((line, number) => seriesOf(line, number, x.values.length))],
    }, [x.values, ...lines.map((line) => line.values)], holder);
    plot.over.append(...marked);
  }

  const watching = new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width < 1) return;
    if (plot === null) draw(width);
    else if (plot.width !== width) plot.setSize({ width, height });
  });
  watching.observe(holder);
  live.add({ drop: () => { watching.disconnect(); plot?.destroy(); }, redraw: () => plot?.redraw(false, true) });
  return el("div", { class: "chart" }, legend(lines, (number, on) => plot?.setSeries(number + 1, { show: on })), holder, readout);
}

function legend(lines, toggled) {
  return el("div", { class: "legend", role: "group", "aria-label": say("Lines, shown or not") }, lines.map((line, number) => {
    const button = el("button", { type: "button", "aria-pressed": String(line.shown ?? true), click: () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      toggled(number, on);
    } }, swatch(stroke(line.look ?? number)), el("bdi", {}, line.label));
    return button;
  }));
}

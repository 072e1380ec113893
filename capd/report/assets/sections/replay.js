// The replayed products: each recipe's error of Y, dX and dW, over the layers and by module (docs/replay.md).

import { chart } from "../charts/lines.js";
import { chosen, distinct, options } from "../controls.js";
import { named, nothing, section } from "../dom.js";
import { say, word } from "../language.js";
import { count, drawable, layerText, num } from "../numbers.js";
import { figure, table } from "../tables.js";

const PRODUCTS = { y: "Y = X Wᵀ", dx: "dX = dY W", dw: "dW = dYᵀ X" };
const OPERANDS = { x: "X", w: "W", g: "dY", cross: word("both"), mask: word("mask") };
const METRICS = { sqnr_db: word("SQNR in dB"), zeta: "ζ = ‖Ĝ − G‖ / ‖G‖", alignment: word("alignment ⟨Ĝ, G⟩ / ‖G‖²"), cosine: word("cosine") };

/** The rows of a group: one for each recipe and product. */
function rowsOf(group) {
  return Object.entries(group.recipes).flatMap(([recipe, products]) => Object.entries(products).map(([product, numbers]) => ({ ...group, recipe, product, ...numbers })));
}

function columns(rows, places) {
  const field = (text, value, show = num) => ({ text, number: show !== named && show !== String, value, show });
  const found = [...places, field(say("recipe"), (row) => row.recipe, named), field(say("product"), (row) => PRODUCTS[row.product], String),
    ...Object.entries(METRICS).map(([name, text]) => field(say(text), (row) => row[name])), field(say("worst row in dB"), (row) => row.worst?.sqnr_db)];
  if (rows.some((row) => row.draws)) found.push(field(say("mean of draws in dB"), (row) => row.draws?.sqnr_db), field(say("gain in dB"), (row) => row.draws?.gain_db), field(say("gain if unbiased"), (row) => row.draws?.ideal_db));
  if (rows.some((row) => row.blame)) found.push(...Object.entries(OPERANDS).map(([name, text]) => field(say("share of {0}", say(text)), (row) => row.blame?.[name]?.inner)));
  return found;
}

function captured(rows) {
  return rows.filter((row) => row.captured?.calls).map((row) => say("{0} of {1}: {2} of {3} captured values equal in every bit, the others at most {4} steps apart.", PRODUCTS[row.product], row.recipe, count(row.captured.equal), count(row.captured.values), count(row.captured.max_ulp)));
}

export function replay(data) {
  const { replay: found } = data;
  const title = say("Replay");
  const whole = rowsOf({ recipes: found.all });
  if (!whole.length) return section(title, null, nothing(say("No product was replayed.")));
  const notes = [say("Products of the captured operands, computed again under each recipe, against the products themselves."), say(found.operands === "logical" ? word("{0} of {1} calls were replayed, with operands put together from all ranks.") : word("{0} of {1} calls were replayed, with the operands of each rank."), count(found.calls.replayed), count(found.calls.found)), ...captured(whole)];
  const products = { name: "product", label: say("product"), options: found.products.map((value) => ({ value, text: PRODUCTS[value] })) };
  const metric = { name: "metric", label: say("metric"), options: Object.entries(METRICS).map(([value, text]) => ({ value, text: say(text) })) };
  const types = distinct(found.layers.map((one) => one.quant_type));
  const type = { name: "type", label: say("quant type"), options: options(types) };
  return [section(title, notes.join(" "), table(say("Products by recipe"), columns(whole, []), whole)),
    section(say("Products over layers"), null, chosen([products, metric, type], (choice) => layers(found, choice))),
    found.groups.length ? section(say("Products by module"), null, modules(found)) : null];
}

function layers(found, { product, metric, type }) {
  const own = found.layers.filter((one) => one.quant_type === type);
  const label = say("{0} of {1}", say(METRICS[metric]), PRODUCTS[product]);
  const lines = found.recipes.map(({ name }) => ({ label: name, all: own.map((one) => one.recipes[name]?.[product]?.[metric] ?? null) }));
  const rows = own.map((_, place) => place);
  const heads = [{ text: say("layer"), number: true, value: (row) => own[row].layer, show: layerText }, ...lines.map((line) => ({ text: line.label, number: true, value: (row) => line.all[row], show: num }))];
  return figure(label, null, chart({ label, x: { label: say("layer"), values: rows, whole: true, show: (place) => (Number.isInteger(place) && own[place] ? layerText(own[place].layer) : "") }, y: { label: say(METRICS[metric]) }, lines: lines.map((line) => ({ label: line.label, values: line.all.map((value) => drawable(value)) })) }), () => table(label, heads, rows));
}

function modules(found) {
  const rows = found.groups.flatMap(rowsOf);
  const places = [{ text: say("layer"), number: true, value: (row) => row.layer, show: layerText }, { text: say("module"), value: (row) => row.module, show: named }];
  return table(say("Products by module"), columns(rows, places), rows);
}

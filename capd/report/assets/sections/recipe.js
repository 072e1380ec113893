// The recipe of an emulation in words: which products compute in which format (docs/emulation.md).

import { say, word } from "../language.js";

const PARTS = { linear: word("linears"), qk: word("attention's scores"), pv: word("attention's output") };
const BLOCKLESS = word("one scale for the tensor");

/** The recipe of a record's attribute `emulation`; "" says none of it. What is no recipe stays as it is. */
export function recipeText(emulation) {
  if (!emulation) return say("not said");
  if (emulation === "none") return say("none: the job's own values");
  const recipe = parsed(emulation);
  if (recipe === null) return emulation;
  const alike = new Map();
  for (const [part, text] of Object.entries(PARTS)) {
    const words = recipe[part] && recipe[part] !== "none" ? specText(recipe[part]) : say("not emulated");
    alike.set(words, [...(alike.get(words) ?? []), say(text)]);
  }
  const products = [...alike].map(([words, parts]) => say("{0}: {1}", parts.join(say(", ")), words));
  return [...products, recipe.level === "exact" ? say("attention is unfused and exact") : null, globs(word("only the modules {0}"), recipe.include), globs(word("without the modules {0}"), recipe.exclude)].filter(Boolean).join(say("; "));
}

function parsed(text) {
  try {
    const found = JSON.parse(text);
    return found !== null && typeof found === "object" && Object.keys(PARTS).some((part) => part in found) ? found : null;
  } catch {
    return null;
  }
}

function globs(text, names) {
  return Array.isArray(names) && names.length ? say(text, names.join(say(", "))) : null;
}

function specText(spec) {
  if (typeof spec === "string") return spec;
  const backward = spec.backward === "none" ? say("gradients as they are") : spec.backward && spec.backward !== "same" ? say("in the backward {0}", formatText(spec.backward)) : null;
  return [formatText(spec), spec.weight ? say("weights in {0}", formatText(spec.weight)) : null, backward, spec.gradient_rounding ? say("dY rounded by {0}", spec.gradient_rounding) : null].filter(Boolean).join(say(", "));
}

function formatText(spec) {
  if (typeof spec === "string") return spec;
  const block = Array.isArray(spec.block) ? say("blocks of {0}", spec.block.join(" × ")) : spec.block ? say("blocks of {0}", spec.block) : spec.format === "fp8" ? say(BLOCKLESS) : null;
  const options = [spec.elem, block, spec.scale_mode ? say("scale {0}", spec.scale_mode) : null, spec.rounding ? say("rounding {0}", spec.rounding) : null, spec.overflow ? say("overflow {0}", spec.overflow) : null, spec.preset ?? null].filter(Boolean);
  return options.length ? say("{0} ({1})", spec.format, options.join(say(", "))) : String(spec.format);
}

// The statements of the verdict as sentences. A sentence is one string for each language, so that each has its own order of words.

import { say, word } from "./language.js";
import { count } from "./numbers.js";

const CLOSE_BITS = 0.5;

export const ROLES = { activations: word("activations"), weights: word("weights"), gradients: word("gradients") };

const REASONS = {
  saturation: word("; {0} % of the values are beyond its largest one"),
  flush: word("; {0} % of the values are below its smallest normal one"),
  underflow: word("; {0} % of the values become zero"),
};

/** Three digits. */
export const short = (value) => String(Number(value.toPrecision(3)));

const role = (name) => say(ROLES[name]);
const down = (decibels) => (Math.floor(decibels * 10) / 10).toFixed(1);
const up = (decibels) => (Math.ceil(decibels * 10) / 10).toFixed(1);
const listed = (words, joined) => (words.length === 1 ? words[0] : say(joined, words.slice(0, -1).join(say(", ")), words[words.length - 1]));
const all = (words) => listed(words, word("{0} and {1}"));
const any = (words) => listed(words, word("{0} or {1}"));
const subject = (said) => (said.scaled ? said.format : say("{0} without a scale", said.format));
const because = (said) => (said.reason === null ? "" : say(REASONS[said.reason], short(said.reason_percent)));

function keeps(said) {
  const [format, roles, bits] = [said.format, all(said.roles.map(role)), said.bits];
  if (said.sqnr_db === "Infinity") return say("{0} keeps every value of {1} exactly, at {2} bits a value.", format, roles, bits);
  const [kept, behind] = [down(said.sqnr_db), up(said.behind_db ?? 0)];
  if (said.alone) return say("{0} keeps {1} dB or more on {2}, at {3} bits a value; no other format was measured.", format, kept, roles, bits);
  if (said.behind_db === null) return say("{0} keeps {1} dB or more on {2}, at {3} bits a value.", format, kept, roles, bits);
  if (!said.behind_db) {
    const best = said.lossy ? word("{0} keeps {1} dB or more on {2}, and no format without lost values is better there, at {3} bits a value.") : word("{0} keeps {1} dB or more on {2}, and no format is better there, at {3} bits a value.");
    return say(best, format, kept, roles, bits);
  }
  const near = said.lossy ? word("{0} keeps {1} dB or more on {2}, within {3} dB of the best without lost values, at {4} bits a value.") : word("{0} keeps {1} dB or more on {2}, within {3} dB of the best, at {4} bits a value.");
  return say(near, format, kept, roles, behind, bits);
}

function losesDecibels(said) {
  const bits = said.against_bits > said.bits + CLOSE_BITS ? say(", at {0} bits instead of {1}", said.bits, said.against_bits) : "";
  return say("{0} loses {1} dB on {2} against {3}{4}{5}.", subject(said), said.loss_db.toFixed(1), role(said.role), said.against, bits, because(said));
}

const RULES = {
  keeps,
  partial: () => say("No format took every tensor without losing a value, so none is the best of all."),
  all_lose: (said) => (said.alone ? say("{0} is no choice as it is: it loses values.", said.format) : say("Every format loses values; {0} loses the fewest, {1}.", said.format, count(said.lost))),
  loses_values: (said) => say("{0} loses {1} of {2} values on {3}: they become Inf or NaN.", subject(said), count(said.lost), count(said.count), role(said.role)),
  loses_db: losesDecibels,
  all_close: (said) => (said.behind_db ? say("No format is more than {0} dB behind the best on any role.", up(said.behind_db)) : say("No format is behind another on any role.")),
  fewer: (said) => say("{0} could not measure every tensor, so no comparison is made there.", all(said.formats)),
  uneven: (said) => say("{0} keeps {1} dB on {2} and {3} dB on {4}{5}.", subject(said), said.best_db.toFixed(1), role(said.best_role), said.sqnr_db.toFixed(1), role(said.role), because(said)),
  missing: (said) => say("No {0} were measured, so nothing is said about them.", any(said.roles.map(role))),
};

/** A statement of the document's verdict as a sentence; in English the one of `capd compare`. */
export function sentence(said) {
  return RULES[said.rule](said);
}

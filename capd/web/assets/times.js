// Spans of time in words.

import { say } from "../report/language.js";

/** Some seconds in the largest unit that tells them apart. */
export function duration(seconds) {
  if (typeof seconds !== "number") return "–";
  if (seconds < 120) return say("{0} s", Math.round(seconds));
  return seconds < 7200 ? say("{0} min", Math.round(seconds / 60)) : say("{0} h", Math.round(seconds / 3600));
}

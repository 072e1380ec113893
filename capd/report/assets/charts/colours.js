// Colours: scales even to the eye and to colour-blind ones, and a palette for lines that never stands without dashes.

const VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const PALETTE = 7;

export const SCALES = { viridis: VIRIDIS, cividis: CIVIDIS };

/** The colour at `part` (0 to 1) of a scale, as [red, green, blue]. */
export function shade(scale, part) {
  const at = Math.min(1, Math.max(0, part)) * (scale.length - 1);
  const low = Math.min(scale.length - 2, Math.floor(at));
  const [from, to] = [scale[low], scale[low + 1]].map(channels);
  return from.map((value, place) => Math.round(value + (to[place] - value) * (at - low)));
}

function channels(hex) {
  return [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
}

/** Black or white, whichever is read better on it (relative luminance, WCAG 2). */
export function ink(colour) {
  const [red, green, blue] = colour.map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff";
}

/** A colour of the theme by its name in the style sheet. */
export function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Colour and dashes of the number-th line: the first 28 all differ, neighbours in both. */
export function stroke(number) {
  return { colour: themed(`line${number % PALETTE}`), dash: DASHES[number % DASHES.length] };
}

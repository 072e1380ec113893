// The language of the page. English is in the code; words.js has the Chinese for each of its strings.

import { CHINESE } from "./words.js";

export const LANGUAGES = { en: "English", zh: "中文" };
const TAGS = { en: "en", zh: "zh-Hans" };
let spoken = "en";

/** The language that the address asks for with `?lang=`, else that of the browser, if the page has it. */
export function systemLanguage() {
  const asked = new URLSearchParams(location.search).get("lang") ?? "";
  if (Object.hasOwn(LANGUAGES, asked)) return asked;
  return navigator.language.startsWith("zh") ? "zh" : "en";
}

/** Use a language for all that is drawn from now on. */
export function speak(language) {
  spoken = language;
  document.documentElement.lang = TAGS[language];
}

/** Marks a string that `say` is given later, so that the test of words.js finds it. */
export function word(text) {
  return text;
}

/** A string of the page in its language; {0}, {1} … are the values. What words.js does not have stays as it is. */
export function say(text, ...values) {
  const found = spoken === "zh" && Object.hasOwn(CHINESE, text) ? CHINESE[text] : text;
  return String(found).replace(/\{(\d)\}/g, (_, place) => values[place]);
}

/** A phrase of the document in the page's language: a finished text, or a template and its values. */
export function told(phrase) {
  return typeof phrase === "string" ? phrase : say(phrase[0], ...phrase.slice(1).map(told));
}

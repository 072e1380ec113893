// The states of runs, ranks and the daemon, as the server names them, in the page's language.

import { say, word } from "../report/language.js";

const STATES = {
  live: word("live"), open: word("open"), unsealed: word("unsealed"), sealed: word("sealed"), removing: word("removing"), unreadable: word("unreadable"),
  lost: word("connection lost"), ended: word("ended"), died: word("died"),
  gone: word("does not answer"), none: word("no daemon"), elsewhere: word("writes other runs"),
};

/** A state in words. */
export function stateText(state) {
  return say(STATES[state] ?? state);
}

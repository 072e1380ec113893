// What the page asks of its server: answers as JSON, and the one stream of the newest state.

const QUIET_MS = 5000;

/** An address below the page, with these parameters; a list repeats its name. */
export function address(path, parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== null && one !== undefined && one !== "") query.append(name, one);
  }
  return `${path}?${query}`;
}

/** The answer to a question, or an error with the server's own words. */
export function ask(name, parameters = {}, signal = undefined) {
  return answered(name, parameters, { signal });
}

/** Tells the server to do something. Its answer is as that to a question. */
export function tell(name, parameters, signal) {
  return answered(name, parameters, { method: "POST", signal });
}

async function answered(name, parameters, how) {
  const answer = await fetch(address(`api/${name}`, parameters), how);
  const text = await answer.text();
  let found = null;
  try { found = JSON.parse(text); } catch { /* a refusal is plain text */ }
  if (!answer.ok || found === null) throw new Error(found?.problem ?? text.trim());
  return found;
}

/** Asks as `ask`, and leaves out an answer that a later question has overtaken: it is undefined then. */
export function asker(name, signal) {
  let newest = 0;
  return async (parameters) => {
    newest += 1;
    const mine = newest;
    try {
      const found = await ask(name, parameters, signal);
      return mine === newest ? found : undefined;
    } catch (error) {
      if (mine === newest && !signal.aborted) throw error;
      return undefined;
    }
  };
}

/**
 * Calls `told` with each new state and `lost` when the server is gone. The stream is only open while the page is seen: a
 * browser has six connections for all pages of one server.
 */
export function follow(told, lost) {
  let source = null;
  let quiet = null;
  function open() {
    if (source !== null || document.hidden) return;
    source = new EventSource("events");
    source.onmessage = (event) => { clearTimeout(quiet); quiet = null; told(JSON.parse(event.data)); };
    source.onerror = () => {
      quiet ??= setTimeout(lost, QUIET_MS);
      if (source?.readyState === EventSource.CLOSED) { close(); setTimeout(open, QUIET_MS); }
    };
  }
  function close() { source?.close(); source = null; }
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  open();
}

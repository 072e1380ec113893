// The addresses of the page: its name, then the runs and the tensor, each escaped.

/** The address of a page: of one run or of several, and of a tensor in them. */
export function placeOf(page, runs = [], path = "") {
  const parts = [page, [runs].flat().map(encodeURIComponent).join("+")];
  return `#${[...parts, ...(path ? [encodeURIComponent(path)] : [])].join("/").replace(/\/$/, "")}`;
}

/** The page, the runs and the tensor that an address names. What cannot be read is left out. */
export function placeIn(hash) {
  const [page, runs, path] = hash.slice(1).split("/");
  return { page: page || "runs", runs: (runs ?? "").split("+").map(plain).filter(Boolean), path: plain(path ?? "") };
}

function plain(text) {
  try { return decodeURIComponent(text); } catch { return ""; }
}

// Lines of several sources over one axis: where a source has no point its line goes on, where it has a gap it breaks.

/**
 * sources: [{ iteration, gap_after }], read: (source, place) → value. A value of null is a gap of its own.
 * Returns the axis and the values of each source on it.
 */
export function joined(sources, read) {
  const points = sources.map((source) => {
    const found = new Map();
    const after = new Set(source.gap_after);
    source.iteration.forEach((iteration, place) => {
      found.set(iteration, read(source, place));
      if (after.has(place)) found.set((iteration + source.iteration[place + 1]) / 2, null);
    });
    return found;
  });
  const axis = [...new Set(points.flatMap((found) => [...found.keys()]))].sort((one, other) => one - other);
  return { axis, values: points.map((found) => axis.map((at) => found.get(at))) };
}

// What tells one alert from another.

export function alertId(one) {
  return [one.run, one.time_ns, one.rule, one.node, one.rank, one.series].join(" ");
}

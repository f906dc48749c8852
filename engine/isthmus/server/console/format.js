// Numbers as people read them.

const whole = new Intl.NumberFormat("en");

export const count = (value) => whole.format(Math.round(value));

export function short(value) {
  if (value < 1e4) return count(value);
  return value < 1e6 ? `${(value / 1e3).toFixed(1)}k` : `${(value / 1e6).toFixed(1)}M`;
}

export const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.1 ? 1 : 0)} ms`;
  return value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : duration(value);
}

export function duration(value) {
  const s = Math.floor(value);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return s < 86400 ? `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min` : `${Math.floor(s / 86400)} d`;
}

export function bytes(value) {
  const gib = value / 2 ** 30;
  return gib >= 1 ? `${gib.toFixed(2)} GiB` : `${(value / 2 ** 20).toFixed(1)} MiB`;
}

// Formats numbers and times.

const UNITS = [
  [86400, "d"],
  [3600, "h"],
  [60, "min"],
  [1, "s"],
];
const BYTES = ["bytes", "KiB", "MiB", "GiB", "TiB"];
const integers = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const dates = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const times = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const NONE = "–";

// Formats a duration in at most two units, like hvdtrain jobs: 3 h 5 min.
export function span(seconds) {
  let left = Math.max(0, Math.round(seconds));
  const parts = [];
  for (const [size, unit] of UNITS) {
    const count = Math.floor(left / size);
    left -= count * size;
    if (count || parts.length) parts.push(`${count} ${unit}`);
    if (parts.length === 2) break;
  }
  return parts.filter((part) => !part.startsWith("0 ")).join(" ") || "0 s";
}

export function ago(seconds) {
  if (seconds < 1) return "now";
  return `${span(seconds).split(" ").slice(0, 2).join(" ")} ago`;
}

export const count = (value) => (isNumber(value) ? integers.format(value) : NONE);

export const counted = (value, thing) => `${count(value)} ${thing}${value === 1 ? "" : "s"}`;

// Formats a number with four significant digits.
export function number(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1000) return size < 1e9 ? integers.format(value) : value.toExponential(2);
  if (size !== 0 && size < 0.001) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export function seconds(value) {
  if (!isNumber(value)) return NONE;
  if (value >= 1 || value === 0) return `${number(value)} s`;
  return value >= 0.001
    ? `${Number((value * 1000).toPrecision(3))} ms`
    : `${Number((value * 1e6).toPrecision(3))} µs`;
}

export function bytes(value) {
  let unit = 0;
  for (; value >= 1024 && unit < BYTES.length - 1; unit += 1) value /= 1024;
  return `${unit ? value.toPrecision(3) : value} ${BYTES[unit]}`;
}

export const percent = (share) =>
  `${share >= 0.995 || share < 0.005 ? (share * 100).toFixed(1) : Math.round(share * 100)} %`;

export const date = (time_s) => (time_s ? dates.format(time_s * 1000) : NONE);

export const clock = (time_s) => times.format(time_s * 1000);

// Returns a line as a terminal would show it: only the last state of a progress bar, and no colours.
export function plain(text) {
  const words = text
    .replace(/\x1b\[[0-?]*[ -/]*[@-~]/g, "")
    .replace(/\x1b\][^\x07\x1b]*(\x07|\x1b\\)/g, "")
    .replace(/\r+$/, "");
  return words.slice(words.lastIndexOf("\r") + 1).replace(/[\x00-\x08\x0b-\x1f\x7f]/g, "");
}

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

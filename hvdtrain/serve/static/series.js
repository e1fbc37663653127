// The metrics of a job, as columns for charts.

// The minimum number of seconds between the two rows of a rate. A longer time reduces noise.
const LEAST_S = 4;

export class Series {
  constructor(columns) {
    this.rows = [];
    const length = columns.time?.length ?? 0;
    for (let at = 0; at < length; at += 1) {
      this.add(Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[at]])));
    }
  }

  // Adds a row; returns false if it is not new.
  add(row) {
    const last = this.rows.at(-1);
    if (typeof row?.time !== "number" || (last && row.time <= last.time)) return false;
    this.rows.push({ ...row, rate: this.#rate(row) });
    return true;
  }

  // Returns the samples per second since a row that is old enough.
  #rate(row) {
    const before = this.rows.findLast((one) => row.time - one.time >= LEAST_S);
    // A restart resets the count of samples, and its first row may lack the count.
    if (typeof before?.samples !== "number") return null;
    if (!(row.samples > before.samples) || row.step <= before.step) return null;
    return (row.samples - before.samples) / (row.time - before.time);
  }

  get last() {
    return this.rows.at(-1) ?? {};
  }

  // Returns columns x and y over "step" or "time". Over steps, only the last run of a repeated step is
  // included. In y, null interrupts the curve, and undefined is a missing value.
  columns(over, name) {
    const xs = [];
    const ys = [];
    const begin = this.rows[0]?.time ?? 0;
    let before = null;
    for (const row of this.rows) {
      const x = over === "step" ? row.step : row.time - begin;
      if (typeof x !== "number") continue;
      while (xs.length && xs.at(-1) >= x) {
        xs.pop();
        ys.pop();
      }
      if (over === "time" && row.step < before?.step) {
        xs.push((x + before.time - begin) / 2);
        ys.push(null);
      }
      before = row;
      xs.push(x);
      ys.push(row[name] ?? undefined);
    }
    return [xs, ys];
  }
}

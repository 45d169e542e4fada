/* What moved in the last step, and what waited for it. */
const BIN = 4;

// Sums of transfers per column of BIN pixels; what takes longer is spread over its columns.
function binned(width) {
  const columns = Math.max(1, Math.ceil(width / BIN));
  const bins = ["in", "gradients", "written", "stall"].map(() => new Float64Array(columns));
  const [incoming, gradients, written, stall] = bins;
  const spread = (target, amount, from, to) => {
    const first = Math.min(columns - 1e-6, (axis.position(from) * width) / BIN);
    const last = Math.min(columns - 1e-6, Math.max(first, (axis.position(to) * width) / BIN));
    for (let column = Math.floor(first); column <= Math.floor(last); column++) {
      const share = last > first
        ? (Math.min(last, column + 1) - Math.max(first, column)) / (last - first) : 1;
      target[column] += amount * share;
    }
  };
  for (let i = 0; i < transfers.time.length; i++) {
    const from = transfers.time[i], to = from + transfers.submit[i];
    const fetch = transfers.kind[i] === FETCH;
    const target = fetch ? incoming : transfers.kind[i] === EVICTION ? written : gradients;
    if (transfers.bytes[i] > 0) spread(target, transfers.bytes[i], from, to);
    if (fetch) spread(stall, transfers.submit[i] + transfers.wait[i], from, to + transfers.wait[i]);
  }
  return { columns, incoming, gradients, written, stall };
}

function bars(frame, values, columns, base, scale, fill) {
  let path = "";
  for (let column = 0; column < columns; column++) {
    const x = frame.left + column * BIN;
    const wide = Math.min(BIN - 0.5, frame.left + frame.width - x);
    const [from, to] = [base(column), base(column) + scale * values[column]];
    if (Math.abs(to - from) > 0.05 && wide > 0) {
      path += `M${x} ${from.toFixed(1)}h${wide.toFixed(1)}V${to.toFixed(1)}h${(-wide).toFixed(1)}Z`;
    }
  }
  if (path) shape(frame.svg, "path", { d: path, fill: `var(--${fill})` });
}

function drawTransfers() {
  const frame = plot("transfers", innerWidth < 560 ? 140 : 150, { bottom: 6 });
  frames.transfers = frame;
  const { columns, incoming, gradients, written, stall } = binned(frame.width);
  const out = gradients.map((bytes, column) => bytes + written[column]);
  const most = Math.max(1, extent(incoming)[1], extent(out)[1]);
  const half = frame.height / 2, zero = frame.top + half;
  const scale = (half * 0.94) / most;
  phaseBands(frame, { labels: false });
  const [unit, unitName] = sizeUnit(most);
  const values = ticks(0, most / unit, 3);
  verticalAxis(frame, [...values.slice(1).map((value) => -value), ...values],
    (value) => zero - value * unit * scale, `${unitName} a column`);
  bars(frame, incoming, columns, () => zero, -scale, "param");
  bars(frame, gradients, columns, () => zero, scale, "grad");
  bars(frame, written, columns, (column) => zero + scale * gradients[column], scale, "eviction");
  shape(frame.svg, "line", { class: "frame", x1: frame.left, x2: frame.left + frame.width, y1: zero, y2: zero });

  const waits = plot("stalls", 56);
  frames.stalls = waits;
  const longest = Math.max(1e3, extent(stall)[1]);
  phaseBands(waits, { labels: false });
  const [timeScale, timeName] = timeUnit(longest);
  const base = waits.top + waits.height;
  verticalAxis(waits, ticks(0, longest / timeScale, 3),
    (value) => base - (value * timeScale / longest) * waits.height * 0.94, timeName);
  bars(waits, stall, columns, () => base, (-waits.height * 0.94) / longest, "demand");
  horizontalAxis(waits, axis.ticks(waits.width), axis.title());

  legend("transfers-legend", [
    ["up: parameters to the device", swatch("param")], ["down: gradients to the host", swatch("grad")],
    ...(extent(written)[1] > 0 ? [["down: parameters written on the device", swatch("eviction")]] : []),
    ["step held up by fetches", swatch("demand")],
  ]);
  const rows = byCause();
  table("transfers-table", ["transfer", "count", "bytes", "held up"], rows);
  byId("transfers-note").textContent = `A column is ${BIN} pixels wide. CPU copies hold the step up while they run.`;
  const spoken = rows.map(([name, count, bytes]) => `${name}: ${count}, ${bytes}`).join("; ");
  frame.container.setAttribute("aria-label", `Bytes moved over the step. ${spoken || "Nothing moved"}.`);
  waits.container.setAttribute("aria-label", "Time for which fetches held the step up, over the step.");
  for (const part of [frame, waits]) {
    addCursor(part);
    interact(part, stepFrames, (position) => describeColumn(position, part.width), eventStops);
  }
}

function byCause() {
  const sums = new Map();
  for (let i = 0; i < transfers.time.length; i++) {
    const sum = sums.get(transferName(i)) ?? { count: 0, bytes: 0, stall: 0 };
    sum.count += 1;
    sum.bytes += transfers.bytes[i];
    sum.stall += transfers.submit[i] + transfers.wait[i];
    sums.set(transferName(i), sum);
  }
  return [...sums].sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([name, { count, bytes, stall }]) => [name, number(count, 0), size(bytes), duration(stall)]);
}

function describeColumn(position, width) {
  const column = Math.floor((position * width) / BIN);
  const [from, to] = [(column * BIN) / width, ((column + 1) * BIN) / width];
  const found = [];
  let bytesIn = 0, bytesOut = 0, stall = 0;
  for (let i = 0; i < transfers.time.length; i++) {
    if (transfers.bytes[i] === 0) continue;
    const fetch = transfers.kind[i] === FETCH;
    const end = transfers.time[i] + transfers.submit[i] + (fetch ? transfers.wait[i] : 0);
    if (axis.position(end) < from || axis.position(transfers.time[i]) >= to) continue;
    found.push(i);
    if (fetch) bytesIn += transfers.bytes[i];
    else bytesOut += transfers.bytes[i];
    stall += fetch ? transfers.submit[i] + transfers.wait[i] : 0;
  }
  const ns = axis.time(position);
  const rows = [["to the device", size(bytesIn)], ["to the host", size(bytesOut)], ["held up", duration(stall)]];
  const notes = found.slice(0, 3).map((i) =>
    `chunk ${transfers.chunk[i]}, ${transferName(i)}, ${size(transfers.bytes[i])}: ${paramsOf(transfers.chunk[i], 2)}`);
  if (found.length > 3) notes.push(`and ${plural(found.length - 3, "more transfer")}`);
  return { title: placeName(ns), rows, notes: [...notes, eventAt(ns)] };
}

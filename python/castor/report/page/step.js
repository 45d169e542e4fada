/* The last step: memory, chunks, transfers. All plots share one horizontal axis and one cursor. */
const { samples, transfers, chunks, events } = data;
const FETCH = data.kinds.indexOf("fetch"), EVICTION = data.kinds.indexOf("eviction");
const DEMAND = data.causes.indexOf("demand"), PREFETCH = data.causes.indexOf("prefetch");
const STEP_END = data.causes.indexOf("step_end");
const fixedOnDevice = Object.values(data.payloads.device).reduce((sum, bytes) => sum + bytes, 0);
const CAUSES = {
  demand: "a module needed the chunk", prefetch: "ahead of its use", plan: "the plan left room for activations",
  pressure: "an allocation did not fit", step_end: "end of the step", backward: "a gradient was complete",
};
const EVICTED_FOR = {
  demand: "room for a chunk that a module needed", prefetch: "room for a chunk fetched ahead", plan: CAUSES.plan,
  pressure: CAUSES.pressure, step_end: "end of the step: every chunk leaves",
};
const CSS = getComputedStyle(document.documentElement);
const color = (name) => CSS.getPropertyValue(`--${name}`).trim();
let frames = {};
const stepFrames = () => Object.values(frames);

function eventName(i) {
  const kind = data.eventKinds[events.kind[i]];
  return kind === "grad ready" ? `gradients of chunk ${events.id[i]} complete`
    : `${kind}: ${data.modules[events.id[i]]}`;
}

function placeName(ns) {
  const phase = data.phases.find(([, from, to]) => ns >= from && ns < to) ?? data.phases[data.phases.length - 1];
  if (phase[0] === "optimizer") return "optimizer.step";
  return eventName(Math.max(0, lastNotAbove(events.time, ns)));
}

const eventAt = (ns) => `event ${number(Math.max(0, lastNotAbove(events.time, ns)), 0)} at ${duration(ns)}`;

const paramsOf = (chunk, most = 5) => {
  const names = chunks[chunk].params.map((i) => data.params[i]);
  const shown = names.slice(0, most).join(", ");
  return names.length > most ? `${shown} and ${names.length - most} more` : shown;
};

function phaseBands(frame, { labels }) {
  const group = shape(frame.svg, "g");
  for (const [phase, from, to] of data.phases) {
    const x = frame.left + axis.position(from) * frame.width;
    const right = frame.left + axis.position(to) * frame.width;
    if (right - x < 0.5) continue;
    shape(group, "rect", {
      x, y: frame.top, width: right - x, height: frame.height, fill: `var(--phase-${phase})`,
    });
    if (labels && right - x > 7 * phase.length + 8) {
      shape(group, "text", { class: "name", x: x + 6, y: frame.top + 14 }, phase);
    }
  }
}

// For each pixel column, the sample with the highest `total` of those in it.
function highestPerColumn(columns, total) {
  const picked = new Array(columns);
  const starts = samples.time.map((time) => axis.position(time) * columns);
  let k = 0;
  for (let column = 0; column < columns; column++) {
    while (k + 1 < starts.length && starts[k + 1] <= column) k++;
    let best = k;
    for (let j = k + 1; j < starts.length && starts[j] < column + 1; j++) {
      if (total(j) > total(best)) best = j;
    }
    picked[column] = best;
  }
  return picked;
}

// Stacked step areas: `layers` are [color, bytes of sample i], from the bottom up.
function stack(frame, layers, y) {
  const columns = Math.floor(frame.width);
  const total = (i) => layers.reduce((sum, [, bytes]) => sum + bytes(i), 0);
  const thin = samples.time.length > 2 * columns;
  const points = thin
    ? highestPerColumn(columns, total).map((i, column) => [column, i])
    : samples.time.map((time, i) => [axis.position(time) * frame.width, i]);
  let below = points.map(() => 0);
  for (const [name, bytes] of layers) {
    const above = points.map(([, i], k) => below[k] + bytes(i));
    if (above.some((value, k) => value > below[k])) {
      const edge = (values) => points.map(([x], k) => {
        const next = k + 1 < points.length ? points[k + 1][0] : frame.width;
        const level = y(values[k]).toFixed(1);
        return [`${(frame.left + x).toFixed(1)} ${level}`, `${(frame.left + next).toFixed(1)} ${level}`];
      });
      const top = edge(above).flat(), bottom = edge(below).reverse().flatMap(([from, to]) => [to, from]);
      shape(frame.svg, "path", { d: `M${top.join("L")}L${bottom.join("L")}Z`, fill: `var(--${name})` });
    }
    below = above;
  }
  return thin ? `${number(samples.time.length, 0)} samples drawn at ${number(columns, 0)} columns: each shows ` +
    "its highest total" : "";
}

function drawMemory() {
  const fixed = Object.entries(data.payloads.device).filter(([, bytes]) => bytes > 0);
  const layers = [
    ...fixed.map(([kind, bytes]) => [kind === "param" ? "param-fixed" : kind, () => bytes]),
    ["param", (i) => samples.slots[i]],
    ["nonmodel", (i) => samples.nonmodel[i]],
  ];
  const frame = plot("memory", innerWidth < 560 ? 220 : 260, { top: 22 });
  frames.memory = frame;
  const budgetShown = data.budget.device <= 2.5 * data.peak;
  const high = Math.max(data.peak, budgetShown ? data.budget.device : 0) * 1.07;
  const y = (bytes) => frame.top + frame.height - (bytes / high) * frame.height;
  phaseBands({ ...frame, top: 0, height: frame.top + frame.height }, { labels: true });
  const [unit, unitName] = sizeUnit(high);
  verticalAxis(frame, ticks(0, high / unit, 6), (value) => y(value * unit), unitName);
  const note = stack(frame, layers, y);
  horizontalAxis(frame, axis.ticks(frame.width), axis.title());
  const right = frame.left + frame.width;
  const label = `budget ${size(data.budget.device)}${budgetShown ? "" : ", above this scale"}`;
  const line = budgetShown ? y(data.budget.device) : frame.top + 2;
  if (budgetShown) {
    shape(frame.svg, "line", { class: "budget", x1: frame.left, x2: right, y1: line, y2: line });
  }
  shape(frame.svg, "text", {
    class: "name halo", x: right - 6, y: budgetShown ? line - 5 : line + 12, "text-anchor": "end",
  }, label);
  legend("memory-legend", [
    ...fixed.map(([kind]) => [
      `${data.payloadNames[kind]} placed here`, swatch(kind === "param" ? "param-fixed" : kind)]),
    ["parameters in slots", swatch("param")],
    ["non-model: activations, temporaries", swatch("nonmodel")],
    ...[...new Set(data.phases.map(([phase]) => phase))].map((phase) => [phase, swatch(`phase-${phase}`)]),
    ["budget", (icon) => shape(icon, "line", { class: "budget", x1: 0, x2: 14, y1: 6, y2: 6,
      stroke: "var(--ink)", "stroke-width": 1.5, "stroke-dasharray": "4 2" })],
  ]);
  byId("memory-note").textContent = [
    "Each stretch shows the most that was held in it", note,
    data.complete ? "" : "the step was longer than the recorder keeps: its end is missing",
  ].filter(Boolean).join("; ") + ".";
  frame.container.setAttribute("aria-label",
    `Device memory over ${plural(events.time.length, "event")} of step ${data.step}: peak ` +
    `${size(data.peak)} of a budget of ${size(data.budget.device)}.`);
  addCursor(frame);
  interact(frame, stepFrames, (position) => {
    const ns = axis.time(position);
    const i = Math.max(0, lastNotAbove(samples.time, ns));
    const total = fixedOnDevice + samples.slots[i] + samples.nonmodel[i];
    return {
      title: placeName(ns),
      rows: [
        ...fixed.map(([kind, bytes]) => [`${data.payloadNames[kind]} placed here`, size(bytes)]),
        ["parameters in slots", size(samples.slots[i])],
        ["non-model", size(samples.nonmodel[i])],
        ["together", size(total)],
        ["left of the budget", size(Math.max(0, data.budget.device - total))],
      ],
      notes: [eventAt(ns)],
    };
  }, eventStops);
}

const eventStops = () => events.time.map((time) => axis.position(time));

function drawTiers() {
  const place = byId("tiers");
  place.replaceChildren();
  for (const tier of ["host", "nvme"]) {
    const kinds = Object.entries(data.payloads[tier]).filter(([, bytes]) => bytes > 0);
    if (kinds.length === 0) continue;
    const name = tier === "host" ? "Host memory" : "NVMe";
    const heading = element(place, "h3", {}, name);
    element(place, "div", { class: "legend", id: `${tier}-legend` });
    element(place, "div", { class: "plot", id: tier, tabindex: "0", role: "img" });
    const frame = plot(tier, 84);
    frames[tier] = frame;
    const known = kinds.reduce((sum, [, bytes]) => sum + bytes, 0);
    // Payloads stay where they are in a step: what the ledger holds beyond them is on its way.
    const rest = (i) => (tier === "host" ? Math.max(0, samples.host[i] - known) : 0);
    const most = known + samples.time.reduce((high, _, i) => Math.max(high, rest(i)), 0);
    heading.textContent = `${name}: ${size(most)}` + (tier === "host" ? ` of ${size(data.budget.host)}` : "");
    const high = most * 1.1;
    const y = (bytes) => frame.top + frame.height - (bytes / high) * frame.height;
    const [unit, unitName] = sizeUnit(high);
    verticalAxis(frame, ticks(0, high / unit, 3), (value) => y(value * unit), unitName);
    stack(frame, [...kinds.map(([kind, bytes]) => [kind, () => bytes]), ["nonmodel", rest]], y);
    horizontalAxis(frame, axis.ticks(frame.width), axis.title());
    legend(`${tier}-legend`, kinds.map(([kind, bytes]) => [
      `${data.payloadNames[kind]} ${size(bytes)}`, swatch(kind)]));
    frame.container.setAttribute("aria-label", `${name} over the step: ` +
      kinds.map(([kind, bytes]) => `${data.payloadNames[kind]} ${size(bytes)}`).join(", ") + ".");
    addCursor(frame);
    interact(frame, stepFrames, (position) => ({
      title: name,
      rows: [...kinds.map(([kind, bytes]) => [data.payloadNames[kind], size(bytes)]),
        ["together", size(most)]],
      notes: [placeName(axis.time(position)), eventAt(axis.time(position))],
    }), eventStops);
  }
}

const MARKS = {
  demand: (x, y, r) => `M${x - r * 0.6} ${y - r}L${x + r} ${y}L${x - r * 0.6} ${y + r}Z`,
  prefetch: (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`,
  eviction: (x, y, r) => `M${x - 1} ${y - r}h2v${2 * r}h-2Z`,
};

function markOf(i) {
  if (transfers.kind[i] === EVICTION) return transfers.cause[i] === STEP_END ? null : "eviction";
  return transfers.kind[i] !== FETCH ? null : transfers.cause[i] === PREFETCH ? "prefetch" : "demand";
}

const markTime = (i) =>
  transfers.time[i] + (transfers.kind[i] === EVICTION ? transfers.submit[i] : 0);

function transferName(i) {
  const cause = data.causes[transfers.cause[i]];
  if (transfers.kind[i] === FETCH) {
    return cause === "prefetch" ? "prefetch" : `fetch: ${CAUSES[cause] ?? cause}`;
  }
  return transfers.kind[i] === EVICTION ? `eviction: ${EVICTED_FOR[cause]}` : "gradient to the host";
}

function drawResidency() {
  const count = chunks.length;
  const row = Math.min(16, Math.max(480 / count, Math.min(1.5, 720 / count)));
  const frame = plot("residency", Math.max(24, Math.ceil(count * row)));
  frames.residency = frame;
  const { container, svg, left, top, width, height } = frame;
  const canvas = element(null, "canvas", { "aria-hidden": "true" });
  container.prepend(canvas);
  const ratio = window.devicePixelRatio || 1;
  Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
  Object.assign(canvas.style, { left: `${left}px`, top: `${top}px`, width: `${width}px`, height: `${height}px` });
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  for (const [phase, from, to] of data.phases) {
    context.fillStyle = color(`phase-${phase}`);
    const x = axis.position(from) * width;
    context.fillRect(x, 0, axis.position(to) * width - x, height);
  }
  const gap = row >= 5 ? 1.5 : 0;
  data.residency.forEach((times, chunk) => {
    context.fillStyle = color(chunks[chunk].onDevice ? "resident-fixed" : "resident");
    for (let k = 0; k < times.length; k += 2) {
      const x = axis.position(times[k]) * width;
      const wide = Math.max(1, axis.position(times[k + 1]) * width - x);
      context.fillRect(x, chunk * row + gap / 2, wide, row - gap);
    }
  });
  const radius = Math.max(1.5, Math.min(5, row / 2 - 1));
  const marked = {};
  for (let i = 0; i < transfers.time.length; i++) {
    const mark = markOf(i);
    if (!mark) continue;
    marked[mark] = (marked[mark] ?? 0) + 1;
    context.fillStyle = color(mark);
    const x = Math.max(radius, Math.min(width - radius, axis.position(markTime(i)) * width));
    context.fill(new Path2D(MARKS[mark](x, (transfers.chunk[i] + 0.5) * row, radius)));
  }
  horizontalAxis(frame, axis.ticks(width), axis.title());
  const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((n) => n * row >= 13) ?? 2000;
  for (let chunk = 0; chunk < count; chunk += every) {
    shape(svg, "text", { x: left - 6, y: top + (chunk + 0.5) * row + 4, "text-anchor": "end" }, String(chunk));
  }
  if (height >= 40) {
    shape(svg, "text", {
      x: 0, y: 0, "text-anchor": "middle", transform: `translate(11 ${top + height / 2}) rotate(-90)`,
    }, "chunk");
  }
  const glyph = (mark) => (icon) =>
    shape(icon, "path", { d: MARKS[mark](7, 6, 4.5), fill: `var(--${mark})` });
  const entries = [["on the device", swatch("resident")]];
  if (chunks.some((chunk) => chunk.onDevice)) entries.push(["lives there", swatch("resident-fixed")]);
  entries.push(["demand fetch", glyph("demand")], ["prefetch", glyph("prefetch")],
    ["eviction to make room", glyph("eviction")]);
  legend("residency-legend", entries);
  const counts = ["demand", "prefetch", "eviction"].map((mark) => marked[mark] ?? 0);
  byId("residency-note").textContent = `${plural(count, "chunk")}, ${plural(counts[0], "demand fetch")}, ` +
    `${plural(counts[1], "prefetch")}, ${plural(counts[2], "eviction")}.` +
    (row < 1 ? " There are more chunks than rows of pixels: neighbours overlap." : "");
  container.setAttribute("aria-label",
    `Which of the ${plural(count, "chunk")} the device held when. ${byId("residency-note").textContent}`);
  addCursor(frame);
  interact(frame, stepFrames, (position, y) => describeChunk(position, Math.min(count - 1, Math.floor(y / row)), width),
    eventStops);
}

function describeChunk(position, chunk, width) {
  const ns = axis.time(position);
  const times = data.residency[chunk];
  let since = "not on the device";
  for (let k = 0; k < times.length; k += 2) {
    if (ns >= times[k] && ns <= times[k + 1]) {
      since = chunks[chunk].onDevice ? "always" : `${duration(times[k])} to ${duration(times[k + 1])}`;
    }
  }
  const rows = [
    ["slot", size(chunks[chunk].bytes)],
    ["parameters", `${size(chunks[chunk].used)} ${chunks[chunk].dtype}`],
    ["on the device", since],
  ];
  for (let i = 0; i < transfers.time.length; i++) {
    const near = Math.abs(axis.position(markTime(i)) - position) * width <= 6;
    if (near && transfers.chunk[i] === chunk && markOf(i)) {
      rows.push([transferName(i), size(transfers.bytes[i])]);
      rows.push(["held the step up for", duration(transfers.submit[i] + transfers.wait[i])]);
    }
  }
  const trained = chunks[chunk].trainable ? "" : " (frozen)";
  return { title: `chunk ${chunk}${trained}`, rows, notes: [paramsOf(chunk), `${placeName(ns)}; ${eventAt(ns)}`] };
}

/* Loss and speed over the steps of the run. */
const history_ = data.history;

// Where there are more steps than pixels: the lowest and the highest of each column.
function thinned(values, columns) {
  const known = [];
  values.forEach((value, i) => { if (value !== null) known.push(i); });
  if (known.length <= 2 * columns) return known;
  const kept = [];
  for (let column = 0; column < columns; column++) {
    const part = known.slice(
      Math.floor((column * known.length) / columns), Math.floor(((column + 1) * known.length) / columns));
    let low = part[0], high = part[0];
    for (const i of part) {
      if (values[i] < values[low]) low = i;
      if (values[i] > values[high]) high = i;
    }
    kept.push(...(low === high ? [low] : [low, high].sort((a, b) => a - b)));
  }
  return kept;
}

// An exponential mean over about a tenth of the run, which shows where a loss goes.
function smoothed(values) {
  const known = values.filter((value) => value !== null).length;
  const weight = 2 / (Math.min(100, Math.max(2, known / 10)) + 1);
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : mean + weight * (value - mean);
    return mean;
  });
}

function line(drawn, values, x, y) {
  let path = "";
  drawn.forEach((i, k) => {
    const gap = k === 0 || values.slice(drawn[k - 1] + 1, i).some((value) => value === null);
    path += `${gap ? "M" : "L"}${x(i).toFixed(1)} ${y(values[i]).toFixed(1)}`;
  });
  return path;
}

function series(id, values, { name, digits, fromZero, missing, smooth = false, remark = "" }) {
  const steps = history_.step;
  const known = values.filter((value) => value !== null);
  const container = byId(id), note = byId(`${id}-note`);
  note.textContent = "";
  if (known.length === 0) {
    container.replaceChildren();
    element(container, "p", { class: "empty" }, missing);
    container.setAttribute("aria-label", missing);
    return;
  }
  const frame = plot(id, 190);
  const { svg, left, top, width, height } = frame;
  let low = fromZero ? 0 : Math.min(...extent(known)), high = Math.max(...extent(known));
  const margin = (high - low || Math.abs(high) || 1) * 0.08;
  [low, high] = [fromZero ? 0 : low - margin, high + margin];
  const y = (value) => top + height - ((value - low) / (high - low)) * height;
  const first = steps[0], last = steps[steps.length - 1];
  const position = (step) => (last > first ? (step - first) / (last - first) : 0.5);
  const x = (i) => left + position(steps[i]) * width;
  // Learning rates are small: 3e-05 is 3 on an axis of "learning rate / 1e-5".
  const power = high > 0 && high < 0.01 ? 10 ** Math.floor(Math.log10(high)) : 1;
  const axisName = power === 1 ? name : `${name} / ${power.toExponential(0)}`;
  verticalAxis(frame, ticks(low / power, high / power, 5), (value) => y(value * power), axisName);
  const count = Math.max(4, Math.floor(width / 80));
  const marks = last > first ? ticks(first, last, count).filter(Number.isInteger) : [first];
  horizontalAxis(frame, marks.map((step) => [position(step), number(step, 0)]), "step");

  const drawn = thinned(values, Math.floor(width));
  const mean = smooth && known.length > 10 ? smoothed(values) : null;
  const faint = mean ? " raw" : "";
  shape(svg, "path", { class: `series${faint}`, d: line(drawn, values, x, y) });
  if (drawn.length <= 40) {
    for (const i of drawn) shape(svg, "circle", { class: `dot${faint}`, cx: x(i), cy: y(values[i]), r: 3 });
  }
  if (mean) shape(svg, "path", { class: "series", d: line(thinned(mean, Math.floor(width)), mean, x, y) });
  for (const step of history_.skipped) {
    const at = left + position(step) * width;
    shape(svg, "path", { fill: "var(--demand)", d: `M${at - 4} ${top + height}h8l-4 -8z` });
  }
  const notes = remark ? [remark] : [];
  if (mean) notes.push("the bold line is an exponential mean over a tenth of the run");
  if (data.totals.skipped) notes.push(`▲ ${plural(data.totals.skipped, "skipped update")}`);
  if (drawn.length < known.length) {
    notes.push(`${number(known.length, 0)} steps drawn at ${number(drawn.length, 0)} points: the lowest and ` +
      "highest of each column");
  }
  if (steps.length < data.totals.steps) notes.push("older steps are thinned out");
  note.textContent = notes.join("; ");
  container.setAttribute("aria-label",
    `${name} over ${plural(steps.length, "step")}: first ${number(known[0], digits)}, last ` +
    `${number(known[known.length - 1], digits)}, lowest ${number(Math.min(...extent(known)), digits)}, ` +
    `highest ${number(Math.max(...extent(known)), digits)}.`);
  addCursor(frame);
  interact(frame, () => [frame], (at) => {
    const i = nearestStep(first + at * (last - first));
    const rows = [
      ["loss", history_.loss[i] === null ? "unknown" : number(history_.loss[i], 4)],
      ["learning rate", plain(history_.learningRate[i])],
      ["gradient norm", plain(history_.gradientNorm[i])],
      [history_.unit, history_.rate[i] === null ? "unknown" : number(history_.rate[i], 0)],
      ["time", history_.seconds[i] === null ? "unknown" : duration(history_.seconds[i] * 1e9)],
      ["device peak", size(history_.peak[i])],
      ["copied in", size(history_.h2d[i])],
      ["copied out", size(history_.d2h[i])],
    ];
    const skipped = history_.skipped.includes(steps[i]);
    return { title: `step ${number(steps[i], 0)}`, rows, notes: skipped ? ["the update was skipped"] : [] };
  }, () => steps.map(position));
}

// Four significant digits.
const plain = (value) => value === null ? "unknown" : String(Number(value.toPrecision(4)));

// Math.min takes its arguments on the stack, which a long run overflows.
function extent(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)],
    [Infinity, -Infinity]);
}

function nearestStep(step) {
  const i = Math.max(0, lastNotAbove(history_.step, step));
  const next = Math.min(history_.step.length - 1, i + 1);
  return history_.step[next] - step < step - history_.step[i] ? next : i;
}

function drawTraining() {
  byId("rate-title").textContent = history_.unit === "tokens/s" ? "Tokens per second" : "Samples per second";
  series("loss", history_.loss, {
    name: "loss", digits: 4, fromZero: false, smooth: true,
    missing: "No loss is known: call booster.backward(loss, optimizer), or let the model return its loss.",
  });
  series("rate", history_.rate, {
    name: history_.unit, digits: 0, fromZero: true,
    missing: "No speed is known: no step ran the boosted model's own forward on a tensor.",
  });
  series("learning-rate", history_.learningRate, {
    name: "learning rate", digits: 6, fromZero: true,
    missing: 'No learning rate is known: the optimizer\'s groups have no "lr".',
  });
  series("gradient-norm", history_.gradientNorm, {
    name: "L2 norm", digits: 4, fromZero: true, remark: "as optimizer.step() finds them, before max_norm clips",
    missing: 'No norm is known: nothing asks for one (max_norm=0 and nonfinite="ignore").',
  });
  const rows = history_.step.map((step, i) => [
    number(step, 0),
    history_.loss[i] === null ? "unknown" : number(history_.loss[i], 4),
    plain(history_.learningRate[i]), plain(history_.gradientNorm[i]),
    history_.rate[i] === null ? "unknown" : number(history_.rate[i], 0),
    history_.seconds[i] === null ? "unknown" : duration(history_.seconds[i] * 1e9),
    size(history_.peak[i]), size(history_.h2d[i]), size(history_.d2h[i]),
  ]);
  table("steps-table", ["step", "loss", "learning rate", "gradient norm", history_.unit, "time", "device peak", "copied in", "copied out"],
    rows.slice(-20).reverse());
}

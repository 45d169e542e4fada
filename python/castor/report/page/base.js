"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const KIB = 1024, MIB = KIB * 1024, GIB = MIB * 1024;
const byId = (id) => document.getElementById(id);

// Names come from the user's model: text nodes and attributes only, never markup.
function element(parent, name, attributes = {}, text = "") {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== "") node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

function shape(parent, name, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== "") node.textContent = text;
  parent.append(node);
  return node;
}

const number = (value, digits) =>
  value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });

function sizeUnit(bytes) {
  if (bytes >= 1024 * GIB) return [1024 * GIB, "TiB"];
  if (bytes >= GIB) return [GIB, "GiB"];
  return bytes >= MIB ? [MIB, "MiB"] : bytes >= KIB ? [KIB, "KiB"] : [1, "B"];
}

function size(bytes) {
  const [unit, name] = sizeUnit(bytes);
  return `${number(bytes / unit, unit === 1 ? 0 : bytes / unit < 100 ? 2 : 1)} ${name}`;
}

function timeUnit(ns) {
  return ns >= 1e10 ? [1e9, "s"] : ns >= 1e6 ? [1e6, "ms"] : [1e3, "µs"];
}

function duration(ns) {
  if (ns === 0) return "0 ms";
  const [unit, name] = timeUnit(ns);
  return `${number(ns / unit, ns / unit < 100 ? 2 : 1)} ${name}`;
}

const plural = (count, noun) =>
  `${number(count, 0)} ${noun}${count === 1 ? "" : noun.endsWith("ch") ? "es" : "s"}`;

// Round values from low to high, at most about `count` of them.
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step + 0); // never -0
  return found;
}

function digitsFor(values) {
  const step = values.length > 1 ? Math.abs(values[1] - values[0]) : Math.abs(values[0]) || 1;
  return Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
}

// Position of the last element that is not above `value`; -1 if there is none.
function lastNotAbove(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/* The axis of the step: time, or events at equal distances. Positions are in [0, 1]. */
const axis = {
  mode: "time",
  events: data.events.time,
  position(ns) {
    const end = Math.max(1, data.endNs);
    if (this.mode === "time") return Math.min(1, ns / end);
    const i = Math.max(0, lastNotAbove(this.events, ns));
    const [from, to] = [this.events[i], this.events[i + 1] ?? end];
    const share = to > from ? Math.min(1, (ns - from) / (to - from)) : 0;
    return (i + share) / this.events.length;
  },
  // Whole nanoseconds, so that the position of an event leads back to it.
  time(position) {
    const end = Math.max(1, data.endNs);
    if (this.mode === "time") return Math.round(position * end);
    const at = Math.min(this.events.length - 1e-9, position * this.events.length);
    const i = Math.floor(at);
    const [from, to] = [this.events[i], this.events[i + 1] ?? end];
    return Math.round(from + (at - i) * (to - from));
  },
  // [position, label] of each tick.
  ticks(width) {
    const count = Math.max(4, Math.floor(width / 90));
    if (this.mode === "events") {
      const values = ticks(0, this.events.length, count).filter((value) => Number.isInteger(value));
      return values.map((value) => [value / this.events.length, number(value, 0)]);
    }
    const [unit] = timeUnit(data.endNs);
    const values = ticks(0, data.endNs / unit, count);
    const digits = digitsFor(values);
    return values.map((value) => [(value * unit) / Math.max(1, data.endNs), number(value, digits)]);
  },
  title() {
    return this.mode === "events" ? "event" : timeUnit(data.endNs)[1];
  },
};

/* A plot: an SVG of the container's width with room for axes around [left, left + width]. */
function plot(id, height, { top = 8, bottom = 36 } = {}) {
  const container = byId(id);
  container.replaceChildren();
  const full = Math.floor(container.clientWidth);
  const left = 58, right = 10;
  const svg = shape(container, "svg", {
    width: full, height: top + height + bottom, "aria-hidden": "true",
  });
  return { container, svg, left, top, width: Math.max(40, full - left - right), height, bottom };
}

function horizontalAxis(frame, marks, title) {
  const { svg, left, top, width, height } = frame;
  const base = top + height;
  shape(svg, "line", { class: "frame", x1: left, x2: left + width, y1: base, y2: base });
  let free = -Infinity; // where the last label ends
  for (const [position, label] of marks) {
    const x = left + position * width, half = 3.5 * label.length;
    shape(svg, "line", { class: "frame", x1: x, x2: x, y1: base, y2: base + 4 });
    const middle = Math.min(x, left + width + 8 - half); // the last one stays within the plot
    if (middle - half < free + 6) continue;
    shape(svg, "text", { x: middle, y: base + 16, "text-anchor": "middle" }, label);
    free = middle + half;
  }
  shape(svg, "text", { x: left + width / 2, y: base + 31, "text-anchor": "middle" }, title);
}

// `values` are in units of the axis; `place` turns one into a y coordinate.
function verticalAxis(frame, values, place, title) {
  const { svg, left, width } = frame;
  const digits = digitsFor(values);
  for (const value of values) {
    const y = place(value);
    shape(svg, "line", { class: "grid", x1: left, x2: left + width, y1: y, y2: y });
    shape(svg, "text", { x: left - 6, y: y + 4, "text-anchor": "end" }, number(Math.abs(value), digits));
  }
  const middle = frame.top + frame.height / 2;
  shape(svg, "text", {
    x: 0, y: 0, "text-anchor": "middle", transform: `translate(11 ${middle}) rotate(-90)`,
  }, title);
}

function legend(id, entries) {
  const list = byId(id);
  list.replaceChildren();
  for (const [name, draw] of entries) {
    const item = element(list, "span");
    const icon = shape(item, "svg", { width: 14, height: 12, "aria-hidden": "true" });
    draw(icon);
    item.append(name);
  }
}

const swatch = (color) => (icon) =>
  shape(icon, "rect", { x: 1, y: 1, width: 12, height: 10, rx: 2, fill: `var(--${color})`, stroke: "var(--line)" });

/* One tooltip, and one cursor through all plots of the step. */
const tooltip = byId("tooltip");
const cursors = new Map();

function showTooltip(x, y, { title, rows = [], notes = [] }) {
  tooltip.replaceChildren();
  element(tooltip, "strong", {}, title);
  for (const [name, value] of rows) {
    const row = element(tooltip, "div", { class: "row" });
    element(row, "span", {}, name);
    element(row, "span", {}, value);
  }
  for (const note of notes) element(tooltip, "p", {}, note);
  tooltip.hidden = false;
  const box = tooltip.getBoundingClientRect();
  const beside = x + 16 + box.width > innerWidth - 8 ? x - 16 - box.width : x + 16;
  const below = y + 16 + box.height > innerHeight - 8 ? y - 16 - box.height : y + 16;
  tooltip.style.transform = `translate(${Math.max(8, Math.min(beside, innerWidth - box.width - 8))}px,` +
    `${Math.max(8, below)}px)`;
}

function hideTooltip() {
  tooltip.hidden = true;
  for (const line of cursors.values()) line.setAttribute("visibility", "hidden");
}

function addCursor(frame) {
  cursors.set(frame.container.id, shape(frame.svg, "line", {
    class: "cursor", y1: frame.top, y2: frame.top + frame.height, visibility: "hidden",
  }));
}

function moveCursors(position, frames) {
  for (const frame of frames) {
    const line = cursors.get(frame.container.id);
    const x = Math.round(frame.left + position * frame.width) + 0.5;
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
    line.setAttribute("visibility", "visible");
  }
}

// `describe(position, y)` makes the tooltip; arrow keys go through the positions that `stops` gives.
function interact(frame, frames, describe, stops) {
  const { container, left, top, width, height } = frame;
  const show = (position, y, clientX, clientY) => {
    const content = describe(position, y);
    if (!content) return hideTooltip();
    for (const line of cursors.values()) line.setAttribute("visibility", "hidden");
    moveCursors(position, frames());
    showTooltip(clientX, clientY, content);
  };
  const follow = (event) => {
    const box = container.getBoundingClientRect();
    const position = Math.max(0, Math.min(1, (event.clientX - box.left - left) / width));
    const y = Math.max(0, Math.min(height - 1e-3, event.clientY - box.top - top));
    show(position, y, event.clientX, event.clientY);
  };
  let at = 0;
  container.onpointermove = follow;
  container.onpointerdown = follow;
  container.onpointerleave = hideTooltip;
  container.onblur = hideTooltip;
  container.onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (event.key === "Escape") return hideTooltip();
    if (step === undefined) return;
    event.preventDefault();
    const positions = stops();
    at = Math.max(0, Math.min(positions.length - 1, at + step));
    const box = container.getBoundingClientRect();
    const y = height / 2;
    show(positions[at], y, box.left + left + positions[at] * width, box.top + top + y);
  };
}

function table(id, headings, rows) {
  const place = byId(id);
  place.replaceChildren();
  const node = element(place, "table");
  const head = element(element(node, "thead"), "tr");
  for (const heading of headings) element(head, "th", { scope: "col" }, heading);
  const body = element(node, "tbody");
  for (const row of rows) {
    const line = element(body, "tr");
    for (const cell of row) element(line, "td", {}, cell);
  }
}

// A number and its unit stay on one line.
const withUnits = (text) => text.replace(/(\d) (?=[KMGT]iB|B\b|s\b|ms\b|µs|tokens|samples)/g, "$1\u00a0");

function drawHeader() {
  byId("title").textContent = `${data.model}, ${data.parameters}, within ${size(data.budget.device)}`;
  byId("subtitle").textContent = `${data.setting}. Step ${number(data.step, 0)} of this run, ` +
    `${plural(events.time.length, "event")}; ${data.guidance}. Written on ${data.written}.`;
  const verdict = byId("verdict");
  verdict.className = `card ${data.verdict.good ? "good" : "mend"}`;
  element(verdict, "p", {}, data.verdict.text);
  if (data.verdict.advice.length > 0) {
    const advice = element(verdict, "ul");
    for (const line of data.verdict.advice) element(advice, "li", {}, line);
  }
  byId("axis-time").textContent = data.timeName[0].toUpperCase() + data.timeName.slice(1);
  const list = byId("headline");
  for (const [name, value, remark] of data.headline) {
    const figure = element(list, "div");
    element(figure, "dt", {}, name);
    element(figure, "dd", { class: "value" }, withUnits(value));
    element(figure, "dd", { class: "remark" }, withUnits(remark));
  }
  byId("footer").textContent = `castor ${data.version}. Sizes are binary: 1 MiB is 1,048,576 bytes.`;
}

function draw() {
  hideTooltip();
  cursors.clear();
  frames = {};
  drawMemory();
  drawTiers();
  drawResidency();
  drawTransfers();
  drawTraining();
}

drawHeader();
draw();
for (const choice of document.querySelectorAll("#axis input")) {
  choice.addEventListener("change", () => {
    axis.mode = choice.value;
    draw();
  });
}
let drawnWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== drawnWidth) {
    drawnWidth = innerWidth;
    draw();
  }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("scroll", hideTooltip, { passive: true });

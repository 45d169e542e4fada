function drawHeader() {
  byId("title").textContent = data.model;
  byId("subtitle").textContent =
    `Step ${number(data.step, 0)} of this run, ${plural(moments.time.length, "moment")}; ${data.guidance}.`;
  const list = byId("headline");
  for (const [name, value, remark] of data.headline) {
    const figure = element(list, "div");
    element(figure, "dt", {}, name);
    element(figure, "dd", { class: "value" }, value);
    element(figure, "dd", { class: "remark" }, remark);
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

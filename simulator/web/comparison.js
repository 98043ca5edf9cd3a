// The page of a measured step beside the simulated one, on one time axis.

// Parts of a gap as bars to the right (longer) or to the left (shorter) of zero.
class GapBars extends Chart {
  constructor(rows) {
    super(rows.length * 26 + 32, 24);
    this.rows = rows;
  }
  draw() {
    const ctx = this.begin(), room = 130, values = this.rows.map((row) => row.us);
    const low = Math.min(...values, 0), high = Math.max(...values, 0), width = high - low || 1;
    const x = (value) => LEFT + room + 70 + ((value - low) / width) * (this.plotWidth - room - 150);
    for (const at of ticks(low, high, 8)) this.xTick(ctx, x(at), `${short(at)} us`);
    this.rows.forEach((row, idx) => {
      const y = this.top + idx * 26 + 4;
      ctx.fillStyle = color(row.color);
      ctx.fillRect(Math.min(x(0), x(row.us)), y, Math.max(Math.abs(x(row.us) - x(0)), 1), 18);
      ctx.fillStyle = color("--ink");
      ctx.textBaseline = "middle";
      ctx.textAlign = "right";
      ctx.fillText(row.name, LEFT + room - 8, y + 9);
      ctx.textAlign = row.us < 0 ? "right" : "left";
      ctx.fillText(`${fixed(row.us, 1)} us`, x(row.us) + (row.us < 0 ? -6 : 6), y + 9);
    });
  }
}

function comparisonPage(data) {
  const { figures, ops, kinds } = data, { gap } = figures;
  const view = new View(data.total_ns);
  const measured = new Timeline(view, data.measured.spans, ops, kinds, data.measured.chain);
  const simulated = new Timeline(view, data.simulated.spans, ops, kinds, data.simulated.chain);
  const parts = [["duration", gap.duration_ns], ["wait", gap.wait_ns], ["order", gap.order_ns],
    ["contention", gap.contention_ns]];
  const bars = parts.map(([name, ns]) => ({ name, us: ns / 1e3, color: "--first" }));
  const whole = figures.simulated_ms * 1e6;
  const rows = figures.kinds.map((kind) => [kind.name, `${kind.tasks}`,
    ...["run", "copies", "wait"].flatMap((what) => [fixed(kind[`measured_${what}_ns`] / 1e3, 2),
      fixed(kind[`simulated_${what}_ns`] / 1e3, 2)]), `${kind.moved}`]);
  return [
    el("h1", {}, data.title),
    el("p", { class: "dim" }, `${figures.measured} beside ${figures.simulated}`),
    data.note ? el("p", { class: "note" }, data.note) : null,
    el("div", { class: "cards", id: "figures" },
      card(`${fixed(figures.measured_ms, 4)} ms`, "measured"),
      card(`${fixed(figures.simulated_ms, 4)} ms`, "simulated"),
      card(`${us(gap.total_ns)} us`, `gap, ${percent(gap.total_ns, whole)} of the simulated step`)),
    el("h2", {}, "What the gap is made of"),
    new GapBars(bars.concat({ name: "together", us: gap.total_ns / 1e3, color: "--accent" })).node,
    table(["part", "us", "of the simulated step"], parts.concat([["together", gap.total_ns]]).map(([name, ns]) =>
      [name, us(ns), percent(ns, whole)]), { id: "gap" }),
    el("p", { class: "dim" }, "Along the critical path of either timeline, followed in both, and then the mean: runs that took longer (duration), " +
      "waits after the last arrival that took longer (wait), copies that came later (contention), and other tasks that came last (order)."),
    el("h2", {}, "Measured: SMs over time"),
    controls(view, [measured, simulated], kinds, layerRanges(data.simulated.spans, ops)),
    measured.node,
    el("h2", {}, "Simulated: SMs over time"),
    simulated.node,
    el("h2", {}, "Tasks, mean us"),
    table(["task kind", "tasks", "run measured", "simulated", "copies measured", "simulated", "wait measured", "simulated",
      "on other SMs"], rows, { id: "kinds" }),
  ];
}

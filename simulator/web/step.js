// The page of one simulated step.

function tableOfKinds(figures) {
  const whole = figures.ms * 1e6;
  const rows = figures.kinds.map((kind) => [kind.name, fixed(kind.tasks, 0), fixed(kind.load_bytes / 1e6, 0),
    us(kind.run_ns), percent(kind.run_ns, whole), us(kind.wait_ns), us(kind.critical_ns),
    us(kind.tasks ? kind.slack_ns / kind.tasks : 0)]);
  return table(["task kind", "tasks", "MB", "running us", "of step", "waiting us", "critical us", "mean slack us"], rows,
    { id: "kinds" });
}

function tableOfHandOffs(figures) {
  const whole = figures.ms * 1e6;
  const rows = figures.hand_offs.map((off) => [`${off.source} → ${off.waiter}`, off.phase, us(off.waited_ns),
    us(off.exposed_ns), percent(off.exposed_ns, whole), us(off.critical_ns), off.on_path ? fixed(off.on_path, 0) : ""]);
  return table(["hand-off", "phase", "waited us", "exposed us", "of step", "critical us", "on the path"], rows,
    { id: "hand-offs" });
}

function shares(id, title, parts, whole) {
  return table([title, "us", "of step"], parts.map(([name, ns]) => [name, us(ns), percent(ns, whole)]), { id });
}

function boundRows(figures) {
  const { bounds } = figures;
  return [["datasheet roofline", bounds.roofline_ns], ["bytes at the streaming rate", bounds.bytes_ns],
    ["critical path", bounds.critical_path_ns], ["busiest SM", bounds.sm_load_ns]].filter(([, ns]) => ns > 0);
}

// Operators by arithmetic intensity, under the memory's roof.
class Roofline extends Chart {
  constructor(data, kinds) {
    super(320, 36);
    this.points = data.kinds.map((each) => ({ ...each, tflops: each.gflops / 1e3 }));
    this.roofs = data.roofs;
    this.colors = kindColors(kinds);
  }
  draw() {
    const ctx = this.begin(), log = Math.log10;
    const xs = this.points.map((each) => each.flop_per_byte), ys = this.points.map((each) => each.tflops);
    const x0 = Math.floor(log(Math.min(...xs) / 1.5)), x1 = Math.max(Math.ceil(log(Math.max(...xs) * 1.5)), x0 + 2);
    const y0 = Math.floor(log(Math.min(...ys) / 1.5));
    const y1 = Math.ceil(log(Math.max(...ys, ...this.roofs.map((roof) => roof.bytes_per_ns * 10 ** (x1 - 3))) * 1.1));
    const x = (value) => LEFT + ((log(value) - x0) / (x1 - x0)) * this.plotWidth;
    const y = (value) => this.top + this.plotHeight * (1 - (log(value) - y0) / (y1 - y0));
    for (let power = x0; power <= x1; power++) this.xTick(ctx, x(10 ** power), short(10 ** power));
    for (let power = y0; power <= y1; power++) this.yTick(ctx, y(10 ** power), short(10 ** power));
    this.yLabel(ctx, "TFLOP/s while its tasks run");
    ctx.textAlign = "center";
    ctx.fillText("FLOP per byte from memory", LEFT + this.plotWidth / 2, this.height - 10);
    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT, this.top, this.plotWidth, this.plotHeight);
    ctx.clip();
    this.roofs.forEach((roof, idx) => {
      const rate = roof.bytes_per_ns / 1e3;
      ctx.strokeStyle = color(idx ? "--dim" : "--ink");
      ctx.setLineDash(idx ? [5, 4] : []);
      ctx.beginPath();
      ctx.moveTo(x(10 ** x0), y(rate * 10 ** x0));
      ctx.lineTo(x(10 ** x1), y(rate * 10 ** x1));
      ctx.stroke();
      ctx.setLineDash([]);
      const at = 10 ** (x0 + (x1 - x0) * 0.86), side = idx ? 1 : -1;
      this.label(ctx, `${roof.name} ${short(roof.bytes_per_ns)} GB/s`, x(at) + side * 10, y(rate * at) + side * 9, side);
    });
    ctx.restore();
    this.frame(ctx);
    // Names stand apart: left of points above the roof, right of those below it.
    for (const side of [-1, 1]) {
      const own = this.points.filter((each) => (each.gflops > this.roofs[0].bytes_per_ns * each.flop_per_byte ? -1 : 1) === side);
      const labels = own.map((each) => ({ each, at: y(each.tflops) })).sort((a, b) => a.at - b.at);
      labels.forEach((label, idx) => { label.text = idx ? Math.max(label.at, labels[idx - 1].text + 14) : label.at; });
      labels.forEach(({ each, at, text }) => {
        const px = x(each.flop_per_byte);
        ctx.strokeStyle = color("--line");
        ctx.beginPath();
        ctx.moveTo(px, at);
        ctx.lineTo(px + side * 22, text);
        ctx.stroke();
        ctx.fillStyle = this.colors[each.name] || color("--accent");
        ctx.beginPath();
        ctx.arc(px, at, each.name === "whole step" ? 6 : 4.5, 0, 7);
        ctx.fill();
        this.label(ctx, each.name, px + side * 25, text, side);
      });
    }
  }
  label(ctx, text, x, y, side) {
    ctx.textAlign = side < 0 ? "right" : "left";
    ctx.textBaseline = "middle";
    ctx.lineWidth = 4;
    ctx.strokeStyle = color("--back");
    ctx.strokeText(text, x, y);
    ctx.lineWidth = 1;
    ctx.fillStyle = color("--ink");
    ctx.fillText(text, x, y);
  }
}

// Horizontal bars with their values.
class Bars extends Chart {
  constructor(rows, unit) {
    super(rows.length * 24 + 30, 22);
    Object.assign(this, { rows, unit });
  }
  draw() {
    const ctx = this.begin(), room = 190;
    const high = Math.max(...this.rows.map((row) => row.value)) * 1.02;
    const x = (value) => LEFT + room + (value / high) * (this.plotWidth - room - 70);
    for (const at of ticks(0, high, 8)) this.xTick(ctx, x(at), `${short(at)} ${this.unit}`);
    this.rows.forEach((row, idx) => {
      const y = this.top + idx * 24 + 4;
      ctx.fillStyle = color(row.color);
      ctx.fillRect(x(0), y, x(row.value) - x(0), 16);
      ctx.fillStyle = color("--ink");
      ctx.textBaseline = "middle";
      ctx.textAlign = "right";
      ctx.fillText(row.name, x(0) - 8, y + 8);
      ctx.textAlign = "left";
      ctx.fillText(row.text, x(row.value) + 6, y + 8);
    });
  }
}

function stepPage(data) {
  const { figures, spans, ops, kinds, curves } = data, whole = figures.ms * 1e6;
  const view = new View(data.total_ns);
  const timeline = new Timeline(view, spans, ops, kinds, data.chain);
  const draws = figures.draws_ms.length;
  const bandwidth = new CurveChart(view, { bin: curves.bin_ns, unit: "GB/s", label: "memory, GB/s", band: null,
    lines: [{ name: "memory", values: curves.bytes_per_ns, color: "--first" }],
    levels: [{ name: "datasheet", value: data.chip.datasheet_bytes_per_ns, side: "right" },
      { name: "streaming rate", value: data.chip.streaming_bytes_per_ns, side: "left" }] });
  const kb = (values) => values.map((value) => value / 1024);
  const levels = [{ name: "ring", value: data.ring.bytes / 1024, side: "right" }];
  if (data.ring.in_flight_cap_bytes) {
    levels.push({ name: "in-flight cap", value: data.ring.in_flight_cap_bytes / 1024, side: "left" });
  }
  const ring = new CurveChart(view, { bin: curves.bin_ns, unit: "KiB", label: "landed in ring, KiB", levels,
    lines: [{ name: "mean of the SMs", values: kb(curves.ring_mean), color: "--first" }],
    band: { least: kb(curves.ring_least), most: kb(curves.ring_most) } });
  const path = figures.critical_path, idle = figures.idle;
  const bounds = boundRows(figures);
  const bars = [{ name: "this step", value: figures.ms, text: `${ms(whole)} ms`, color: "--first" }].concat(
    bounds.map(([name, ns]) => ({ name, value: ns / 1e6, color: "--wait",
      text: `${ms(ns)} ms, step ${percent(whole - ns, ns)} above` })));
  return [
    el("h1", {}, data.title),
    el("p", { class: "dim" }, data.about),
    data.note ? el("p", { class: "note" }, data.note) : null,
    el("div", { class: "cards", id: "figures" },
      card(`${ms(whole)} ms`, draws > 1 ? `step, mean of n = ${draws} routings (${figures.routing})` : "step"),
      draws > 1 ? card(`${fixed(figures.p95_ms, 4)} ms`, `p95 of n = ${draws} routings`) : null,
      card(Math.round(figures.tokens_per_s).toLocaleString("en"), "tokens a second"),
      card(`${fixed(figures.percent_of_roofline, 1)}%`, "of the datasheet's roofline"),
      card(percent(figures.memory_idle_ns, whole), "of the step the memory idles")),
    el("p", { id: "stopped-by" }, el("b", {}, "stopped by "), figures.stopped_by),
    el("h2", {}, "SMs over time"),
    controls(view, [timeline], kinds, layerRanges(spans, ops)),
    timeline.node,
    el("h2", {}, "Memory bandwidth and ring fill, on the same time axis"),
    bandwidth.node, ring.node,
    el("p", { class: "dim" }, "Band: emptiest and fullest ring. Both curves follow from when each record's copies began and had landed."),
    el("h2", {}, "Bounds"),
    new Bars(bars, "ms").node,
    el("h2", {}, "Hand-offs"),
    el("p", { class: "dim" }, "Means over the SMs, all layers together. Exposed: while the SM's stream of copies stood still. Critical: on the one chain that the step's time is made of."),
    tableOfHandOffs(figures),
    el("h2", {}, "Task kinds"),
    tableOfKinds(figures),
    el("div", { class: "columns" },
      el("div", {}, el("h2", {}, `Critical path: ${fixed(path.tasks, 0)} tasks, ${fixed(path.hand_offs, 0)} hand-offs`),
        shares("critical", "part", [["running, all copies there", path.run_ns], ["waiting for copies", path.copies_ns],
          ["hand-offs between tasks", path.hand_off_ns], ["from an SM's task to its next", path.turn_ns]], whole)),
      el("div", {}, el("h2", {}, "Idle memory"),
        shares("idle", "cause", [["exposed by hand-offs", idle.hand_offs_ns], ["first copies' latency", idle.start_ns],
          ["SMs that finished early", idle.imbalance_ns], ["after the last copy", idle.end_ns],
          ["latency and uneven service (less than 0: caught up)", idle.service_ns],
          ["together", figures.memory_idle_ns]], whole)),
      el("div", {}, el("h2", {}, "Bounds, in ms"),
        table(["bound", "ms", "step above"], bounds.map(([name, ns]) => [name, ms(ns), percent(whole - ns, ns)]),
          { id: "bounds" }))),
    el("h2", {}, "Roofline"),
    new Roofline(data.roofline, kinds).node,
    table(["task kind", "FLOP per byte", "TFLOP/s", "GB/s"], data.roofline.kinds.map((each) => [each.name,
      fixed(each.flop_per_byte, 2), fixed(each.gflops / 1e3, 2), fixed(each.gflops / each.flop_per_byte, 0)]), { id: "roofline" }),
    el("p", { class: "dim" }, "A kind that finds its copies in the ring runs faster than memory could feed it. The chip's file states no peak arithmetic rate, so only the memory's roof is drawn."),
  ];
}

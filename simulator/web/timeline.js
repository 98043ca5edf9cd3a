// One row per SM: above its copies, below its waits and runs, coloured by path and kind.

const ROW_HEIGHTS = { "all SMs": 5, "taller": 12, "tallest": 26 };

class Timeline extends TimeChart {
  // `spans`: column arrays over records in list order, SM after SM; `ops`: {name, path, layer} per operator.
  constructor(view, spans, ops, kinds, chain) {
    super(100, view);
    Object.assign(this, { spans, ops, chain, colors: kindColors(kinds), hidden: new Set(), showsChain: false });
    this.numSms = spans.offsets.length - 1;
    this.setRows("all SMs");
  }
  setRows(name) {
    this.row = ROW_HEIGHTS[name];
    this.height = this.numSms * this.row + this.top + this.bottom;
    this.view.draw();
  }
  visible(sm) {
    const { offsets, end, load_start: start } = this.spans;
    let low = offsets[sm], high = offsets[sm + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (end[middle] < this.view.x0) low = middle + 1;
      else high = middle;
    }
    let after = low;
    while (after < offsets[sm + 1] && Math.min(start[after], this.spans.wait[after]) <= this.view.x1) after++;
    return [low, after];
  }
  draw() {
    const ctx = this.begin(), { spans, ops } = this;
    this.timeAxis(ctx, true);
    const each = [1, 2, 4, 8, 12, 24, 32].find((step) => step * this.row >= 22) || 32;
    for (let sm = 0; sm < this.numSms; sm += each) this.yTick(ctx, this.top + (sm + 0.5) * this.row, `${sm}`);
    this.yLabel(ctx, "SM");
    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT, this.top, this.plotWidth, this.plotHeight);
    ctx.clip();
    const gap = this.row > 8 ? 1 : 0, copies = this.row * 0.34, wait = color("--wait");
    const bar = (from, to, y, height) => {
      const x = this.x(from);
      ctx.fillRect(x, y, Math.max(this.x(to) - x, 0.5), height);
    };
    let drawn = 0;
    for (let sm = 0; sm < this.numSms; sm++) {
      const [first, after] = this.visible(sm), y = this.top + sm * this.row;
      for (let idx = first; idx < after; idx++) {
        const kind = ops[spans.op[idx]].name;
        if (this.hidden.has(kind)) continue;
        drawn++;
        if (spans.start[idx] > spans.wait[idx]) {
          ctx.fillStyle = wait;
          bar(spans.wait[idx], spans.start[idx], y + copies + (this.row - copies) * 0.35, (this.row - copies) * 0.3);
        }
        ctx.fillStyle = this.colors[kind];
        bar(spans.start[idx], spans.end[idx], y + copies, this.row - copies - gap);
        if (spans.landed[idx] > spans.load_start[idx]) {
          ctx.globalAlpha = 0.45;
          bar(spans.load_start[idx], spans.landed[idx], y, copies - gap * 0.5);
          ctx.globalAlpha = 1;
        }
      }
    }
    this.canvas.dataset.drawn = drawn;
    if (this.showsChain) this.drawChain(ctx);
    ctx.restore();
    this.frame(ctx);
    this.pointerLine(ctx);
  }
  drawChain(ctx) {
    const middle = (record) => this.top + (this.smOf(record) + 0.67) * this.row;
    ctx.strokeStyle = color("--ink");
    ctx.lineWidth = 1.6;
    ctx.beginPath();
    this.chain.forEach((link, idx) => {
      const y = middle(link.record);
      if (idx === 0) ctx.moveTo(this.x(link.to), y);
      else ctx.lineTo(this.x(link.to), y);
      ctx.lineTo(this.x(link.from), y);
    });
    ctx.stroke();
  }
  smOf(record) {
    let low = 0, high = this.numSms;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.spans.offsets[middle] <= record) low = middle;
      else high = middle;
    }
    return low;
  }
  title(idx) {
    const op = this.ops[this.spans.op[idx]];
    return `${op.layer < 0 ? "" : `L${op.layer}.`}${op.name}[${this.spans.task[idx]}]`;
  }
  hover(event) {
    const sm = Math.floor((event.clientY - this.node.getBoundingClientRect().top - this.top) / this.row);
    if (sm < 0 || sm >= this.numSms || this.grip) return this.hint(event, "");
    const { spans } = this, at = this.view.pointer, lines = [`SM ${sm}, ${us(at)} us`];
    const [first, after] = this.visible(sm);
    for (let idx = first; idx < after; idx++) {
      const name = `${this.title(idx)} (${this.ops[spans.op[idx]].path})`;
      if (spans.start[idx] <= at && at < spans.end[idx]) {
        lines.push(`runs ${name}: ${us(spans.start[idx])} to ${us(spans.end[idx])} us`);
      } else if (spans.wait[idx] <= at && at < spans.start[idx]) {
        lines.push(`waits to run ${name} until ${us(spans.start[idx])} us`);
      }
      if (spans.load_start[idx] <= at && at < spans.landed[idx]) {
        lines.push(`copies for ${name}: ${us(spans.load_start[idx])} to ${us(spans.landed[idx])} us`);
      }
    }
    this.hint(event, lines.join("\n"));
  }
}

// Buttons of a view, and a legend that hides kinds.
function controls(view, timelines, kinds, layers) {
  const zoom = (factor) => {
    const middle = (view.x0 + view.x1) / 2, half = ((view.x1 - view.x0) / 2) * factor;
    view.show(middle - half, middle + half);
  };
  const bar = el("div", { class: "bar" },
    el("button", { onclick: () => zoom(0.5) }, "zoom in"),
    el("button", { onclick: () => zoom(2) }, "zoom out"),
    el("button", { onclick: () => view.show(0, view.total) }, "whole step"),
    picker(["layer ..."].concat(layers.map((each) => `layer ${each.layer}`)), (idx) => {
      if (idx > 0) view.show(layers[idx - 1].from, layers[idx - 1].to);
    }),
    picker(Object.keys(ROW_HEIGHTS), (_, name) => timelines.forEach((each) => each.setRows(name))),
    el("label", { class: "key" }, el("input", { type: "checkbox", onchange: (event) => {
      timelines.forEach((each) => { each.showsChain = event.target.checked; });
      view.draw();
    } }), "critical path"),
    el("span", { class: "dim" }, "wheel zooms, dragging pans, a double click shows all"));
  const colors = kindColors(kinds);
  const legend = el("div", { class: "bar" }, ...kinds.map((kind) => {
    const key = el("span", { class: "key", onclick: () => {
      key.classList.toggle("off");
      timelines.forEach((each) => each.hidden.has(kind.name) ? each.hidden.delete(kind.name) : each.hidden.add(kind.name));
      view.draw();
    } }, el("i", { style: `background:${colors[kind.name]}` }), `${kind.name} (${kind.path})`);
    return key;
  }), el("span", { class: "key" }, el("i", { style: "background:var(--wait)" }), "waits to run"),
  el("span", { class: "dim" }, "upper third of a row: copies from their start to the last landing; below: runs"));
  return el("div", {}, bar, legend);
}

function picker(names, chosen) {
  const options = names.map((name) => el("option", {}, name));
  return el("select", { onchange: (event) => chosen(event.target.selectedIndex, event.target.value) }, ...options);
}

// From where to where each layer's tasks run.
function layerRanges(spans, ops) {
  const found = new Map();
  spans.op.forEach((op, idx) => {
    const layer = ops[op].layer;
    if (layer < 0) return;
    const range = found.get(layer) || { layer, from: Infinity, to: 0 };
    range.from = Math.min(range.from, spans.wait[idx]);
    range.to = Math.max(range.to, spans.end[idx]);
    found.set(layer, range);
  });
  return [...found.values()].sort((a, b) => a.layer - b.layer);
}

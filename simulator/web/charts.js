// Elements, tables, scales and axes. Nothing here knows what is drawn.

const LEFT = 66, RIGHT = 14;

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function table(columns, rows, attributes = {}) {
  const head = el("tr", {}, ...columns.map((name) => el("th", {}, name)));
  const body = rows.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", {}, cell))));
  return el("div", { class: "scroll" }, el("table", attributes, el("thead", {}, head), el("tbody", {}, ...body)));
}

function card(value, label) {
  return el("div", { class: "card" }, el("b", {}, value), el("span", {}, label));
}

const fixed = (value, digits) => value.toFixed(digits).replace(/^-(0(\.0*)?)$/, "$1");
const ms = (ns) => fixed(ns / 1e6, 4);
const us = (ns) => fixed(ns / 1e3, 1);
const percent = (part, whole) => `${fixed((100 * part) / whole, 1)}%`;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Hue by path, lightness by kind.
const HUES = { trunk: 150, attention: 215, mlp: 28 };

function kindColors(kinds) {
  const found = {};
  for (const path of Object.keys(HUES)) {
    const own = kinds.filter((kind) => kind.path === path);
    own.forEach((kind, idx) => {
      const light = own.length > 1 ? 36 + (32 * idx) / (own.length - 1) : 48;
      found[kind.name] = `hsl(${HUES[path]} 62% ${light}%)`;
    });
  }
  return found;
}

function ticks(low, high, most) {
  const raw = (high - low) / Math.max(most, 1);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
  const found = [];
  for (let idx = Math.ceil(low / step - 1e-9); idx * step <= high + step * 1e-9; idx++) found.push(idx * step);
  return found;
}

const short = (value) => String(Number(value.toPrecision(6)));

// What part of the time all charts of a step show, and where the pointer is. An address that ends in #400-450 opens on
// these microseconds.
class View {
  constructor(total) {
    this.total = total;
    this.pointer = null;
    this.charts = [];
    const asked = /^#([0-9.]+)-([0-9.]+)$/.exec(location.hash);
    this.show(asked ? Number(asked[1]) * 1e3 : 0, asked ? Number(asked[2]) * 1e3 : total);
  }
  show(x0, x1) {
    const width = Math.min(Math.max(x1 - x0, 100), this.total);
    this.x0 = Math.min(Math.max(x0, 0), this.total - width);
    this.x1 = this.x0 + width;
    this.draw();
  }
  draw() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.charts.forEach((chart) => chart.draw());
    });
  }
}

// A canvas with margins, sharp on every screen.
class Chart {
  static all = [];
  constructor(height, bottom = 22, top = 8) {
    Chart.all.push(this);
    this.height = height;
    this.bottom = bottom;
    this.top = top;
    this.canvas = el("canvas", {});
    this.tip = el("div", { class: "tip" });
    this.node = el("div", { class: "chart" }, this.canvas, this.tip);
    new ResizeObserver(() => requestAnimationFrame(() => {
      if (this.width !== this.node.clientWidth) this.draw();
    })).observe(this.node);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }
  begin() {
    const scale = window.devicePixelRatio || 1;
    this.width = Math.max(this.node.clientWidth, 200);
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(this.height * scale);
    this.canvas.style.height = `${this.height}px`;
    const ctx = this.canvas.getContext("2d");
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    ctx.clearRect(0, 0, this.width, this.height);
    ctx.font = '11px system-ui, "DejaVu Sans", sans-serif';
    this.plotWidth = this.width - LEFT - RIGHT;
    this.plotHeight = this.height - this.top - this.bottom;
    return ctx;
  }
  frame(ctx) {
    ctx.strokeStyle = color("--line");
    ctx.lineWidth = 1;
    ctx.strokeRect(LEFT + 0.5, this.top + 0.5, this.plotWidth, this.plotHeight);
  }
  xTick(ctx, x, text) {
    ctx.fillStyle = color("--grid");
    ctx.fillRect(x, this.top, 1, this.plotHeight);
    ctx.fillStyle = color("--dim");
    ctx.textAlign = "center";
    ctx.textBaseline = "top";
    if (text !== null) ctx.fillText(text, x, this.top + this.plotHeight + 5);
  }
  yTick(ctx, y, text) {
    ctx.fillStyle = color("--grid");
    ctx.fillRect(LEFT, y, this.plotWidth, 1);
    ctx.fillStyle = color("--dim");
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    ctx.fillText(text, LEFT - 6, y);
  }
  yLabel(ctx, text) {
    ctx.save();
    ctx.translate(12, this.top + this.plotHeight / 2);
    ctx.rotate(-Math.PI / 2);
    ctx.fillStyle = color("--dim");
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    ctx.fillText(text, 0, 0);
    ctx.restore();
  }
  hint(event, text) {
    this.tip.style.display = text ? "block" : "none";
    if (!text) return;
    this.tip.textContent = text;
    const box = this.node.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const left = x + 14 + this.tip.offsetWidth > this.width ? x - 14 - this.tip.offsetWidth : x + 14;
    this.tip.style.left = `${Math.max(left, 0)}px`;
    this.tip.style.top = `${y + 12}px`;
  }
}

// A chart over the step's time: the wheel zooms, dragging pans, a double click shows all again.
class TimeChart extends Chart {
  constructor(height, view, bottom = 22) {
    super(height, bottom);
    this.view = view;
    view.charts.push(this);
    const time = (event) => this.time(event.clientX - this.node.getBoundingClientRect().left);
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const factor = Math.exp(event.deltaY * 0.0015), at = time(event);
      view.show(at - (at - view.x0) * factor, at + (view.x1 - at) * factor);
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      this.grip = { x: event.clientX, x0: view.x0, x1: view.x1 };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (this.grip) {
        const moved = ((event.clientX - this.grip.x) / this.plotWidth) * (this.grip.x1 - this.grip.x0);
        view.show(this.grip.x0 - moved, this.grip.x1 - moved);
      }
      view.pointer = time(event);
      this.hover(event);
      view.draw();
    });
    this.canvas.addEventListener("pointerup", () => { this.grip = null; });
    this.canvas.addEventListener("pointerleave", (event) => { view.pointer = null; this.hint(event, ""); view.draw(); });
    this.canvas.addEventListener("dblclick", () => view.show(0, view.total));
  }
  hover() {}
  x(time) {
    return LEFT + ((time - this.view.x0) / (this.view.x1 - this.view.x0)) * this.plotWidth;
  }
  time(x) {
    return this.view.x0 + ((x - LEFT) / this.plotWidth) * (this.view.x1 - this.view.x0);
  }
  timeAxis(ctx, label) {
    for (const at of ticks(this.view.x0 / 1e3, this.view.x1 / 1e3, this.plotWidth / 110)) {
      this.xTick(ctx, this.x(at * 1e3), label ? `${short(at)} us` : null);
    }
  }
  pointerLine(ctx) {
    if (this.view.pointer === null) return;
    const x = this.x(this.view.pointer);
    if (x < LEFT || x > LEFT + this.plotWidth) return;
    ctx.fillStyle = color("--dim");
    ctx.fillRect(x, this.top, 1, this.plotHeight);
  }
}

// Values at the ends of equal bins: lines, a band between two of them, and levels drawn across.
class CurveChart extends TimeChart {
  constructor(view, spec) {
    super(spec.height || 150, view);
    this.spec = spec;
  }
  draw() {
    const ctx = this.begin(), { bin, lines, band, levels, label, unit } = this.spec;
    const most = Math.max(...lines.map((line) => Math.max(...line.values)), ...levels.map((each) => each.value));
    const high = most * 1.12 || 1;
    const y = (value) => this.top + this.plotHeight * (1 - value / high);
    this.timeAxis(ctx, true);
    for (const at of ticks(0, high, 5)) this.yTick(ctx, y(at), short(at));
    this.yLabel(ctx, label);
    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT, this.top, this.plotWidth, this.plotHeight);
    ctx.clip();
    const first = Math.max(Math.floor(this.view.x0 / bin) - 1, 0), last = Math.ceil(this.view.x1 / bin) + 1;
    const trace = (values, isBack) => {
      const to = Math.min(last, values.length);
      for (let step = 0; step < to - first; step++) {
        const idx = isBack ? to - 1 - step : first + step;
        ctx.lineTo(this.x((idx + 0.5) * bin), y(values[idx]));
      }
    };
    if (band) {
      ctx.beginPath();
      trace(band.least, false);
      trace(band.most, true);
      ctx.fillStyle = color("--band");
      ctx.fill();
    }
    for (const line of lines) {
      ctx.beginPath();
      trace(line.values, false);
      ctx.strokeStyle = color(line.color);
      ctx.lineWidth = 1.3;
      ctx.stroke();
    }
    ctx.restore();
    levels.forEach((level) => {
      ctx.setLineDash([5, 4]);
      ctx.strokeStyle = color("--dim");
      ctx.beginPath();
      ctx.moveTo(LEFT, y(level.value));
      ctx.lineTo(LEFT + this.plotWidth, y(level.value));
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.textAlign = level.side || "right";
      ctx.textBaseline = "bottom";
      const x = level.side === "left" ? LEFT + 6 : LEFT + this.plotWidth - 6;
      const text = `${level.name} ${short(level.value)} ${unit}`, width = ctx.measureText(text).width;
      ctx.fillStyle = color("--back"); // so that a curve behind leaves it legible
      ctx.globalAlpha = 0.8;
      ctx.fillRect(level.side === "left" ? x - 2 : x - width - 2, y(level.value) - 14, width + 4, 13);
      ctx.globalAlpha = 1;
      ctx.fillStyle = color("--ink");
      ctx.fillText(text, x, y(level.value) - 1);
    });
    this.frame(ctx);
    this.pointerLine(ctx);
  }
  hover(event) {
    const idx = Math.floor(this.view.pointer / this.spec.bin);
    const values = this.spec.lines.map((line) => `${line.name} ${fixed(line.values[idx] ?? 0, 1)} ${this.spec.unit}`);
    this.hint(event, idx < 0 ? "" : `${us(this.view.pointer)} us\n${values.join("\n")}`);
  }
}

// The page of a what-if study: one panel for every model, chip, routing and context, one line for every scheme.

const SCHEMES = { plan: "--third", hand: "--first", kernels: "--second" };
const SCHEME_NAMES = { plan: "searched plan", hand: "hand choices", kernels: "a kernel per operator" };
const METRICS = {
  "% of the datasheet's roofline": (answer) => answer.percent_of_roofline,
  "ms a step": (answer) => answer.ms,
  "tokens a second": (answer) => answer.tokens_per_s,
};

class Lines extends Chart {
  constructor(answers) {
    super(230, 34, 12);
    this.answers = answers;
    this.metric = Object.keys(METRICS)[0];
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", (event) => this.hint(event, ""));
  }
  draw() {
    const ctx = this.begin(), value = METRICS[this.metric];
    const batches = [...new Set(this.answers.map((each) => each.batch))].sort((a, b) => a - b);
    const priced = this.answers.filter((each) => each.ms !== undefined);
    const high = Math.max(...priced.map(value), 0) * 1.12 || 1;
    const x = (batch) => LEFT + ((batches.indexOf(batch) + 0.5) / batches.length) * this.plotWidth;
    const y = (at) => this.top + this.plotHeight * (1 - at / high);
    for (const at of ticks(0, high, 5)) this.yTick(ctx, y(at), short(at));
    batches.forEach((batch) => this.xTick(ctx, x(batch), `${batch}`));
    ctx.textAlign = "center";
    ctx.fillText("rows", LEFT + this.plotWidth / 2, this.height - 12);
    this.yLabel(ctx, this.metric);
    this.marks = [];
    for (const [scheme, tone] of Object.entries(SCHEMES)) {
      const own = priced.filter((each) => each.scheme === scheme).sort((a, b) => a.batch - b.batch);
      ctx.strokeStyle = ctx.fillStyle = color(tone);
      ctx.lineWidth = 1.6;
      ctx.beginPath();
      own.forEach((each) => ctx.lineTo(x(each.batch), y(value(each))));
      ctx.stroke();
      own.forEach((each) => {
        ctx.beginPath();
        ctx.arc(x(each.batch), y(value(each)), 4, 0, 7);
        ctx.fill();
        this.marks.push({ x: x(each.batch), y: y(value(each)), answer: each });
      });
    }
    this.frame(ctx);
    if (!priced.length) {
      ctx.fillStyle = color("--dim");
      ctx.textAlign = "center";
      ctx.fillText("nothing here can run; the table says why", LEFT + this.plotWidth / 2, this.top + this.plotHeight / 2);
    }
  }
  hover(event) {
    const box = this.node.getBoundingClientRect(), far = (mark) => Math.hypot(mark.x - event.clientX + box.left, mark.y - event.clientY + box.top);
    const near = (this.marks || []).filter((mark) => far(mark) < 14).sort((a, b) => far(a) - far(b))[0];
    const text = (answer) => `${SCHEME_NAMES[answer.scheme]}, ${answer.batch} rows\n${fixed(answer.ms, 4)} ms, ` +
      `${Math.round(answer.tokens_per_s).toLocaleString("en")} tokens/s, ${fixed(answer.percent_of_roofline, 1)}% of roofline`;
    this.hint(event, near ? text(near.answer) : "");
  }
}

function studyPage(data) {
  const panels = new Map();
  for (const answer of data.answers) {
    const name = [answer.model, answer.chip, answer.routing, `context ${answer.context}`].join(" · ");
    panels.set(name, (panels.get(name) || []).concat(answer));
  }
  const charts = [...panels].map(([name, answers]) => ({ name, chart: new Lines(answers) }));
  const used = Object.keys(SCHEMES).filter((scheme) => data.answers.some((each) => each.scheme === scheme));
  const groups = new Map();
  for (const answer of data.answers) {
    const name = `${answer.model} on ${answer.chip}, routing ${answer.routing}`;
    groups.set(name, (groups.get(name) || []).concat(answer));
  }
  const row = (each) => [`${each.batch}`, `${each.context}`, SCHEME_NAMES[each.scheme]].concat(
    each.ms === undefined ? ["", "", "", "", "", each.reason] :
    [fixed(each.ms, 4), each.routings > 1 ? fixed(each.p95_ms, 4) : "", Math.round(each.tokens_per_s).toLocaleString("en"),
      fixed(each.percent_of_roofline, 1), fixed(each.bound_ms, 4), each.stopped_by]);
  const columns = ["rows", "context", "scheme", "ms", "p95 ms", "tokens/s", "% of roofline", "bound ms", "stopped by"];
  return [
    el("h1", {}, data.title),
    el("p", { class: "dim" }, data.about),
    data.note ? el("p", { class: "note" }, data.note) : null,
    el("div", { class: "bar" }, picker(Object.keys(METRICS), (_, name) => charts.forEach(({ chart }) => {
      chart.metric = name;
      chart.draw();
    })), ...used.map((scheme) => el("span", { class: "key" }, el("i", { style: `background:var(${SCHEMES[scheme]})` }),
      SCHEME_NAMES[scheme]))),
    el("div", { class: "panels" }, ...charts.map(({ name, chart }) => el("div", {}, el("h2", {}, name), chart.node))),
    ...[...groups].flatMap(([name, answers]) => [el("h2", {}, name),
      table(columns, answers.map(row), { class: "answers" })]),
  ];
}

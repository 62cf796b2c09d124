// Line charts in plain SVG. Names are untrusted, so text is only ever set as text nodes.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { top: 8, right: 10, bottom: 24, left: 52 };

/** Make an element with attributes, and children that are nodes or text. */
export function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "circle", "g", "title"].includes(tag);
  const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Return round axis ticks from 0 to `most`. */
function steps(most, wanted = 4) {
  const raw = most / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((times) => times * power >= raw * 0.999) * power;
  return Array.from({ length: Math.ceil(most / step - 1e-9) + 1 }, (_, index) => index * step);
}

/** Return the powers of ten between two numbers, with 2 and 5 between them where there is room. */
function decades(low, high) {
  const ticks = [];
  const between = Math.log10(high / low) < 2.2 ? [1, 2, 5] : [1];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const times of between) {
      const tick = times * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks;
}

function linear(values, format) {
  const most = Math.max(...values, 0) || 1;
  const ticks = steps(most);
  const top = ticks[ticks.length - 1];
  return { ticks, at: (value) => Math.max(0, value) / top, format };
}

function logarithmic(values, format) {
  const positive = values.filter((value) => value > 0);
  const high = Math.max(...positive, 1e-9) * 1.15;
  const low = Math.max(Math.min(...positive, high / 20), high / 2e4) / 1.1;
  const span = Math.log(high / low);
  // Zero and negative values are drawn at the bottom.
  return { ticks: decades(low, high), at: (value) => Math.max(0, Math.log(Math.max(value, low) / low) / span), format };
}

/** Return the moving average of each value and up to `reach` before it. */
export function smooth(values, reach = 6) {
  return values.map((value, index) => {
    if (!known(value)) return null;
    const part = values.slice(Math.max(0, index - reach), index + 1).filter(known);
    return part.reduce((sum, one) => sum + one, 0) / part.length;
  });
}

/**
 * A line chart that every `draw({x, series})` draws anew.
 * `x` holds labels, `series` {name, ink, values, style?, raw?}; `raw` is drawn as a faint line.
 */
export class LineChart {
  constructor(host, { name, format, log = false }) {
    Object.assign(this, { host, name, format, log, at: null });
    this.legend = make("ul", { class: "legend" });
    this.plot = make("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart" });
    this.plot.setAttribute("aria-label", `${name}. Left and right arrow keys read single windows.`);
    this.spoken = make("p", { class: "hidden", "aria-live": "polite" });
    this.tip = make("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this.table = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${name}, all numbers` });
    this.details = make("details", {}, make("summary", {}, "Table"), this.table);
    this.details.addEventListener("toggle", () => this.#tabulate());
    this.nothing = make("p", { class: "empty" }, "Shown after two closed windows, by the worker that learns.");
    host.append(this.legend, this.plot, this.nothing, this.spoken, this.details);
    this.#listen();
    new ResizeObserver(() => this.#paint()).observe(host);
  }

  draw({ x, series }) {
    this.x = x;
    this.series = series.filter((one) => one.values.some(known));
    const bare = !this.series.length || x.length < 2;
    this.plot.hidden = this.legend.hidden = this.details.hidden = bare;
    this.nothing.hidden = !bare;
    this.nothing.style.display = bare ? "" : "none";
    if (bare) return;
    this.legend.replaceChildren(...this.series.map((one) => {
      const last = one.values.findLast(known);
      return make("li", {}, make("span", { class: `key ${one.ink} ${one.style ?? ""}`, "aria-hidden": "true" }),
        make("span", {}, one.name), make("b", {}, this.format(last)));
    }));
    this.#paint();
    this.#tabulate();
  }

  #paint() {
    if (!this.series?.length || this.plot.hidden) return;
    const width = Math.max(200, this.host.clientWidth);
    const height = this.plot.firstElementChild?.clientHeight || 220;
    const all = this.series.flatMap((one) => [...one.values, ...(one.raw ?? [])]).filter(known);
    const scale = (this.log ? logarithmic : linear)(all, this.format);
    const inner = { w: width - MARGIN.left - MARGIN.right, h: height - MARGIN.top - MARGIN.bottom };
    const px = (index) => MARGIN.left + (inner.w * index) / (this.x.length - 1);
    const py = (value) => MARGIN.top + inner.h * (1 - Math.min(1, scale.at(value)));
    Object.assign(this, { px, py });
    const latest = this.series.map((one) => `${one.name} ${this.format(one.values.findLast(known))}`).join(", ");
    const svg = make("svg", { role: "img", viewBox: `0 0 ${width} ${height}` },
      make("title", {}, `${this.name}, ${this.x.length} windows from ${this.x[0]} to ${this.x.at(-1)}; latest: ${latest}`));
    for (const tick of scale.ticks) {
      const y = py(tick);
      svg.append(make("line", { class: "gridline", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }),
        make("text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, scale.format(tick)));
    }
    const labels = Math.max(2, Math.min(7, this.x.length, Math.floor(inner.w / 90)));
    for (let label = 0; label < labels; label += 1) {
      const index = Math.round(((this.x.length - 1) * label) / (labels - 1));
      const anchor = label === 0 ? "start" : label === labels - 1 ? "end" : "middle";
      svg.append(make("text", { x: px(index), y: height - 6, "text-anchor": anchor }, this.x[index]));
    }
    for (const one of this.series) {
      if (one.raw) svg.append(make("path", { class: `curve faint ${one.ink}`, d: this.#line(one.raw) }));
      if (one.style === "filled") svg.append(make("path", { class: `area ${one.ink}`, d: this.#area(one.values) }));
    }
    for (const one of this.series.toReversed()) {
      svg.append(make("path", { class: `curve ${one.ink} ${one.style ?? ""}`, d: this.#line(one.values) }));
    }
    this.cross = make("g", {});
    svg.append(this.cross);
    this.plot.replaceChildren(svg, this.tip);
    this.#point();
  }

  #line(values) {
    let path = "";
    let pen = "M";
    values.forEach((value, index) => {
      if (known(value)) path += `${pen}${this.px(index).toFixed(1)} ${this.py(value).toFixed(1)}`;
      pen = known(value) ? "L" : "M";
    });
    return path;
  }

  #area(values) {
    const first = values.findIndex(known);
    const last = values.findLastIndex(known);
    const ground = this.py(0).toFixed(1);
    return `${this.#line(values.map((value) => (known(value) ? value : 0)).slice(0, last + 1))}L${this.px(last).toFixed(1)} ${ground}L${this.px(Math.min(0, first)).toFixed(1)} ${ground}Z`;
  }

  #listen() {
    const move = (event) => {
      const box = this.plot.getBoundingClientRect();
      const share = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
      this.at = Math.min(this.x.length - 1, Math.max(0, Math.round(share * (this.x.length - 1))));
      this.#point();
    };
    const leave = () => { this.at = null; this.#point(); };
    this.plot.addEventListener("pointermove", move);
    this.plot.addEventListener("pointerdown", move);
    this.plot.addEventListener("pointerleave", leave);
    this.plot.addEventListener("blur", leave);
    this.plot.addEventListener("keydown", (event) => {
      const last = this.x.length - 1;
      const at = this.at ?? last;
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
      if (event.key === "Escape") leave();
      if (to === undefined) return;
      event.preventDefault();
      this.at = Math.min(last, Math.max(0, to));
      this.#point();
      this.spoken.textContent = [this.x[this.at], ...this.#read(this.at).map(([one, text]) => `${one.name} ${text}`)].join(", ");
    });
  }

  #read(index) {
    return this.series.map((one) => [one, this.format((one.raw ?? one.values)[index])]);
  }

  #point() {
    if (this.at !== null && this.at >= this.x.length) this.at = this.x.length - 1;
    this.tip.hidden = this.at === null;
    this.cross.replaceChildren();
    if (this.at === null) return;
    const x = this.px(this.at);
    this.cross.append(make("line", { class: "cross", x1: x, x2: x, y1: MARGIN.top, y2: this.py(0) }));
    for (const one of this.series) {
      const value = (one.raw ?? one.values)[this.at];
      if (known(value)) this.cross.append(make("circle", { class: `spot ${one.ink}`, cx: x, cy: this.py(value), r: 4.5 }));
    }
    this.tip.replaceChildren(make("span", { class: "quiet" }, this.x[this.at]), ...this.#read(this.at).map(([one, text]) =>
      make("div", {}, make("span", { class: `key ${one.ink} ${one.style ?? ""}` }), one.name, make("b", {}, text))));
    const room = this.plot.clientWidth;
    const left = x + 14 + this.tip.offsetWidth > room ? x - 14 - this.tip.offsetWidth : x + 14;
    this.tip.style.transform = `translate(${Math.max(0, left)}px, 8px)`;
  }

  #tabulate() {
    if (!this.details.open || !this.series?.length) return;
    const head = make("tr", {}, make("th", { scope: "col" }, "Window end"),
      ...this.series.map((one) => make("th", { scope: "col" }, one.name)));
    const rows = this.x.map((label, index) => make("tr", {}, make("th", { scope: "row" }, label),
      ...this.#read(index).map(([, text]) => make("td", {}, text))));
    this.table.replaceChildren(make("table", {}, make("caption", { class: "hidden" }, this.name),
      make("thead", {}, head), make("tbody", {}, ...rows.reverse())));
  }
}

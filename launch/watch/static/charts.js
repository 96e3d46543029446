// Charts of the chosen runs, drawn by uPlot: read, kept up to date, smoothed, grouped by seeds.
//
// Each run's points come once, about a thousand; then only what its file has grown by. Dragging
// over a range asks again for that range alone; a double click goes back to all of it.

import { ask, choose, css, el, fill, labeled, number, seconds } from "./dom.js";

const MOST_POINTS = 6000; // of a run in memory; beyond, it is sampled again
const MOST_METRICS = 40; // of a request
const FEW = 20; // fewer points of a curve are marked, and not smoothed
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]]; // of a chart's lines, in their order
const KEPT = { off: 0, light: 0.6, strong: 0.9 }; // share of the mean so far in each point's own
const WHOLE = [...Array(16).keys()].flatMap((i) => [1, 2, 5].map((one) => one * 10 ** i));

export const settings = { axis: "steps", smoothing: "light", seeds: "grouped" }; // of all views

export class Charts {
  constructor(node, stage, changed, height, ...buttons) {
    this.stage = stage;
    this.height = height;
    this.runs = [];
    this.known = new Map(); // run's key -> {steps, seconds, columns, ...} of the whole run
    this.zoomed = null; // the same for a range, while one is shown
    this.charts = []; // {lines: metric -> what its line is called, most, node, canvas, note, plot}
    const axis = setting("axis",
      [["steps", "steps"], ["seconds", "seconds since the first step"]], () => this.whole());
    const smoothing = setting("smoothing", Object.keys(KEPT).map((name) => [name, name]),
      () => this.draw());
    const seeds = setting("seeds",
      [["grouped", "mean, band from min to max"], ["apart", "each run apart"]], changed);
    this.back = el("button", { id: "zoom-out", onclick: () => this.whole() }, "show all of it");
    this.home = el("div", { class: "charts" });
    this.status = el("div", { id: "curves-status" });
    fill(node, el("p", { class: "bar" }, labeled("x axis", axis), labeled("smoothing", smoothing),
      labeled("seeds", seeds), ...buttons, this.back), this.home, this.status);
    this.resized = () => this.draw();
    addEventListener("resize", this.resized);
  }

  close() {
    removeEventListener("resize", this.resized);
    this.replace([]);
  }

  replace(charts) {
    for (const chart of this.charts) chart.plot?.destroy();
    this.charts = charts;
    fill(this.home, charts.map((chart) => chart.node));
  }

  keys(run) {
    return { run: run.key, stage: this.stage };
  }

  // The titles and topics of the metrics that the runs have.
  async named() {
    const runs = this.runs.map((run) => run.key).slice(-50);
    return { titles: {}, topics: [], ...await ask("metrics", { run: runs, stage: this.stage }) };
  }

  metrics() {
    return [...new Set(this.charts.flatMap((chart) => Object.keys(chart.lines)))].slice(0, MOST_METRICS);
  }

  async fetchAll() {
    this.zoomed = null;
    const got = await Promise.all(this.runs.map((run) => this.fetched(run)));
    this.known = new Map(this.runs.map((run, i) => [run.key, got[i]]));
    this.draw();
  }

  fetched(run, range = {}) {
    return ask("curve", { ...this.keys(run), metric: this.metrics(), ...range });
  }

  // Ask every run for what it has written since; one that was rewound is read anew, and says so.
  async tick(runs) {
    this.runs = this.runs.map((run) => runs.find((one) => one.key === run.key) ?? run);
    if (!this.charts.length) return this.show(this.runs);
    const grown = await Promise.all(this.runs.map((run) => this.more(run)));
    if (grown.some(Boolean)) this.draw();
    else this.sayStatus();
    return undefined;
  }

  async more(run) {
    const known = this.known.get(run.key);
    if (!known || known.error) {
      const found = await this.fetched(run);
      this.known.set(run.key, found);
      return !found.error;
    }
    const { offset, mark } = known;
    const said = await ask("more", { ...this.keys(run), metric: this.metrics(), offset, mark });
    if (this.known.get(run.key) !== known) return false; // it was asked for anew meanwhile
    if (said.error) {
      known.gone = said.error; // what was drawn stays, with the reason why nothing follows
      return false;
    }
    if (said.again || known.gone || known.steps.length > MOST_POINTS) {
      const found = await this.fetched(run);
      const last = known.steps.at(-1);
      if (!found.error && found.steps.at(-1) < last) {
        found.note = `went back from step ${last}: it was resumed from a checkpoint`;
      }
      this.known.set(run.key, found);
      return true;
    }
    if (!said.steps.length) return false;
    known.steps.push(...said.steps);
    known.seconds.push(...said.seconds);
    for (const [name, values] of Object.entries(said.columns)) known.columns[name]?.push(...values);
    Object.assign(known, { offset: said.offset, mark: said.mark });
    known.num_damaged += said.num_damaged;
    return true;
  }

  // A range of the x axis was chosen: of each run the steps within it are asked for.
  async zoom(low, high) {
    const got = await Promise.all(this.runs.map((run) => {
      const [from, to] = this.steps(this.known.get(run.key), low, high);
      return from === null ? { error: "no step there" } : this.fetched(run, { from, to });
    }));
    this.zoomed = new Map(this.runs.map((run, i) => [run.key, got[i]]));
    this.draw();
  }

  steps(known, low, high) {
    if (!known || known.error) return [null, null];
    if (settings.axis === "steps") return [Math.max(0, Math.ceil(low)), Math.floor(Math.max(0, high))];
    const first = known.seconds.findLastIndex((at) => at <= low);
    const after = known.seconds.findIndex((at) => at >= high);
    return [known.steps[Math.max(0, first)], known.steps.at(after)];
  }

  whole() {
    this.zoomed = null;
    this.draw();
  }

  draw() {
    const shown = this.zoomed ?? this.known;
    const ends = [...shown.values()].flatMap((known) => known[settings.axis] ?? [])
      .reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);
    this.range = ends[0] < ends[1] ? ends : [Math.min(ends[0], 0), Math.max(ends[1], 0) + 1];
    for (const chart of this.charts) {
      const every = this.curves(chart, shown);
      const { tables, series, bands } = drawn(every.slice(0, chart.most));
      if (every.length > chart.most) fill(chart.note, `more in Curves: ${every.length - chart.most}`);
      const data = tables.length ? uPlot.join(tables) : [[]];
      const which = JSON.stringify([series, bands, settings.axis, innerWidth]);
      if (chart.plot && chart.which === which) chart.plot.setData(data);
      else this.plot(chart, { series, bands }, data, which);
    }
    this.back.disabled = this.zoomed === null;
    this.sayStatus();
  }

  // Of each line of a chart, and each group of runs that has it, one curve.
  curves(chart, shown) {
    const groups = new Map();
    for (const run of this.runs) groups.set(run.group, [...(groups.get(run.group) ?? []), run]);
    const found = Object.entries(chart.lines).flatMap(([metric, line], place) =>
      [...groups].flatMap(([group, runs]) => {
        const own = runs.map((run) => ({ run, points: points(shown.get(run.key), metric) }))
          .filter(({ points }) => points[0].length);
        const common = own.length > 1 ? together(own.map((one) => one.points)) : null;
        const each = common?.[0].length ? [own] : own.map((one) => [one]);
        return each.map((some) => ({
          line, place, color: runs[0].color, runs: some.map((one) => one.points),
          name: some.length > 1 ? `${group}, ${some.length} runs` : some[0].run.key,
        }));
      }));
    const names = new Set(found.map((curve) => curve.name));
    return found.map((curve) => ({ ...curve, label: names.size > 1 || !curve.line
      ? [curve.name, curve.line].filter(Boolean).join(", ") : curve.line }));
  }

  plot(chart, { series, bands }, data, which) {
    chart.plot?.destroy();
    fill(chart.canvas);
    const scale = { stroke: css("--muted"), font: "11px system-ui, sans-serif",
      grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1, size: 4 } };
    const last = (plot, i) => plot.data[i].findLast((value) => value !== null && value !== undefined);
    const value = (plot, at, i) => number(at ?? last(plot, i), 4);
    const options = {
      width: chart.canvas.clientWidth,
      height: this.height,
      scales: { x: { time: false, range: () => this.range } },
      axes: [{ ...scale, size: 28, ...(settings.axis === "steps" ? { incrs: WHOLE } : {}) },
        { ...scale, size: 56, values: (_, ticks) => ticks.map((tick) => number(tick, 4)) }],
      series: [{ label: settings.axis, value }, ...series.map((one) => ({ ...one, value, spanGaps: true }))],
      bands,
      legend: { markers: { dash: (plot, i) => (plot.series[i].dash?.length ? "dashed" : "solid") } },
      cursor: {
        y: false,
        drag: { x: true, y: false, setScale: false },
        // Only the pointer is shared: a range that is dragged in one chart is asked for once.
        sync: { key: "pointer", filters: { pub: (type) => /^mouse(move|leave)/.test(type) } },
        points: { size: (plot, i) => (plot.series[i].class ? 0 : 6) },
      },
      hooks: {
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width < 4) return;
          this.zoom(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
        setSeries: [(plot, i, { show }) => { // what lies beneath a curve is hidden with it
          if (show === undefined || i === null || plot.series[i].class) return;
          for (const beneath of plot.series[i].parts ?? []) plot.setSeries(beneath, { show });
        }],
      },
    };
    chart.which = which;
    chart.plot = new uPlot(options, data, chart.canvas);
    chart.plot.over.addEventListener("dblclick", () => this.whole());
  }

  sayStatus() {
    const lines = this.runs.map((run) => {
      const known = (this.zoomed ?? this.known).get(run.key);
      const whole = this.known.get(run.key);
      if (!known || !whole) return null;
      if (known.error) return el("p", {}, `${run.key}: ${known.error}`);
      const last = whole.steps.at(-1);
      const said = [
        last === undefined ? "no step yet" : `last step ${last} at ${seconds(whole.seconds.at(-1))}`,
        `${known.steps.length} points${known.is_whole ? "" : ", evenly spaced: zoom in for each step"}`,
        known.num_damaged ? `${known.num_damaged} damaged lines are left out` : null,
        whole.note, whole.gone ? `nothing follows: ${whole.gone}` : null,
        run.state === "running" ? null : `${run.state}: ${run.why ?? ""}`,
      ];
      return el("p", {}, `${run.key}: ${said.filter(Boolean).join("; ")}`);
    });
    fill(this.status, lines.length ? lines : el("p", {}, "choose a run in the list"));
  }
}

function setting(name, options, then) {
  const select = choose(el("select", { id: name }), options, settings[name]);
  settings[name] = select.value;
  select.onchange = () => { settings[name] = select.value; then(); };
  return select;
}

// The points of a metric, without the steps that lack it.
function points(known, metric) {
  const values = known?.columns?.[metric] ?? [];
  const at = [...values.keys()].filter((i) => values[i] !== null);
  return [at.map((i) => known[settings.axis][i]), at.map((i) => values[i])];
}

// Means of the points so far, the newest weighing most; the first are not drawn towards zero. A
// few points, such as those of evaluations, stay as they are.
function smoothed([xs, ys]) {
  const kept = ys.length < FEW ? 0 : KEPT[settings.smoothing];
  let [sum, weight] = [0, 0];
  return [xs, ys.map((y) => {
    sum = kept * sum + (1 - kept) * y;
    weight = kept * weight + (1 - kept);
    return sum / weight;
  })];
}

// Mean, least and most of several runs, as far as all of them reach; between its points a run is
// on the line between them.
function together(runs) {
  const first = Math.max(...runs.map(([xs]) => xs[0]));
  const last = Math.min(...runs.map(([xs]) => xs.at(-1)));
  const xs = [...new Set(runs.flatMap(([own]) => own))].filter((x) => x >= first && x <= last)
    .sort((a, b) => a - b);
  const each = runs.map(([own, ys]) => {
    let i = 0;
    return xs.map((x) => {
      while (own[i] < x) i += 1;
      return own[i] === x ? ys[i]
        : ys[i - 1] + ((ys[i] - ys[i - 1]) * (x - own[i - 1])) / (own[i] - own[i - 1]);
    });
  });
  const at = xs.map((_, i) => each.map((ys) => ys[i]));
  return [xs, at.map((all) => all.reduce((a, b) => a + b) / all.length),
    at.map((all) => Math.min(...all)), at.map((all) => Math.max(...all))];
}

// What uPlot draws of curves: each with its runs' own points faint beneath it, and its band.
function drawn(curves) {
  const tables = [], series = [], bands = [];
  const add = (table, ...more) => { tables.push(table); series.push(...more); };
  const beneath = { class: "beneath", points: { show: false } };
  for (const { runs, label, color, place } of curves) {
    const parts = [];
    const dash = DASHES[place % DASHES.length];
    if (runs.length > 1 || settings.smoothing !== "off") {
      for (const own of runs) {
        add(own, { ...beneath, stroke: `${color}${runs.length > 1 ? 30 : 50}`, width: 1 });
        parts.push(series.length);
      }
    }
    const shown = runs.map(smoothed);
    const main = runs.length > 1 ? together(shown) : shown[0];
    const marks = { show: main[0].length < FEW, size: 4 };
    add(main, { label, stroke: color, width: 1.75, dash, parts, points: marks });
    if (runs.length > 1) {
      series.push({ ...beneath, width: 0 }, { ...beneath, width: 0 });
      bands.push({ series: [series.length, series.length - 1], fill: `${color}38` });
      parts.push(series.length - 1, series.length);
    }
  }
  return { tables, series, bands };
}

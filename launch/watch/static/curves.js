// Curves of the chosen runs, one chart per metric, drawn by uPlot.
//
// Each run's points come once, about a thousand; then only what its file has grown by. Dragging
// over a range asks again for that range alone; a double click goes back to all of it.

import { ask, choose, el, fill, labeled, number, seconds } from "./dom.js";

const MOST_POINTS = 6000; // of a run in memory; beyond, it is sampled again
const FIRST = [/reward.*\/mean$/, /return/, /accuracy/, /\/loss$/, /cross_entropy/];
const kept = { metrics: [], axis: "steps" }; // what was chosen stays from view to view

export class Curves {
  constructor(node, stage) {
    this.stage = stage;
    this.runs = [];
    this.known = new Map(); // run's key -> {points, seconds, ...} of the whole run
    this.zoomed = null; // the same for a range, while one is shown
    this.charts = [];
    this.axis = el("select", { id: "axis" });
    choose(this.axis, [["steps", "steps"], ["seconds", "seconds since the first step"]], kept.axis);
    this.axis.onchange = () => { kept.axis = this.axis.value; this.whole(); };
    this.add = el("button", { id: "add-chart", onclick: () => this.another() }, "another chart");
    this.back = el("button", { id: "zoom-out", onclick: () => this.whole() }, "show all of it");
    this.home = el("div", { class: "charts" });
    this.status = el("div", { id: "curves-status" });
    fill(node, el("p", { class: "bar" }, labeled("x axis", this.axis), this.add, this.back),
      this.home, this.status);
    this.resized = () => this.draw();
    addEventListener("resize", this.resized);
  }

  close() {
    removeEventListener("resize", this.resized);
    for (const chart of this.charts) chart.plot?.destroy();
  }

  async show(runs) {
    this.runs = runs;
    const named = await Promise.all(runs.map((run) => ask("metrics", this.keys(run))));
    this.names = [...new Set(named.flatMap((said) => said.metrics ?? []))].sort();
    kept.metrics = kept.metrics.filter((name) => this.names.includes(name));
    if (!kept.metrics.length) kept.metrics = this.preferred().slice(0, 2);
    this.charts = kept.metrics.map((metric) => this.chart(metric));
    fill(this.home, this.charts.map((chart) => chart.node));
    await this.fetchAll();
  }

  keys(run) {
    return { run: run.key, stage: this.stage };
  }

  preferred() {
    const found = FIRST.map((one) => this.names.find((name) => one.test(name))).filter(Boolean);
    return found.length ? found : this.names.slice(0, 1);
  }

  chart(metric) {
    const select = choose(el("select", { class: "metric" }),
      this.names.map((name) => [name, name]), metric);
    const chart = { metric, select, plot: null, canvas: el("div") };
    const drop = el("button", { title: "remove this chart" }, "remove");
    drop.onclick = () => {
      this.charts = this.charts.filter((other) => other !== chart);
      chart.plot?.destroy();
      chart.node.remove();
      this.remember();
    };
    select.onchange = () => {
      chart.metric = select.value;
      this.remember();
      this.fetchAll();
    };
    chart.node = el("section", {}, el("p", { class: "bar" }, select, drop), chart.canvas);
    return chart;
  }

  another() {
    const others = this.names.filter((name) => !kept.metrics.includes(name));
    if (!others.length) return;
    const chart = this.chart(others[0]);
    this.charts.push(chart);
    this.home.append(chart.node);
    this.remember();
    this.fetchAll();
  }

  remember() {
    kept.metrics = this.charts.map((chart) => chart.metric);
  }

  metrics() {
    return [...new Set(this.charts.map((chart) => chart.metric))];
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
    if (this.axis.value === "steps") return [Math.max(0, Math.ceil(low)), Math.floor(Math.max(0, high))];
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
    const axis = this.axis.value;
    const drawn = this.runs.filter((run) => shown.get(run.key)?.steps?.length);
    for (const chart of this.charts) {
      const tables = drawn.map((run) => {
        const known = shown.get(run.key);
        return [known[axis], known.columns[chart.metric] ?? known.steps.map(() => null)];
      });
      const data = tables.length ? uPlot.join(tables) : [[]];
      const which = JSON.stringify([drawn.map((run) => run.key), axis, innerWidth]);
      if (chart.plot && chart.which === which) chart.plot.setData(data);
      else this.plot(chart, drawn, data, which);
    }
    this.back.disabled = this.zoomed === null;
    this.sayStatus();
  }

  plot(chart, drawn, data, which) {
    chart.plot?.destroy();
    fill(chart.canvas);
    const series = drawn.map((run) => ({
      label: run.key, stroke: run.color, width: 1.5, spanGaps: true, points: { show: data[0].length < 60 },
    }));
    const options = {
      width: Math.max(320, this.home.clientWidth - 24),
      height: 280,
      scales: { x: { time: false } },
      axes: [{}, { size: 80, values: (_, ticks) => ticks.map((tick) => number(tick, 4)) }],
      series: [{ label: this.axis.value }, ...series],
      cursor: { drag: { x: true, y: false, setScale: false } },
      hooks: {
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width < 4) return;
          this.zoom(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
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
      // The newest value of each: what is measured now and then is not in every line.
      const newest = (name) => whole.columns[name]?.findLast((value) => value !== null);
      const values = this.metrics().map((name) => `${name} ${number(newest(name))}`);
      const said = [
        last === undefined ? "no step yet" : `last step ${last} at ${seconds(whole.seconds.at(-1))}`,
        ...values,
        `${known.steps.length} points${known.is_whole ? "" : ", evenly spaced: zoom in for each step"}`,
        known.num_damaged ? `${known.num_damaged} damaged lines are left out` : null,
        whole.note, whole.gone ? `nothing follows: ${whole.gone}` : null,
        run.state === "running" ? null : `${run.state}: ${run.why ?? ""}`,
      ];
      return el("p", {}, `${run.key}: ${said.filter(Boolean).join("; ")}`);
    });
    fill(this.status, lines.length ? lines : el("p", {}, "choose a run on the left"));
  }
}

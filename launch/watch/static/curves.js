// Any metrics of the chosen runs, one chart each.

import { Charts } from "./charts.js";
import { choose, el, fill } from "./dom.js";

const kept = { metrics: [] }; // what was chosen stays from view to view

export class Curves extends Charts {
  constructor(node, stage, changed) {
    const add = el("button", { id: "add-chart", onclick: () => this.another() }, "another chart");
    super(node, stage, changed, 280, add);
  }

  async show(runs) {
    this.runs = runs;
    const { titles, topics } = await this.named();
    this.titles = titles;
    this.names = Object.keys(titles);
    kept.metrics = kept.metrics.filter((name) => this.names.includes(name));
    const first = topics.map(({ lines }) => Object.keys(lines)[0]);
    if (!kept.metrics.length) kept.metrics = [...first, ...this.names].slice(0, 2);
    this.charts = kept.metrics.map((metric) => this.chart(metric));
    fill(this.home, this.charts.map((chart) => chart.node));
    await this.fetchAll();
  }

  chart(metric) {
    const select = choose(el("select", { class: "metric" }),
      this.names.map((name) => [name, this.titles[name]]), metric);
    const key = el("code", { class: "absent" }, metric);
    const chart = { lines: { [metric]: "" }, plot: null, canvas: el("div") };
    const drop = el("button", { title: "remove this chart" }, "remove");
    drop.onclick = () => {
      this.charts = this.charts.filter((other) => other !== chart);
      chart.plot?.destroy();
      chart.node.remove();
      this.remember();
    };
    select.onchange = () => {
      chart.lines = { [select.value]: "" };
      fill(key, select.value);
      this.remember();
      this.fetchAll();
    };
    chart.node = el("section", {}, el("p", { class: "bar" }, select, drop), key, chart.canvas);
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
    kept.metrics = this.metrics();
  }
}

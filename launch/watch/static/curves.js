// Any metrics of the chosen runs, one chart each.

import { Charts } from "./charts.js";
import { choose, el } from "./dom.js";

const kept = { metrics: [] }; // what was chosen stays from view to view

export class Curves extends Charts {
  constructor(node, stage, changed) {
    const add = el("button", { id: "add-chart", onclick: () => this.another() }, "another chart");
    super(node, stage, changed, 280, add);
  }

  async show(runs) {
    this.runs = runs;
    const { titles, topics } = await this.named();
    this.names = Object.keys(titles);
    kept.metrics = kept.metrics.filter((name) => this.names.includes(name));
    const first = topics.map(({ lines }) => Object.keys(lines)[0]);
    if (!kept.metrics.length) kept.metrics = [...first, ...this.names].slice(0, 2);
    this.replace(kept.metrics.map((metric, place) => this.chart(metric, place, titles)));
    await this.fetchAll();
  }

  chart(metric, place, titles) {
    const select = choose(el("select", { class: "metric" }), Object.entries(titles), metric);
    select.onchange = () => this.put(place, select.value);
    const drop = el("button", { title: "remove this chart", onclick: () => this.put(place) }, "remove");
    const canvas = el("div");
    const node = el("section", {}, el("p", { class: "bar" }, select, drop),
      el("code", { class: "absent" }, metric), canvas);
    return { lines: { [metric]: "" }, node, canvas };
  }

  // Draw another metric, or none, in place of a chart.
  put(place, ...metrics) {
    kept.metrics.splice(place, 1, ...metrics);
    this.show(this.runs);
  }

  another() {
    const next = this.names.find((name) => !kept.metrics.includes(name));
    if (next) this.put(kept.metrics.length, next);
  }
}

// The last steps of a run: who did what when, each node's predicted and measured time, its graph.

import { ask, choose, color, el, fill, labeled, seconds, table } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const [LEFT, ROW, WIDTH] = [150, 24, 1000];

export class Timeline {
  constructor(node, stage) {
    this.stage = stage;
    this.run = el("select", { id: "timeline-run", onchange: () => this.load() });
    this.steps = choose(el("select", { onchange: () => this.load() }),
      ["1", "3", "10", "30"].map((count) => [count, count]), "3");
    this.home = el("div", { id: "timeline" });
    fill(node, el("p", { class: "bar" }, labeled("run", this.run), labeled("steps", this.steps)),
      this.home);
  }

  async show(runs) {
    choose(this.run, runs.map((run) => [run.key, run.key]));
    if (runs.length) await this.load();
    else fill(this.home, "choose a run in the list");
  }

  async tick() {
    if (this.run.value) await this.load();
  }

  async load() {
    const keys = { run: this.run.value, stage: this.stage };
    const said = await ask("timeline", { ...keys, steps: this.steps.value });
    const now = JSON.stringify([keys, said]);
    if (now === this.shown) return;
    this.shown = now;
    if (said.error) {
      fill(this.home, el("p", { class: "absent" }, `there is no timeline: ${said.error}`));
      return;
    }
    fill(this.home, this.heading(said), drawn(said), this.nodes(said), this.graph(said, keys));
  }

  heading(said) {
    const [first, last] = [said.steps[0], said.steps.at(-1)];
    if (first === undefined) return el("p", { class: "absent" }, "no task has ended yet");
    const length = Math.max(...said.slices.map((one) => one.start_s + one.duration_s));
    const whole = `steps ${first} to ${last}, ${seconds(length)}`;
    const cut = said.is_cut ? "; only the newest part is read of so long a timeline" : "";
    const predicted = said.predicted_step_s
      ? `; the plan predicts ${seconds(said.predicted_step_s)} per step` : "";
    return el("p", {}, `${whole}${predicted}${cut}`);
  }

  nodes(said) {
    const rows = Object.entries(said.nodes).map(([node, times]) => [node,
      seconds(times.predicted_s), seconds(times.last_s), seconds(times.measured_s)]);
    const head = ["node", "predicted", "these steps", "median of the whole run"];
    const none = Object.values(said.nodes).every((times) => times.predicted_s === null);
    return el("section", {}, el("h3", {}, "Time of each node in a step"), table(head, rows),
      none ? el("p", { class: "absent" }, "its plan predicts nothing: placement was not planned, or " +
        "no calibration fits this machine") : null);
  }

  graph(said, keys) {
    if (!said.has_graph) {
      return el("p", { class: "absent" }, "its folder has no graph.svg: an earlier stage, or an older version");
    }
    const source = `graph?${new URLSearchParams(keys)}`;
    return el("section", {}, el("h3", {}, "Graph of a step"),
      el("img", { src: source, alt: "graph of a step", class: "graph" }));
  }
}

function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function drawn(said) {
  const end = Math.max(1e-9, ...said.slices.map((one) => one.start_s + one.duration_s));
  const names = [...new Set(said.slices.map((one) => one.node))].sort();
  const height = ROW * (said.tracks.length + 1) + ROW * Math.ceil(names.length / 4);
  const top = shape("svg", { viewBox: `0 0 ${LEFT + WIDTH} ${height}`, class: "timeline" });
  said.tracks.forEach((track, i) => {
    const name = `${track.group} ${track.rank}`;
    top.append(shape("text", { x: 4, y: ROW * i + 16 }, name.slice(0, 20)));
  });
  for (const one of said.slices) {
    const box = shape("rect", {
      x: LEFT + (WIDTH * one.start_s) / end, y: ROW * one.track + 2, height: ROW - 4,
      width: Math.max(0.5, (WIDTH * one.duration_s) / end),
      fill: color(names.indexOf(one.node)),
      "fill-opacity": one.step % 2 ? 0.6 : 0.95,
    });
    const chunk = one.chunk === null || one.chunk === undefined ? "" : `, chunk ${one.chunk}`;
    box.append(shape("title", {}, `${one.node}, step ${one.step}${chunk}: ${seconds(one.duration_s)}`));
    top.append(box);
  }
  names.forEach((name, i) => {
    const [x, y] = [LEFT + (i % 4) * 250, ROW * (said.tracks.length + Math.floor(i / 4)) + 6];
    top.append(shape("rect", { x, y, width: 12, height: 12, fill: color(i) }));
    top.append(shape("text", { x: x + 18, y: y + 11 }, name.slice(0, 34)));
  });
  return top;
}

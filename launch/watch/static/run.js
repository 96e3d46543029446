// One run: what it is, how it stands, what was measured. A part that its files lack says why.

import { ask, el, fill, mebibytes, number, table } from "./dom.js";

const TITLES = {
  about: "This run", warnings: "Warnings", suites: "Suites, before and after", memory: "Memory",
  placement: "Placement", events: "Resumed, stopped, restarted", results: "Results",
};

export class Run {
  constructor(node, stage) {
    this.stage = stage;
    this.home = fill(el("div", { id: "abouts" }));
    fill(node, this.home);
  }

  show(runs) {
    return this.tick(runs);
  }

  // Only what has changed is drawn again: who reads or has selected something is not disturbed.
  async tick(runs) {
    const said = await Promise.all(runs.map((run) => ask("run", { run: run.key })));
    const now = JSON.stringify([runs.map((run) => [run.key, run.state]), said]);
    if (now === this.shown) return;
    this.shown = now;
    fill(this.home, runs.length ? runs.map((run, i) => this.one(run, said[i]))
      : "choose a run in the list");
  }

  one(run, said) {
    const head = el("h2", {}, run.key, " ", el("span", { class: "state" }, run.state));
    const why = el("p", {}, run.why ?? "");
    if (said.error) return el("article", {}, head, why, el("p", {}, said.error));
    const parts = Object.entries(TITLES).map(([name, title]) => {
      const part = said[name];
      const shown = part?.absent ? el("p", { class: "absent" }, part.absent) : this.part(name, part);
      return el("section", { class: `part ${name}` }, el("h3", {}, title), shown);
    });
    return el("article", { class: "about" }, head, why, el("div", { class: "parts" }, parts));
  }

  part(name, part) {
    if (name === "memory") return this.memory(part);
    if (name === "placement") return this.placement(part);
    if (name === "warnings") return this.warnings(part);
    return pairs(part);
  }

  warnings(part) {
    const rows = part.rows.map((row) => [
      [row.stage, row.first_step < row.step ? `${row.first_step} to ${row.step}` : row.step]
        .filter((word) => word !== "").join(" "),
      row.node, row.seen, row.means, row.remedy]);
    const left = part.num_warnings - rows.length;
    return el("div", {}, table(["steps", "node", "seen", "what it usually means", "remedy"], rows),
      left ? el("p", {}, `${left} older ones are not shown`) : null);
  }

  memory(part) {
    const rows = Object.entries(part.groups).map(([group, held]) => [
      group, mebibytes(held.peak_bytes), mebibytes(held.capacity_bytes),
      sizes(held.resident_bytes), sizes(held.transient_bytes)]);
    const head = ["group", "predicted peak of its fullest device", "capacity", "always", "per call"];
    return el("div", {},
      rows.length ? table(head, rows) : el("p", { class: "absent" }, "its plan was not predicted"),
      el("p", {}, part.peak_memory_bytes === null || part.peak_memory_bytes === undefined
        ? "what was used is written at the end"
        : `most that all processes of the run used at once: ${mebibytes(part.peak_memory_bytes)}`));
  }

  placement(part) {
    const groups = part.groups.map((group) => [group.name, group.num_ranks ?? 1,
      group.device ?? "cpu", group.tensor_parallel ?? 1, group.pipeline_parallel ?? 1,
      (group.devices ?? []).join(", ")]);
    const head = ["group", "ranks", "device", "tensor parallel", "pipeline parallel", "devices"];
    const nodes = Object.entries(part.nodes ?? {});
    return el("div", {}, table(head, groups), nodes.length ? table(["node", "group"], nodes)
      : el("p", {}, "every node runs in the first group"));
  }
}

function sizes(held) {
  return Object.entries(held).map(([name, size]) => `${name} ${mebibytes(size)}`).join(", ");
}

// Names and values, what is nested by its path.
function pairs(values) {
  const rows = [];
  const walk = (value, at) => {
    if (value !== null && typeof value === "object" && !Array.isArray(value)) {
      for (const [key, inner] of Object.entries(value)) walk(inner, at ? `${at} ${key}` : key);
    } else if (!(Array.isArray(value) && !value.length)) rows.push([at, number(value)]);
  };
  walk(values, "");
  return rows.length ? table(["", ""], rows) : el("p", { class: "absent" }, "nothing");
}

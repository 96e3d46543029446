// What a run said at a step: found, sorted, read, and compared with another step or run.

import { ask, choose, el, fill, labeled, number } from "./dom.js";

const AT_ONCE = 20;
const SORTS = [["step", "order of the file"], ["reward", "reward"], ["advantage", "advantage"],
  ["length", "length"]];

export class Conversations {
  constructor(node, stage) {
    this.stage = stage;
    this.skip = 0;
    this.steps = [];
    const again = () => { this.skip = 0; this.list(); };
    this.run = el("select", { id: "samples-run", onchange: () => this.begin() });
    this.step = el("select", { id: "samples-step", onchange: again });
    this.older = el("button", { onclick: () => this.move(-1) }, "step before");
    this.newer = el("button", { onclick: () => this.move(1) }, "step after");
    this.search = el("input", { id: "samples-search", type: "search", onchange: again });
    this.sort = choose(el("select", { id: "samples-sort", onchange: again }), SORTS);
    this.worst = el("input", { id: "samples-worst", type: "checkbox", onchange: again });
    this.said = el("p", { id: "samples-said" });
    this.home = el("div", { id: "samples" });
    this.rest = el("p", { class: "bar" });
    fill(node,
      el("p", { class: "bar" }, labeled("run", this.run), labeled("step", this.step), this.older,
        this.newer, labeled("text", this.search), labeled("sort by", this.sort),
        labeled("lowest first", this.worst)),
      this.said, this.home, this.rest);
  }

  async show(runs) {
    this.runs = runs;
    choose(this.run, runs.map((run) => [run.key, run.key]));
    if (runs.length) await this.begin();
    else fill(this.said, "choose a run in the list");
  }

  keys() {
    return { run: this.run.value, stage: this.stage };
  }

  async begin() {
    fill(this.home);
    if (await this.learn()) {
      this.step.value = String(this.steps.at(-1));
      await this.list();
    }
  }

  // Which steps there are now; whoever reads the last one stays there when newer ones come.
  async learn() {
    const said = await ask("steps", this.keys());
    if (said.error) {
      fill(this.said, said.error);
      return false;
    }
    this.steps = said.steps;
    choose(this.step, said.steps.map((step) => [String(step), String(step)]), this.step.value);
    return true;
  }

  async tick(runs) {
    this.runs = runs;
    if (!this.run.value) return;
    const [before, there] = [this.steps.at(-1), this.steps.length];
    if (!there) await this.begin();
    else if (await this.learn() && this.steps.at(-1) !== before) {
      fill(this.said, `${this.heading}; step ${this.steps.at(-1)} is there now`);
    }
  }

  move(by) {
    const place = this.steps.indexOf(Number(this.step.value)) + by;
    if (place < 0 || place >= this.steps.length) return;
    this.step.value = String(this.steps[place]);
    this.skip = 0;
    this.list();
  }

  async list() {
    const asked = {
      ...this.keys(), step: this.step.value, search: this.search.value, sort: this.sort.value,
      worst: this.worst.checked ? 1 : 0, skip: this.skip, limit: AT_ONCE,
    };
    const said = await ask("samples", asked);
    if (said.error) {
      fill(this.home);
      fill(this.said, said.error);
      return;
    }
    this.heading = `${said.num_found} samples of step ${this.step.value}`;
    fill(this.said, this.heading);
    fill(this.home, said.samples.map((sample) => this.card(sample)));
    const more = this.skip + said.samples.length;
    fill(this.rest,
      this.skip ? el("button", { onclick: () => this.page(-AT_ONCE) }, "before these") : null,
      more < said.num_found ? el("button", { onclick: () => this.page(AT_ONCE) }, "after these") : null);
  }

  page(by) {
    this.skip = Math.max(0, this.skip + by);
    this.list();
  }

  card(sample) {
    const parts = Object.entries(sample.parts).map(([name, value]) => `${name} ${number(value)}`);
    const said = [
      sample.reward === null ? null : `reward ${number(sample.reward)}`,
      sample.advantage === null ? null : `advantage ${number(sample.advantage)}`,
      `${sample.length} tokens${sample.finished === false ? ", cut off" : ""}`,
      `version ${sample.version}${sample.last_version === null ? "" : ` to ${sample.last_version}`}`,
      sample.prompt_id === null ? null : `prompt ${sample.prompt_id}`,
      ...parts,
    ].filter(Boolean).join(", ");
    const below = el("div", { class: "comparison" });
    const compare = el("button", { class: "compare", onclick: () => this.compare(sample, below) },
      "compare");
    const turns = sample.turns.flatMap((turn, i) => [
      el("h4", {}, `turn ${i}${turn.reward ? `, reward ${number(turn.reward)}` : ""}`),
      el("pre", { class: "response" }, turn.said),
      turn.shown.trim() ? el("pre", { class: "prompt" }, turn.shown) : null,
    ]);
    return el("article", { class: "sample" }, el("h3", {}, said, " ", compare),
      el("pre", { class: "prompt" }, sample.prompt),
      turns.length ? turns : el("pre", { class: "response" }, sample.response), below);
  }

  // Where else the same prompt was answered, and what differs there.
  async compare(sample, below) {
    const which = { ...this.keys(), step: sample.step, number: sample.number };
    const run = choose(el("select"), this.runs.map((one) => [one.key, one.key]), this.run.value);
    const step = el("select", { class: "step2" });
    const other = el("select", { class: "number2" });
    const said = el("p");
    const text = el("pre", { class: "diff" });
    const asked = () => ({ ...which, run2: run.value, stage2: this.stage });
    const differ = async (number2) => {
      if (step.value === "") return;
      const found = await ask("diff", { ...asked(), step2: step.value, number2 });
      if (found.error) {
        fill(said, found.error);
        fill(text);
        return;
      }
      choose(other, found.others.map((row) => [String(row.number),
        `sample ${row.number}, reward ${number(row.reward)}`]), String(found.right.number));
      fill(said, `only step ${found.left.step} `, el("del", {}, "struck out"), `, only step ${found.right.step} `, el("ins", {}, "underlined"));
      fill(text, found.segments.map(([who, piece]) => ({
        both: () => el("span", {}, piece), left: () => el("del", {}, piece),
        right: () => el("ins", {}, piece),
      })[who]()));
    };
    const look = async () => {
      fill(said, "looking for the prompt...");
      fill(text);
      const found = await ask("elsewhere", asked());
      if (found.error) {
        fill(said, found.error);
        return;
      }
      const steps = found.steps.filter((one) => run.value !== this.run.value || one !== sample.step);
      const own = run.value === this.run.value ? [[String(sample.step), "this step"]] : [];
      choose(step, [...steps.map((one) => [String(one), `step ${one}`]), ...own]);
      fill(said, `${steps.length} other steps have this prompt`, found.num_read < found.num_steps
        ? `, of the ${found.num_read} nearest of ${found.num_steps} that were looked through` : "");
      if (step.value !== "") await differ();
    };
    run.onchange = look;
    step.onchange = () => differ();
    other.onchange = () => differ(other.value);
    fill(below, el("p", { class: "bar" }, labeled("with run", run), step, other), said, text);
    await look();
  }
}

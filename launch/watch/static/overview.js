// A chart for each topic that the chosen runs have, and what the newest run says best and worst.

import { Charts } from "./charts.js";
import { ask, el, fill, number } from "./dom.js";

const LOOK_EVERY = 10; // ticks, for topics that were not there before
const MOST_CURVES = 8; // of a chart

export class Overview extends Charts {
  constructor(node, stage, changed) {
    super(node, stage, changed, 170);
    this.samples = el("section", { id: "extremes" });
    this.ticks = 0;
  }

  async show(runs) {
    this.runs = runs;
    const { topics } = await this.named();
    this.topics = JSON.stringify(topics);
    this.replace(topics.map(({ title, lines }) => {
      const first = Object.entries(lines).slice(0, MOST_CURVES);
      const only = first.length === 1 && first[0][1] ? `: ${first[0][1]}` : "";
      if (only) first[0][1] = ""; // the title says it
      const [canvas, note] = [el("div"), el("p", { class: "absent" })];
      const head = el("h3", { title: Object.keys(lines).join("\n") }, title, only);
      const node = el("section", {}, head, canvas, note);
      return { lines: Object.fromEntries(first), most: MOST_CURVES, node, canvas, note };
    }));
    this.home.firstChild?.after(this.samples);
    await Promise.all([this.fetchAll(), this.extremes()]);
  }

  async tick(runs) {
    this.ticks += 1;
    if (this.ticks % LOOK_EVERY === 0) {
      const { topics } = await this.named();
      if (topics.length && JSON.stringify(topics) !== this.topics) return this.show(this.runs);
    }
    await Promise.all([super.tick(runs), this.extremes()]);
    return undefined;
  }

  // The best and the worst response of the newest step, of the newest run that keeps samples.
  async extremes() {
    for (const run of [...this.runs].reverse()) {
      const step = (await ask("steps", this.keys(run))).steps?.at(-1);
      if (step === undefined) continue;
      const now = `${run.key}, step ${step}`;
      if (now === this.now) return;
      const said = await Promise.all([0, 1].map((worst) =>
        ask("samples", { ...this.keys(run), step, sort: "reward", worst, limit: 1 })));
      const found = said.map((one) => one.samples?.[0]);
      if (typeof found[0]?.reward !== "number") continue;
      this.now = now;
      fill(this.samples, el("h3", { title: now }, `Responses of step ${step}`),
        found.map((sample, i) => el("article", {},
          el("h4", {}, `${i ? "worst" : "best"}: reward ${number(sample.reward, 4)}`),
          el("pre", { class: "prompt" }, sample.prompt),
          el("pre", { class: "response" }, sample.turns.length
            ? sample.turns.map((turn) => `${turn.said}\n${turn.shown}`).join("\n") : sample.response))),
        el("h4", {}, now));
      return;
    }
    if (!this.now) fill(this.samples);
  }
}

// The page: the list of runs, the five views, and one clock that asks for what is new.

import { settings } from "./charts.js";
import { Curves } from "./curves.js";
import { Conversations } from "./conversations.js";
import { ask, color, el, fill } from "./dom.js";
import { Overview } from "./overview.js";
import { Run } from "./run.js";
import { Timeline } from "./timeline.js";

const EVERY_MS = 1000;
const NARROW = 700; // pixels, as in style.css: a phone, on which the list of runs is folded
const AT_FIRST = 5; // runs that are chosen before a person has chosen any
const VIEWS = { overview: Overview, curves: Curves, samples: Conversations, run: Run, timeline: Timeline };

const page = {
  runs: new Map(), // key -> what the server's list says of it; one that is gone stays, and says so
  chosen: new Set(),
  name: "overview",
  view: null,
  stage: "",
};

// Runs with the group that they are drawn in, which is their own unless seeds are grouped.
function drawnRuns() {
  const runs = [...page.runs.values()]
    .map((run) => ({ ...run, group: (settings.seeds === "grouped" && run.group) || run.key }));
  const groups = [...new Set(runs.map((run) => run.group))];
  return runs.map((run) => ({ ...run, color: color(groups.indexOf(run.group)) }));
}

function chosen() {
  return drawnRuns().filter((run) => page.chosen.has(run.key));
}

function chooseSome() {
  if (!page.chosen.size) page.chosen = new Set([...page.runs.keys()].slice(-AT_FIRST));
}

function remember() {
  const kept = new URLSearchParams({ view: page.name, stage: page.stage, ...settings });
  for (const key of page.chosen) kept.append("run", key);
  history.replaceState(null, "", `#${kept}`);
}

function recall() {
  const kept = new URLSearchParams(location.hash.slice(1));
  if (kept.get("view") in VIEWS) page.name = kept.get("view");
  page.stage = kept.get("stage") ?? "";
  for (const name of Object.keys(settings)) settings[name] = kept.get(name) ?? settings[name];
  page.chosen = new Set(kept.getAll("run"));
}

// What changed since the list was asked for last, in words; a run may end or vanish at any time.
function learn(listed) {
  const said = [];
  const there = new Map(listed.map((run) => [run.key, run]));
  for (const [key, run] of page.runs) {
    if (!there.has(key) && run.state !== "gone") {
      there.set(key, { ...run, state: "gone", why: "its folder is no longer there" });
    }
    const now = there.get(key) ?? run;
    if (now.state !== run.state) said.push(`${key}: was ${run.state}, is ${now.state} (${now.why})`);
    page.runs.set(key, now);
  }
  for (const [key, run] of there) page.runs.set(key, run);
  if (said.length) say(said.join("; "));
}

function say(text) {
  document.getElementById("said").textContent = text;
}

function listRuns() {
  const lines = drawnRuns().reverse().map((run) => {
    const box = el("input", { type: "checkbox", checked: page.chosen.has(run.key) });
    box.onchange = () => {
      if (box.checked) page.chosen.add(run.key);
      else page.chosen.delete(run.key);
      changed();
    };
    const mark = el("span", { class: "mark" });
    mark.style.background = run.color;
    const state = el("span", { class: `state ${run.state.replace(" ", "-")}`, title: run.why ?? "" });
    fill(state, run.state);
    return el("label", { class: "run" }, box, mark, el("span", { class: "key" }, run.key), state);
  });
  const home = document.getElementById("runs");
  fill(home, el("summary", {}, `Runs (${page.chosen.size} of ${lines.length})`),
    lines.length ? lines : "no run yet: this page waits for one");
}

function listViews() {
  const stages = [...new Set(chosen().flatMap((run) => run.stages ?? []))];
  const stage = el("select", { title: "stage" });
  fill(stage, el("option", { value: "" }, "main stage"),
    stages.map((name) => el("option", { value: name }, name)));
  stage.value = stages.includes(page.stage) ? page.stage : "";
  page.stage = stage.value;
  stage.onchange = () => { page.stage = stage.value; changed(); };
  const buttons = Object.keys(VIEWS).map((name) => {
    const button = el("button", { id: `view-${name}`, class: name === page.name ? "chosen" : "" });
    button.onclick = () => { page.name = name; changed(); };
    return fill(button, name[0].toUpperCase() + name.slice(1));
  });
  fill(document.getElementById("views"), buttons, stages.length ? stage : null);
}

// Whatever is shown is shown anew: the view, its runs or their stage have changed.
function changed() {
  listRuns();
  listViews();
  remember();
  page.view?.close?.();
  page.view = new VIEWS[page.name](document.getElementById("view"), page.stage, changed);
  page.view.show(chosen()).catch(lost);
}

let isLost = false;

function lost(error) {
  isLost = true;
  say(`nothing new can be shown: ${error.message}; was penstock watch ended?`);
}

async function tick() {
  try {
    const before = JSON.stringify([...page.runs]);
    learn((await ask("runs")).runs);
    if (isLost) {
      isLost = false;
      say("the server answers again");
    }
    if (JSON.stringify([...page.runs]) !== before) {
      if (before === "[]") {
        chooseSome();
        changed();
      }
      listRuns();
      listViews();
    }
    remember();
    await page.view.tick(chosen());
  } catch (error) {
    lost(error);
  }
  setTimeout(tick, EVERY_MS);
}

async function begin() {
  recall();
  try {
    learn((await ask("runs")).runs);
  } catch (error) {
    lost(error);
  }
  for (const key of page.chosen) if (!page.runs.has(key)) page.chosen.delete(key);
  chooseSome();
  document.getElementById("runs").open = innerWidth > NARROW;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  changed();
  setTimeout(tick, EVERY_MS);
}

begin();

"""What the plan's page looks like, and what it does under the pointer: CSS and a little script.

Both are written into the page, so that it is one file that needs no network. They hold no character
that XML would mind, so that the page can be parsed by any reader of XML.
"""

from __future__ import annotations

NUM_COLORS = 8  # colors of roles, `--c0` and so on; more roles begin again

# parts of memory with a color of their own, `--weights` and so on; others are gray
PART_COLORS = (
    "weights", "gradients", "optimizer", "activations", "logits", "kv_cache", "transfer",
)  # fmt: skip

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --text: #1a1f27; --soft: #5b6573; --line: #dfe3e9;
  --lane: #eef1f5; --on: #ffffff; --limit: #c8323e; --good: #1f7a45;
  --c0: #2f6fd6; --c1: #b85c00; --c2: #1f7a45; --c3: #7a4fc9;
  --c4: #c8323e; --c5: #0f7d8a; --c6: #b83c7d; --c7: #855a33;
  --weights: #3d5a80; --gradients: #6b8db5; --optimizer: #9db4cf; --activations: #e08e45;
  --logits: #c0503a; --kv_cache: #5f9150; --transfer: #b09a2f; --other: #8b8f96;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151a; --card: #1a1f27; --text: #e8ebf0; --soft: #9aa5b4; --line: #2d343f;
    --lane: #232a34; --on: #10141a; --limit: #ff8a8f; --good: #7fd6a2;
    --c0: #82b1ff; --c1: #ffb066; --c2: #7fd6a2; --c3: #c3a6ff;
    --c4: #ff9a9f; --c5: #6fd3de; --c6: #f3a0cc; --c7: #d9b38c;
    --weights: #7e9cc4; --gradients: #5b7699; --optimizer: #42566f; --activations: #e9a466;
    --logits: #d9705b; --kv_cache: #86b877; --transfer: #cbb85a; --other: #8b8f96;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; padding: 28px 20px 60px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
main { max-width: 1200px; margin: 0 auto; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 0 0 2px; }
p { margin: 0; }
.soft { color: var(--soft); }
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 20px; margin-top: 16px;
}
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px;
  margin-top: 18px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 16px; }
.tile b { display: block; font-size: 25px; line-height: 1.25; font-weight: 650; }
.tile span { color: var(--soft); font-size: 13px; }
.scroll { overflow-x: auto; margin-top: 10px; }
svg { display: block; min-width: 900px; width: 100%; height: auto; }
svg text { fill: var(--text); font-size: 13px; }
svg text.soft { fill: var(--soft); font-size: 12px; }
svg text.name { font-weight: 600; }
svg text.on { fill: var(--on); font-weight: 600; pointer-events: none; }
svg text.thin { font-weight: 400; font-size: 12px; }
.lane { fill: var(--lane); }
.grid { stroke: var(--line); stroke-width: 1; }
.edge { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 4; }
.limit { stroke: var(--limit); stroke-width: 2; }
.held { stroke: var(--text); stroke-width: 1; opacity: .55; }
.critical { stroke: var(--text); stroke-width: 2; }
[data-tip] { outline: none; }
.dim [data-node]:not(.hot) { opacity: .25; }
table { border-collapse: collapse; width: 100%; margin-top: 10px; font-size: 14px; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 13px; }
th, td { padding: 6px 18px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
#nodes td:not(:last-child), #why td:first-child, #why td:nth-child(3) { white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-top: 8px; font-size: 13px;
  color: var(--soft); }
.path { display: flex; flex-wrap: wrap; gap: 6px; margin-top: 10px; align-items: center; }
.path span { border-radius: 6px; padding: 3px 9px; color: var(--on); font-size: 13px;
  font-weight: 600; }
.path i { color: var(--soft); font-style: normal; font-size: 13px; }
#tip {
  position: fixed; z-index: 9; display: none; max-width: 340px; padding: 9px 12px;
  white-space: pre-line; pointer-events: none; background: var(--text); color: var(--page);
  border-radius: 8px; font-size: 13px; line-height: 1.45;
}
"""

SCRIPT = """
const tip = document.getElementById("tip");
function mark(node, on) {
  document.body.classList.toggle("dim", on ? node !== null : false);
  for (const one of document.querySelectorAll("[data-node]"))
    one.classList.toggle("hot", on ? one.dataset.node === node : false);
}
function show(one, x, y) {
  tip.textContent = one.dataset.tip;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = Math.max(8, Math.min(y + 16, innerHeight - box.height - 8)) + "px";
}
function hide() { tip.style.display = "none"; mark(null, false); }
for (const one of document.querySelectorAll("[data-tip]")) {
  const node = one.dataset.node ?? null;
  one.addEventListener("pointerenter", () => mark(node, true));
  one.addEventListener("pointermove", at => show(one, at.clientX, at.clientY));
  one.addEventListener("pointerleave", hide);
  one.addEventListener("focus", () => {
    const box = one.getBoundingClientRect();
    mark(node, true);
    show(one, box.left, box.bottom);
  });
  one.addEventListener("blur", hide);
}
"""

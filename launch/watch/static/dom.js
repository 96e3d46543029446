// Making elements and asking the server. Text becomes text nodes and nothing else: what a model
// wrote is never parsed as markup.

// A color of style.css, which has others in the dark.
export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const color = (place) => css(`--curve-${place % 7}`);

// el("td", {class: "number"}, "0.5") makes an element; properties named on... are listeners.
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else made[name] = value;
  }
  fill(made, ...children);
  return made;
}

// Replace what an element holds; strings and numbers are shown as text.
export function fill(element, ...children) {
  const shown = children.flat().filter((child) => child !== null && child !== undefined);
  element.replaceChildren(...shown.map((c) => (c instanceof Node ? c : String(c))));
  return element;
}

// What api/NAME says: an object, with `error` where there is nothing to show.
export async function ask(name, keys = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(keys)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") query.append(key, one);
    }
  }
  const answer = await fetch(`api/${name}?${query}`, { cache: "no-store" });
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  return answer.json();
}

export function number(value, digits = 5) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return typeof value === "string" ? value : JSON.stringify(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return String(value);
  return String(Number(value.toPrecision(digits)));
}

export function seconds(value) {
  if (value === null || value === undefined) return "-";
  if (value < 1e-3) return `${number(1e6 * value, 3)} us`;
  return value < 1 ? `${number(1e3 * value, 3)} ms` : `${number(value, 4)} s`;
}

export function mebibytes(value) {
  return value === null || value === undefined ? "-" : `${number(value / 2 ** 20, 4)} MiB`;
}

export function table(head, rows) {
  const top = el("tr", {}, head.map((text) => el("th", {}, text)));
  const below = rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell))));
  return el("table", {}, el("thead", {}, top), el("tbody", {}, below));
}

// A select whose options are [value, text]; it keeps its value where that is still an option.
export function choose(select, options, wanted) {
  const same = select.options.length === options.length &&
    options.every(([value], i) => select.options[i].value === String(value));
  if (!same) fill(select, options.map(([value, text]) => el("option", { value }, text)));
  if (wanted !== undefined && options.some(([value]) => value === wanted)) select.value = wanted;
  return select;
}

export function labeled(text, element) {
  return el("label", {}, `${text} `, element);
}

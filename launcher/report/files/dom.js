// What any of our pages needs: elements, numbers as text, colours, bytes from text.

// An element with attributes and children; texts become text nodes, so nothing in them is markup.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function chooser(label, choices, chosen, act) {
  const select = make("select", { onchange: () => act(select.value) });
  for (const [value, name] of choices) select.append(make("option", { value }, name));
  select.value = chosen;
  return make("label", {}, `${label} `, select);
}

// A number for people: 0.0003, 12.5, 20.1k, 1.2B.
function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "";
  const size = Math.abs(value);
  for (const [unit, scale] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (size >= scale) return `${trim(value / (unit === "k" ? 1e3 : scale))}${unit}`;
  }
  if (size !== 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return trim(value);
}

function trim(value) {
  return String(Number(value.toPrecision(4)));
}

function whole(value) {
  return Math.round(value).toLocaleString("en");
}

function bytesOf(text) {
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i += 1) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

function channels(hex) {
  const number = parseInt(hex.slice(1), 16);
  return [number >> 16, (number >> 8) & 255, number & 255];
}

function mixed(from, to, part) {
  return from.map((channel, i) => Math.round(channel + (to[i] - channel) * part));
}

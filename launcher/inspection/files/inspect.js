// The page: one text at a time; of it attention, experts and the logit lens.

const report = JSON.parse(document.getElementById("data").textContent);
const maps = [];
const state = { text: 0, layer: {}, head: 0, query: null };

function place(part) {
  const found = document.getElementById(`draw-${part}`);
  if (found) found.replaceChildren();
  return found;
}

function wordOf(number) {
  return report.words[number];
}

function named(text, token) {
  return `“${wordOf(text.tokens[token])}” (${token})`;
}

function wordsOf(text) {
  return text.tokens.map(wordOf);
}

function layerChooser(part, layers, redraw) {
  const known = layers.map((each) => String(each.layer));
  if (!known.includes(state.layer[part])) [state.layer[part]] = known.slice(-1);
  const select = chooser("layer", known.map((name) => [name, name]), state.layer[part], (value) => { state.layer[part] = value; redraw(); });
  return [select, layers[known.indexOf(state.layer[part])]];
}

// The weight that a query gives to a key, of a map without the keys after each query.
function weightAt(head, query, key) {
  if (key > query) return 0;
  head.bytes = head.bytes || bytesOf(head.codes);
  const code = head.bytes[(query * (query + 1)) / 2 + key];
  return code === 255 ? null : (code / 254) ** 2;
}

// The weight from which on a map has its strongest colour: that of its 99th percentile.
function strongest(head) {
  const counts = new Array(256).fill(0);
  weightAt(head, 0, 0);
  for (const code of head.bytes) counts[code] += 1;
  let left = 0.01 * (head.bytes.length - counts[255]), code = 254;
  while (code > 8 && (left -= counts[code]) >= 0) code -= 1;
  return (code / 254) ** 2;
}

function drawAttention() {
  const where = place("attention");
  const text = report.texts[state.text];
  if (!where || !text.attention) return;
  const [select, layer] = layerChooser("attention", text.attention, drawAttention);
  const n = text.tokens.length;
  const window = layer.window === null ? "every token sees all before it" : `every token sees itself and ${layer.window - 1} before it`;
  const head = make("p", { class: "remark" }, select, ` ${window}`, layer.right ? "" : "; NOT the model's own weights");
  const strip = make("div", {}), grid = make("div", { class: "grid heads" });
  where.append(head, strip, grid);
  const own = [];
  let heading = null;
  const look = (place, query) => {
    state.head = place;
    state.query = query;
    own.forEach((map, number) => { if (number === place) map.markRow(query); else map.mark.hidden = true; });
    const shown = layer.heads[place];
    line.shadeParts((key) => weightAt(shown, query, key));
    const best = text.tokens.map((_, key) => [weightAt(shown, query, key), key]).filter(([weight, key]) => key <= query && weight > 0.01).sort((a, b) => b[0] - a[0]).slice(0, 3);
    const sink = shown.sinks ? `; its sink takes ${percent(shown.sinks[query])}` : "";
    line.readout.textContent = `head ${shown.head} from ${named(text, query)}: ${best.map(([weight, key]) => `${percent(weight)} to ${named(text, key)}`).join(", ")}${sink}`;
  };
  const line = new Strip(wordsOf(text), { onToken: (query) => look(state.head, query) }, strip);
  layer.heads.forEach((each, number) => {
    const told = (query, key) => (key > query ? `${named(text, key)} comes after ${named(text, query)}` : `${named(text, query)} gives ${percent(weightAt(each, query, key))} to ${named(text, key)}`);
    const hidden = (query, key) => key > query || (layer.window !== null && query - key >= layer.window);
    const most = strongest(each);
    const shade = (weight) => partColor(weight === null ? null : weight / most);
    const colorOf = (query, key) => (hidden(query, key) ? ink("card") : shade(weightAt(each, query, key)));
    const map = new NumberMap({ title: `head ${each.head}`, note: `strongest from ${percent(most)}`, nRows: n, nColumns: n, colorOf, told, onCell: (query) => { line.choose(query); look(number, query); } }, grid);
    own.push(map);
    maps.push(map);
  });
  state.head = Math.min(state.head, layer.heads.length - 1);
  line.choose(Math.min(state.query === null ? n - 1 : state.query, n - 1));
}

function drawRouting() {
  const where = place("experts");
  const text = report.texts[state.text];
  if (!where || !text.routing) return;
  const [select, layer] = layerChooser("experts", text.routing, () => { drawRouting(); drawExpertMaps(); });
  where.append(make("p", { class: "remark" }, select));
  const tell = (token) => {
    const chosen = layer.experts[token].map((expert, i) => [layer.weights[token][i], expert]).sort((a, b) => b[0] - a[0]);
    line.readout.textContent = `${named(text, token)}: ${chosen.map(([weight, expert]) => `expert ${expert} weighs ${short(weight)}`).join(", ")}`;
  };
  const order = (token) => layer.experts[token].map((expert, i) => [layer.weights[token][i], expert]).sort((a, b) => b[0] - a[0]).map(([, expert]) => expert);
  const line = new Strip(wordsOf(text), { onToken: tell, under: (token) => order(token).slice(0, 4).join(" ") }, where);
  line.shadeKinds((token) => order(token)[0]);
  line.choose(text.tokens.length - 1);
}

function loadColor(load) {
  if (load === 0) return ink("cold");
  const doublings = Math.max(-2, Math.min(2, Math.log2(load)));
  return mixed(ink("even"), ink(doublings < 0 ? "cold" : "hot"), Math.abs(doublings) / 2);
}

function drawPairs(layer, n, where) {
  const most = Math.max(...layer.pairs.flatMap((row, one) => row.filter((_, other) => other !== one).map((both) => both / Math.max(1, row[one]))), 1e-9);
  const part = (one, other) => layer.pairs[one][other] / Math.max(1, layer.pairs[one][one]);
  const toldPair = (one, other) => (one === other ? `expert ${one}: ${whole(layer.counts[one])} tokens` : `experts ${one} and ${other}: ${whole(layer.pairs[one][other])} tokens, ${percent(part(one, other))} of those of expert ${one}`);
  const pairColor = (one, other) => (one === other ? ink("card") : partColor(part(one, other) / most));
  maps.push(new NumberMap({ title: `Layer ${layer.layer}: experts chosen together`, note: `of the tokens of the expert down, the part that goes to that across, too; the strongest colour is ${percent(most)}`, nRows: n, nColumns: n, colorOf: pairColor, told: toldPair }, where));
}

function drawExpertMaps() {
  const where = document.getElementById("experts-maps");
  if (!where || !report.experts) return;
  where.replaceChildren();
  const { layers, sources, n_experts: n } = report.experts;
  const layer = layers.find((each) => String(each.layer) === state.layer.experts) || layers[layers.length - 1];
  const sums = layer.source_counts.map((counts) => Math.max(1, counts.reduce((a, b) => a + b, 0)));
  const load = (source, expert) => (layer.source_counts[source][expert] * n) / sums[source];
  const toldLoad = (source, expert) => `${sources[source]}, expert ${expert}: ${whole(layer.source_counts[source][expert])} tokens, ${short(load(source, expert))} times an even share`;
  if (layer.pairs) drawPairs(layer, n, where);
  else where.append(make("p", { class: "remark" }, `Which experts layer ${layer.layer} chooses together is left out here for its size; --json has it.`));
  maps.push(new NumberMap({ title: `Layer ${layer.layer}: load of each expert by source`, note: `blue: less than an even share, orange: more; experts across, down ${sources.length > 8 ? "sources" : sources.join(", ")}`, nRows: sources.length, nColumns: n, colorOf: (source, expert) => loadColor(load(source, expert)), told: toldLoad, height: Math.max(48, 28 * sources.length) }, where));
}

function drawLens() {
  const where = place("lens");
  const text = report.texts[state.text];
  if (!where || !text.lens) return;
  const n = text.tokens.length, rows = text.lens, top = rows.length - 1;
  const nameOf = (row) => (rows[row].layer === null ? "the embedding" : `layer ${rows[row].layer}`);
  const next = (row, token) => (token < n - 1 ? rows[row].next[token] : null);
  const strip = make("div", {}), mapPlace = make("div", {}), scroll = make("div", { class: "scroll", tabindex: "0" });
  where.append(strip, mapPlace, make("h3", { id: "lens-title" }), scroll);
  const told = (row, token) => (token < n - 1 ? `after ${nameOf(top - row)}, “${wordOf(text.tokens[token + 1])}” after ${named(text, token)} has ${percent(next(top - row, token))}, place ${whole(rows[top - row].rank[token])}` : `${named(text, token)} is the text's last token`);
  const map = new NumberMap({ title: "Probability of the next token", note: `${nameOf(top)} on top, ${nameOf(0)} at the bottom`, nRows: rows.length, nColumns: n, colorOf: (row, token) => partColor(next(top - row, token)), told, height: Math.max(80, Math.min(420, 18 * rows.length)), onCell: (_, token) => line.choose(token) }, mapPlace);
  maps.push(map);
  const tell = (token) => {
    map.markColumn(token);
    const known = token < n - 1;
    document.getElementById("lens-title").textContent = known ? `After ${named(text, token)}; in the text “${wordOf(text.tokens[token + 1])}” follows` : `After ${named(text, token)}, where the text ends`;
    const titles = ["after", ...(known ? ["next token", "place"] : []), "likeliest tokens"];
    const head = make("thead", {}, make("tr", {}, ...titles.map((title) => make("th", { scope: "col" }, title))));
    const lines = rows.map((row, number) => {
      const likeliest = row.top[token].map((word, i) => make("span", { class: known && word === text.tokens[token + 1] ? "guess right" : "guess", style: `--part:${Math.round(55 * Math.sqrt(row.p[token][i] || 0))}%` }, make("span", {}, wordOf(word)), make("small", {}, percent(row.p[token][i]))));
      const own = known ? [make("td", {}, percent(row.next[token])), make("td", {}, whole(row.rank[token]))] : [];
      return make("tr", {}, make("th", { scope: "row" }, row.layer === null ? "embedding" : `layer ${row.layer}`), ...own, make("td", { class: "guesses" }, ...likeliest));
    }).reverse();
    scroll.replaceChildren(make("table", {}, head, make("tbody", {}, ...lines)));
    line.readout.textContent = known ? told(0, token) : "";
  };
  const line = new Strip(wordsOf(text), { onToken: tell }, strip);
  line.shadeParts((token) => (token ? next(top, token - 1) : 0));
  line.choose(Math.max(0, n - 2));
}

function drawAll() {
  maps.length = 0;
  drawAttention();
  drawRouting();
  drawExpertMaps();
  drawLens();
  document.documentElement.dataset.drawn = String(maps.length);
}

function fillToolbar(bar) {
  if (report.texts.length < 2) return bar.remove();
  const names = report.texts.map((text, number) => [String(number), text.name]);
  bar.append(chooser("text", names, "0", (value) => { state.text = Number(value); state.query = null; drawAll(); }));
}

function redrawAll() {
  for (const map of maps) map.redraw();
}

fillToolbar(document.getElementById("toolbar"));
drawAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light"; redrawAll(); });
addEventListener("afterprint", () => { delete document.documentElement.dataset.theme; redrawAll(); });

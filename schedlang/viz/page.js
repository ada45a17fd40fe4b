// Times and draws the packed timelines of a page: schedlang/pipeline/timeline/packed.py writes them.
"use strict";

const FIRST = 40;
const USUAL = { kind: 0, stage: 0, microbatch: 0, replica: 0, slice: 0, version: 0, peer: -1 };

/** Columns of numbers from a packed timeline. */
function unpack(packed) {
  const count = packed.rows.reduce((a, b) => a + b, 0);
  const t = { ranks: packed.rows.length, stages: packed.stages, count, rank: [], starts: [0] };
  packed.rows.forEach((n, rank) => {
    for (let k = 0; k < n; k++) t.rank.push(rank);
    t.starts.push(t.rank.length);
  });
  for (const [name, usual] of Object.entries(USUAL))
    t[name] = packed[name] ? Array.from(packed[name], (c) => c.charCodeAt(0) - FIRST + usual)
                           : new Array(count).fill(usual);
  t.edges = packed.edges || Array.from({ length: packed.stages - 1 }, (_, s) => [s, s + 1]);
  t.extra = packed.extra || [];
  t.copies = packed.copies || [];
  t.peak = packed.peak;
  t.shares = packed.shares || new Array(t.stages).fill(1);
  for (const name of ["microbatch", "replica", "slice"])
    t[name + "s"] = t[name].reduce((a, b) => Math.max(a, b), 0) + 1;
  t.parts = packed.parts || new Array(t.slices).fill(1);
  return t;
}

/** For each row the [row, lag] that it needs, of other ranks and of other streams. */
function needs(t, comm) {
  const found = Array.from({ length: t.count }, () => []);
  const key = (back, s, k) => [back, s, t.microbatch[k], t.replica[k], t.slice[k]].join();
  const where = new Map();
  for (let k = 0; k < t.count; k++)
    if (t.kind[k] < 3) where.set(key(t.kind[k] > 0, t.stage[k], k), k);
  for (let k = 0; k < t.count; k++) {
    if (t.kind[k] > 2) continue;
    const back = t.kind[k] > 0;
    for (const [a, b] of t.edges) {
      const [mine, other] = back ? [a, b] : [b, a];
      const made = mine === t.stage[k] ? where.get(key(back, other, k)) : undefined;
      if (made !== undefined && t.rank[made] !== t.rank[k]) found[k].push([made, (comm * t.parts[t.slice[k]]) / t.slices]);
    }
  }
  for (const [made, used] of t.extra) found[used].push([made, 0]);
  return found;
}

/** What each row takes; costs are of one microbatch on one rank's whole share. */
function durations(t, cost) {
  const part = t.ranks / t.stages / t.slices;
  const of = { 0: cost.f, 1: cost.i + cost.w, 2: cost.i, 3: cost.w, 8: cost.f };
  return t.kind.map(
    (kind, k) => (of[kind] || 0) * part * t.shares[t.stage[k]] * t.parts[t.slice[k]]);
}

/** Start and end of every row: each rank in its order, as early as its inputs are there. */
function timed(t, cost) {
  const wants = needs(t, cost.comm), lasts = durations(t, cost);
  const start = new Array(t.count).fill(0), end = new Array(t.count).fill(-1);
  const at = t.starts.slice(0, -1), waiting = new Map(), stack = at.map((_, rank) => rank);
  const free = at.map(() => 0), copied = at.map(() => 0);
  while (stack.length) {
    const rank = stack.pop();
    for (; at[rank] < t.starts[rank + 1]; at[rank]++) {
      const row = at[rank], missing = wants[row].find(([made]) => end[made] < 0);
      if (missing) {
        waiting.set(missing[0], [...(waiting.get(missing[0]) || []), rank]);
        break;
      }
      const copy = t.copies.includes(t.kind[row]); // runs beside the computing of its rank
      start[row] = Math.max(free[rank], copy ? copied[rank] : 0,
        ...wants[row].map(([made, lag]) => end[made] + lag));
      end[row] = start[row] + lasts[row];
      (copy ? copied : free)[rank] = end[row];
      stack.push(...(waiting.get(row) || []));
      waiting.delete(row);
    }
  }
  return { start, end };
}

/** Makespan and longest time of a rank, and the idle shares of both. */
function figures(t, times) {
  let makespan = 0, span = 0, busy = 0;
  for (let rank = 0; rank < t.ranks; rank++) {
    let first = Infinity, last = 0;
    for (let k = t.starts[rank]; k < t.starts[rank + 1]; k++) {
      [first, last] = [Math.min(first, times.start[k]), Math.max(last, times.end[k])];
      busy += (times.end[k] - times.start[k]) / t.ranks;
    }
    [makespan, span] = [Math.max(makespan, last), Math.max(span, last - first)];
  }
  const bubble = makespan ? 1 - busy / makespan : 0, spanBubble = span ? 1 - busy / span : 0;
  return { makespan, span, bubble, spanBubble };
}

// -- the page --------------------------------------------------------------------------------------

const ROW = 26, BLOCK = 22, LEFT = 58;

function svgNode(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function put(parent, name, attributes, text) {
  return parent.appendChild(svgNode(name, attributes, text));
}

/** The place of each row's stage among those of its rank and replica. */
function levels(t) {
  const own = Array.from({ length: t.ranks * t.replicas }, () => new Set());
  const at = (k) => own[t.rank[k] * t.replicas + t.replica[k]];
  for (let k = 0; k < t.count; k++) at(k).add(t.stage[k]);
  const sorted = own.map((stages) => [...stages].sort((a, b) => a - b));
  return t.rank.map((rank, k) => sorted[rank * t.replicas + t.replica[k]].indexOf(t.stage[k]));
}

function named(t, k, book) {
  const parts = [book.looks[t.kind[k]].word, `stage ${t.stage[k]}`];
  if (t.kind[k] < 18) parts.push(`microbatch ${t.microbatch[k]}`);
  if (t.slices > 1) parts.push(`slice ${t.slice[k]}`);
  if (t.replicas > 1) parts.push(`replica ${t.replica[k]}`);
  if (t.version[k]) parts.push(`version ${t.version[k]}`);
  return parts.join(", ");
}

function draw(svg, t, times, book, options) {
  const end = times.end.reduce((a, b) => Math.max(a, b), 1e-9);
  const wide = Math.max(300, options.width - LEFT - 12), scale = wide / end;
  const level = levels(t), most = level.reduce((a, b) => Math.max(a, b), 0);
  while (svg.firstChild) svg.removeChild(svg.firstChild);
  svg.setAttribute("viewBox", `0 0 ${LEFT + wide + 12} ${t.ranks * ROW + 4}`);
  svg.setAttribute("height", t.ranks * ROW + 4);
  const defs = put(svg, "defs", {});
  const hatch = put(defs, "pattern", { id: "replica", width: 6, height: 6,
    patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  put(hatch, "path", { d: "M0 0V6", stroke: "#111", "stroke-width": 1.6, "stroke-opacity": .45 });
  for (let rank = 0; rank < t.ranks; rank++) {
    put(svg, "text", { x: 4, y: rank * ROW + 16 }, `${book.who}${rank}`);
    put(svg, "rect", { class: "lane", x: LEFT, y: rank * ROW, width: wide, height: BLOCK });
  }
  for (let k = 0; k < t.count; k++) block(svg, t, times, k, scale, book, most && level[k] / most);
  if (options.transfers) lines(svg, t, times, scale);
}

/** A colour of which so much is left, the rest white. */
function mixed(colour, part) {
  const full = [1, 3, 5].map((k) => parseInt(colour.slice(k, k + 2), 16));
  return `rgb(${full.map((one) => Math.round(255 - (255 - one) * part)).join()})`;
}

function block(svg, t, times, k, scale, book, high) {
  const x = LEFT + times.start[k] * scale, y = t.rank[k] * ROW;
  const width = (times.end[k] - times.start[k]) * scale, look = book.looks[t.kind[k]];
  if (width <= 0) {
    const shape = look.shape.replace("{x}", x.toFixed(1)).replace("{a}", y + 4);
    const d = shape.replace("{b}", y + 18).replace("{top}", y);
    put(put(svg, "path", { class: "k", d, fill: look.fill }), "title", {}, named(t, k, book));
    return;
  }
  const box = { x: x.toFixed(2), y, width: width.toFixed(2), height: BLOCK };
  const fill = mixed(look.fill, 1 - (1 - book.faintest) * high);
  const rect = put(svg, "rect", { class: "b", ...box, fill });
  put(rect, "title", {}, named(t, k, book));
  if (t.replica[k])
    put(svg, "rect", { ...box, fill: "url(#replica)", "pointer-events": "none" });
  const words = t.slices > 1 ? `${t.microbatch[k]}.${t.slice[k]}` : `${t.microbatch[k]}`;
  if (width >= 6.5 * words.length + 4)
    put(svg, "text", { class: "op", x: (x + width / 2).toFixed(1), y: y + 15 }, words);
}

function lines(svg, t, times, scale) {
  const path = { way: "", "way back": "" };
  needs(t, 0).forEach((wants, used) => wants.forEach(([made]) => {
    if (t.rank[made] === t.rank[used]) return;
    const [a, b] = [t.rank[made] * ROW, t.rank[used] * ROW], down = b > a;
    const x1 = LEFT + times.end[made] * scale, x2 = LEFT + times.start[used] * scale;
    path[t.kind[made] ? "way back" : "way"] +=
      `M${x1.toFixed(1)} ${a + (down ? BLOCK : 0)}L${x2.toFixed(1)} ${b + (down ? 0 : BLOCK)}`;
  }));
  for (const [name, d] of Object.entries(path)) if (d) put(svg, "path", { class: name, d });
}

const percent = (x) => (100 * x).toFixed(1) + " %", short = (x) => +x.toPrecision(4);

/** What the page shows now; `entries` are all timelines by name, ranks, microbatches, variant. */
class Page {
  constructor(book) {
    this.book = book;
    this.cache = new Map();
    for (const id of ["order", "ranks", "micro", "variant", "f", "i", "w", "comm", "transfers"]) {
      this[id] = document.getElementById(id);
      this[id].addEventListener("input", () => this.show());
    }
    for (const key of ["f", "i", "w", "comm"]) this[key].value = book.cost[key];
    this.fill(this.order, [...new Set(book.entries.map((e) => e.order))], book.first.order);
    this.want = { ...book.first };
    window.addEventListener("resize", () => this.show());
    this.show();
  }

  fill(select, values, chosen) {
    const kept = values.map(String).includes(String(chosen)) ? chosen : values[0];
    const same = [...select.options].map((o) => o.value).join("\n") === values.join("\n");
    if (!same) {
      while (select.options.length) select.remove(0);
      for (const value of values) select.add(new Option(value, value));
    }
    select.value = kept;
    return kept;
  }

  /** The entry that is chosen; what an order does not offer goes to what it does. */
  entry() {
    let left = this.book.entries.filter((e) => e.order === this.order.value);
    for (const key of ["ranks", "micro", "variant"]) {
      const values = [...new Set(left.map((e) => e[key]))];
      const asked = this[key].options.length ? this[key].value : this.want[key];
      const chosen = this.fill(this[key], values, asked);
      left = left.filter((e) => String(e[key]) === String(chosen));
    }
    this.variant.parentNode.hidden = this.variant.options.length < 2;
    return left[0];
  }

  timeline(entry) {
    if (!this.cache.has(entry)) this.cache.set(entry, unpack(entry.timeline));
    return this.cache.get(entry);
  }

  cost() {
    const read = (id) => Math.max(0, Number(this[id].value) || 0);
    return { f: read("f"), i: read("i"), w: read("w"), comm: read("comm") };
  }

  show() {
    const entry = this.entry(), t = this.timeline(entry), cost = this.cost();
    const times = timed(t, cost), now = figures(t, times);
    const svg = document.getElementById("drawing");
    const width = Math.max(600, document.getElementById("frame").clientWidth || 1100);
    draw(svg, t, times, this.book, { width, transfers: this.transfers.checked });
    document.getElementById("source").textContent = this.book.sources[entry.order] || "";
    document.getElementById("told").textContent =
      `makespan ${this.took(now.makespan)}, bubble ${percent(now.bubble)}; longest rank ` +
      `${this.took(now.span)}, bubble ${percent(now.spanBubble)}; most live activations ` +
      `${short(Math.max(...t.peak))}`;
    this.memory(t.peak);
    this.compare(entry, cost);
  }

  /** A time with its unit. */
  took(time) {
    return `${short(time)} ${this.book.unit}`.trim();
  }

  memory(peak) {
    const body = document.getElementById("peaks"), most = Math.max(...peak, 1e-9);
    while (body.firstChild) body.removeChild(body.firstChild);
    peak.forEach((value, rank) => {
      const row = body.appendChild(document.createElement("tr"));
      row.appendChild(document.createElement("td")).textContent = `${this.book.who}${rank}`;
      row.appendChild(document.createElement("td")).textContent = short(value);
      const bar = row.appendChild(document.createElement("td"));
      bar.appendChild(document.createElement("div")).style.width = `${(200 * value) / most}px`;
    });
  }

  /** Every order at these sizes, the least idle first. */
  compare(entry, cost) {
    const body = document.getElementById("others");
    while (body.firstChild) body.removeChild(body.firstChild);
    const alike = this.book.entries.filter(
      (e) => e.ranks === entry.ranks && e.micro === entry.micro);
    const rows = alike.map((e) => [e, figures(this.timeline(e), timed(this.timeline(e), cost))]);
    rows.sort((a, b) => a[1].bubble - b[1].bubble);
    for (const [e, found] of rows) {
      const row = body.appendChild(document.createElement("tr"));
      if (e === entry) row.className = "now";
      const cells = [e.order, e.variant, this.took(found.makespan), percent(found.bubble),
        percent(found.spanBubble), short(Math.max(...this.timeline(e).peak))];
      for (const text of cells) row.appendChild(document.createElement("td")).textContent = text;
      row.addEventListener("click", () => {
        this.order.value = e.order;
        this.fill(this.variant, [e.variant], e.variant);
        this.show();
      });
    }
  }
}

/** The data of the page: deflated JSON in base64. */
async function book(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

if (typeof document !== "undefined")
  book(document.getElementById("data").textContent.trim()).then((found) => {
    window.page = new Page(found);
  });
if (typeof module !== "undefined") module.exports = { unpack, needs, timed, figures, book };

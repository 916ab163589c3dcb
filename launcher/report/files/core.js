// What the other parts share: the data, the page's settings, runs' colours, places on the x axis.

const report = JSON.parse(document.getElementById("data").textContent);
const runs = report.runs;
const settings = { axis: "steps", smoothing: 0.02, hidden: new Set(), range: null };
const charts = [];  // each has redraw(), and where it has an x axis setRange(range)

const N_COLORS = 7;
const DASHES = [[], [8, 4], [2, 3], [8, 3, 2, 3]];

function runColor(number) {
  return color(`run-${number % N_COLORS}`);
}

function runDash(number) {
  return DASHES[Math.floor(number / N_COLORS) % DASHES.length];
}

// Where a run's buckets lie on the x axis.
function placesOf(run) {
  if (settings.axis !== "steps") return run[settings.axis] || [];
  return run.first.map((first, i) => (first + run.last[i]) / 2);
}

// Where a step of the run lies on the x axis: between its neighbours, where the axis is not steps.
function placeOf(run, step) {
  if (settings.axis === "steps") return step;
  const places = run[settings.axis];
  if (!places || !places.length) return null;
  const next = firstFrom(run.last, step);
  if (next >= places.length) return places[places.length - 1];
  const [from, to] = next ? [run.last[next - 1], run.last[next]] : [0, run.last[0]];
  const before = next ? places[next - 1] : 0;
  return before + ((places[next] - before) * (step - from)) / Math.max(1, to - from);
}

// The index of the first of the rising numbers that is at least `value`.
function firstFrom(numbers, value) {
  let low = 0, high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

function nearest(numbers, value) {
  const next = firstFrom(numbers, value);
  if (next === 0) return 0;
  return next === numbers.length || value - numbers[next - 1] < numbers[next] - value ? next - 1 : next;
}

// From the first to the last place of any run that is shown.
function wholeRange() {
  let low = Infinity, high = -Infinity;
  for (const run of runs) {
    if (!run.updates) continue;
    const ends = settings.axis === "steps" ? run.last : placesOf(run);
    if (!ends.length) continue;
    low = Math.min(low, settings.axis === "steps" ? run.first[0] : ends[0]);
    high = Math.max(high, ends[ends.length - 1]);
  }
  if (low > high) return [0, 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}

function setRange(range) {
  settings.range = range;
  for (const chart of charts) if (chart.setRange) chart.setRange(range || wholeRange());
  document.getElementById("whole").disabled = range === null;
}

function axisName() {
  return { steps: "step", tokens: "tokens", hours: "hours in steps" }[settings.axis];
}

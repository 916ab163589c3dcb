// What happened when: a lane for each kind of event, a stroke for each place of it, in its run's colour.

const SVG = "http://www.w3.org/2000/svg";

function shape(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

class TimeLine {
  constructor(place) {
    this.place = place;
    this.redraw();
  }

  setRange() {
    this.redraw();
  }

  redraw() {
    const [low, high] = settings.range || wholeRange();
    const told = settings.axis === "steps" ? whole : short;
    const ticks = make("p", { class: "ends" }, make("span", {}, told(low)), make("span", {}, axisName()), make("span", {}, told(high)));
    const lanes = Object.keys(report.tones).map((kind) => this.lane(kind, low, high)).filter((lane) => lane !== null);
    this.place.replaceChildren(...lanes, ...(lanes.length ? [ticks] : []));
  }

  lane(kind, low, high) {
    const svg = shape("svg", { viewBox: "0 0 1000 24", preserveAspectRatio: "none", "aria-hidden": "true" });
    let count = 0;
    runs.forEach((run, number) => {
      const steps = run.events[kind];
      if (!steps || settings.hidden.has(number)) return;
      const [top, bottom] = [(24 * number) / runs.length, (24 * (number + 1)) / runs.length];
      for (const step of steps) {
        const place = placeOf(run, step);
        if (place === null || place < low || place > high) {
          if (!(run.updates === 0 || (step === 0 && low <= 1.5))) continue;
        }
        count += 1;
        const x = Math.max(2, Math.min(998, (1000 * (place - low)) / (high - low || 1)));
        const line = shape("line", { x1: x, x2: x, y1: top + 1, y2: bottom - 1, class: `run-${number % N_COLORS}`, "vector-effect": "non-scaling-stroke" });
        const title = shape("title", {});
        title.textContent = `${runs.length > 1 ? `${run.name}, ` : ""}step ${whole(step)}: ${kind}`;
        line.append(title);
        svg.append(line);
      }
    });
    if (!count) return null;
    const label = make("span", { class: `kind ${report.tones[kind]}` }, kind.replaceAll("_", " "));
    return make("div", { class: "lane" }, label, make("small", {}, whole(count)), svg);
  }
}
